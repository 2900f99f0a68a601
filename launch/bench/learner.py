"""`python -m launch.bench learner`: the cost of gradients on this machine's CPU, beside peers.

All sides have the same weights, tokens and loss: GRPO at ratio 1 without a KL term, a mean over all
tokens, and no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from flax import nnx

from configs.schema import Config
from launch.bench.harness import CPU_ONLY, Benchmark, Bound, Row, Section, medians
from launch.bench.small_gemma import (
    SMALL,
    preset,
    random_adapter,
    random_weights,
    small_config,
    small_policy,
)
from launch.bench.small_gemma import VOCABULARY as SMALL_VOCABULARY
from launch.bench.tunix import PAD, Peer, train_example
from pipeline.compute.learner.batches import DeviceBatch, place_inputs
from pipeline.compute.learner.losses import weighted_sum
from pipeline.compute.learner.programs import LearnerPrograms
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.remat import Remat
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.compute.opening import open_model
from pipeline.data.batching import micro_batches, token_weights
from pipeline.plan.cost_model.workload import completion_lengths
from pipeline.types import NO_TEXT, Completion, Rollout, RolloutName, Segment

BODY: dict[str, Any] = SMALL | {
    "vocab_size": 262_144,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 256,
    "sliding_window": 128,
}
"""`config.json` of a small body with the real vocabulary."""
PROMPT, COMPLETION = 256, 768
VOCABULARY = Vocabulary(pad=0, stops=(1,), forbidden=())
"""Tunix's loss forbids no token."""
ROOM = 0.8
"""Share of the free memory that a program may use."""


@dataclass(frozen=True)
class Gradient:
    """A compiled gradient of a step.

    Attributes:
        run: returns the gradient of each LoRA matrix, by path, when it is computed.
        temporary_bytes: of the program.
        positions: that it computes, padding included.
    """

    run: Callable[[], Mapping[str, jax.Array]]
    temporary_bytes: int
    positions: int


@dataclass(frozen=True)
class Case:
    """A policy and the rollouts of a step.

    Attributes:
        config: sizes of rows and micro-batches, temperature and loss.
        policy: the model.
        vocabulary: its special tokens.
        base: its parameters.
        adapter: a non-zero LoRA.
        rollouts: with prompts of one length.
    """

    config: Config
    policy: Policy
    vocabulary: Vocabulary
    base: Params
    adapter: Params
    rollouts: Sequence[Rollout]

    @cached_property
    def programs(self) -> LearnerPrograms:
        """Our programs."""
        return LearnerPrograms(self.policy, self.config, self.vocabulary)

    @cached_property
    def batches(self) -> list[DeviceBatch]:
        """The packed micro-batches."""
        settings = self.config.learner.variant.token_weights
        budget = self.config.rollout.max_new_tokens
        packed = micro_batches(
            self.rollouts,
            shape=self.programs.shape,
            weights=token_weights(self.rollouts, settings, budget=budget),
            keep_zero_advantage=True,
        )
        placed = [(place_inputs(batch, self.policy.mesh), batch.advantages) for batch in packed]
        return [
            DeviceBatch(inputs, jax.device_put(advantages, inputs.tokens.sharding))
            for inputs, advantages in placed
        ]

    def ours(self) -> Gradient:
        """Compiles our gradient program for each shape of the micro-batches."""
        zeros = jax.tree.map(jnp.zeros_like, self.adapter)
        program = self.policy.jit(self.programs.gradient)
        compiled: dict[tuple[int, ...], jax.stages.Compiled] = {
            shape: program.lower(self.base, self.adapter, zeros, batch).compile()
            for shape, batch in {batch.advantages.shape: batch for batch in self.batches}.items()
        }

        def run() -> Params:
            total = zeros
            for batch in self.batches:
                program = compiled[batch.advantages.shape]
                total, _, _ = program(self.base, self.adapter, total, batch)
            return jax.block_until_ready(total)

        return Gradient(
            run,
            max(map(_temporary_bytes, compiled.values())),
            sum(batch.advantages.size for batch in self.batches),
        )

    def theirs(self, *, remat: bool = False) -> Gradient:
        """Compiles Tunix's gradient program: a row for each rollout, padded to the longest.

        Args:
            remat: recompute layers; its recipes do not.
        """
        peer = Peer.create(
            self.policy.architecture.config,
            self.config.lora,
            temperature=self.config.rollout.temperature,
            remat=remat,
        )
        longest = max(len(rollout.completion.tokens) for rollout in self.rollouts)
        completions = np.full((len(self.rollouts), longest), PAD, np.int32)
        for row, rollout in zip(completions, self.rollouts, strict=True):
            row[: len(rollout.completion.tokens)] = rollout.completion.tokens
        example = train_example(
            jnp.stack([rollout.completion.prompt_tokens for rollout in self.rollouts]),
            jnp.asarray(completions),
            jnp.asarray([rollout.advantage for rollout in self.rollouts], jnp.float32),
        )
        given = (*peer.with_values({**self.base, **self.adapter}), example)
        program = jax.jit(peer.gradient).lower(*given).compile()

        def run() -> dict[str, jax.Array]:
            _, gradient = jax.block_until_ready(program(*given))
            flat = nnx.to_flat_state(gradient)
            return {".".join(map(str, path)): leaf[...] for path, leaf in flat}

        positions = example.prompt_ids.size + completions.size
        return Gradient(run, _temporary_bytes(program), positions)

    def materialised(self) -> Params:
        """Returns the gradient of REINFORCE (GRPO at ratio 1) with the same body and whole logits.

        Logits are float32 for every dtype of the body.
        """
        (batch,), plan = self.batches, self.config.plan

        def loss(adapter: Params) -> jax.Array:
            hidden, _ = self.policy.bind(self.base, adapter, exact=True)(
                batch.inputs.tokens,
                batch.inputs.positions,
                attend=self.programs.attention(batch.inputs),
                remat=Remat(plan.remat, plan.layer_tokens),
            )
            embedding = self.policy.embedding(self.base)
            logits = jnp.einsum(
                "rsd,vd->rsv", hidden, embedding, preferred_element_type=jnp.float32
            )
            logprobs = jax.nn.log_softmax(logits / self.config.rollout.temperature)
            targets = batch.inputs.targets[..., None]
            taken = jnp.take_along_axis(logprobs, targets, axis=-1)[..., 0]
            return weighted_sum(-taken * batch.advantages, batch.inputs.weights)

        gradient: Params = jax.jit(jax.grad(loss))(self.adapter)
        return gradient


def _temporary_bytes(program: jax.stages.Compiled) -> int:
    memory = program.memory_analysis()
    assert memory is not None
    return int(memory.temp_size_in_bytes)


def wide_case(*, sequences: int, dtype: str) -> Case:
    """`BODY` with random weights and sequences of the same length, the same at each call."""
    row = PROMPT + COMPLETION
    config = preset(
        "demo",
        model__dtype=dtype,
        lora__rank=8,
        lora__alpha=16.0,
        rollout__max_prompt_tokens=PROMPT,
        rollout__max_new_tokens=COMPLETION,
        rollout__temperature=0.9,
        learner__token_weights="token",
        plan__learner_devices=1,
        plan__row_tokens=row,
        plan__micro_batch_tokens=sequences * row,
    )
    shape = architecture(BODY, dtype=jnp.dtype(dtype))
    policy = Policy(shape, lora=config.lora, mesh=make_mesh(jax.devices()[:1]))
    base, adapter = random_weights(policy, np.random.default_rng(0), scales={})
    lengths = [COMPLETION] * sequences
    rollouts = random_rollouts(lengths, prompt=PROMPT, prompts=sequences, vocab=BODY["vocab_size"])
    return Case(config, policy, VOCABULARY, base, adapter, rollouts)


def random_rollouts(
    lengths: Sequence[int], *, prompt: int, prompts: int, vocab: int
) -> list[Rollout]:
    """Returns rollouts with random tokens and advantages, the same at each call.

    Args:
        lengths: tokens of each completion.
        prompt: tokens of each prompt.
        prompts: different prompts, which take turns.
        vocab: size of the vocabulary.
    """
    rng = np.random.default_rng(0)

    def random_tokens(count: int) -> np.ndarray:
        return rng.integers(8, vocab, count).astype(np.int32)

    texts = [random_tokens(prompt) for _ in range(prompts)]
    return [
        Rollout(
            Completion(
                name=RolloutName("train", 0, prompt_id=number % prompts, sample=number // prompts),
                prompt_tokens=texts[number % prompts],
                segments=(Segment(random_tokens(length), np.zeros(length, np.float32), 0, ""),),
                stop_reason="length",
            ),
            NO_TEXT,
            {},
            0.0,
            float(rng.standard_normal()),
        )
        for number, length in enumerate(lengths)
    ]


def memory_and_time(*, sequences: int, repeats: int) -> dict[str, Any]:
    """Returns temporaries, time and difference of both gradients in float32, alternating.

    Programs that need too much memory are compiled, but not run.
    """
    case = wide_case(sequences=sequences, dtype="float32")
    ours, theirs = case.ours(), case.theirs()
    found: dict[str, Any] = {
        "ours_mib": ours.temporary_bytes / 2**20,
        "theirs_mib": theirs.temporary_bytes / 2**20,
        "memory_ratio": theirs.temporary_bytes / ours.temporary_bytes,
    }
    room = ROOM * psutil.virtual_memory().available
    if max(ours.temporary_bytes, theirs.temporary_bytes) > room:
        return found | {"not_run": "yes"}
    found["apart"] = apart(ours.run(), theirs.run())
    seconds = medians({"ours_s": ours.run, "theirs_s": theirs.run}, repeats=repeats)
    return found | seconds | {"time_ratio": seconds["theirs_s"] / seconds["ours_s"]}


def exactness(*, sequences: int, dtype: str) -> dict[str, Any]:
    """Returns the error of the LoRA's gradient against whole logits, for the worst leaf.

    Also the errors of both against whole logits in float32 at the same values: the cost of the
    dtype, independent of the implementation.
    """
    case = wide_case(sequences=sequences, dtype=dtype)
    ours, whole = case.ours().run(), case.materialised()
    found = {"tokens": sequences * (PROMPT + COMPLETION), "apart": apart(ours, whole)}
    if dtype == "float32":
        return found

    def widened(params: Params) -> Params:
        return {name: x.astype(dtype).astype(jnp.float32) for name, x in params.items()}

    wide = wide_case(sequences=sequences, dtype="float32")
    exact = replace(wide, base=widened(case.base), adapter=widened(case.adapter)).materialised()
    rounded = {"ours_rounded": apart(ours, exact), "whole_rounded": apart(whole, exact)}
    ratio = rounded["ours_rounded"] / rounded["whole_rounded"]
    return {**found, **rounded, "rounded_ratio": ratio}


def apart(one: Mapping[str, jax.Array], other: Mapping[str, jax.Array]) -> float:
    """Returns the largest |one - other| / |other| of a leaf, in Euclidean norms."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    exact = {name: np.asarray(value, np.float64) for name, value in other.items()}
    return max(
        float(np.linalg.norm(np.asarray(one[name], np.float64) - value) / np.linalg.norm(value))
        for name, value in exact.items()
    )


def shared_prompts(*, prompt: int, mean: int, cap: int, group: int, repeats: int) -> dict[str, Any]:
    """Returns figures of a step of four groups, in one pass: shared and separate prompts, Tunix."""
    # Four of the longest sequences, so that separate prompts have little padding.
    prompts, row = 4, 4 * (prompt + cap)

    def with_prompts(*, share: bool, rows: int) -> Config:
        return small_config(
            rollout__group_size=group,
            rollout__max_prompt_tokens=prompt,
            rollout__max_new_tokens=cap,
            plan__segment_steps=1,
            plan__prefill_tokens=prompt,
            plan__row_tokens=row,
            plan__micro_batch_tokens=rows * row,
            learner__token_weights="token",
            learner__share_prefix=str(share).lower(),
        )

    config = small_config()
    policy, base, adapter = small_policy(config)
    lengths = completion_lengths(prompts * group, mean=mean, cap=cap)
    rollouts = random_rollouts(lengths, prompt=prompt, prompts=prompts, vocab=SMALL["vocab_size"])
    case = Case(config, policy, SMALL_VOCABULARY, base, adapter, rollouts)
    gradients = {"tunix": case.theirs()}
    for name, share in (("shared", True), ("separate", False)):
        single_rows = replace(case, config=with_prompts(share=share, rows=1))
        one_pass = with_prompts(share=share, rows=len(single_rows.batches))
        gradients[name] = replace(case, config=one_pass).ours()
    return _beside_shared(gradients, repeats=repeats)


def shared_prompts_of(*, config: str, prompt: int, mean: int, repeats: int) -> dict[str, Any]:
    """Returns figures of a whole update of a preset, with shared and with separate prompts.

    Args:
        config: name of the preset.
        prompt: tokens of each prompt.
        mean: tokens of a completion, on average; at most `rollout.max_new_tokens`.
        repeats: runs of each.
    """
    shared = preset(config)
    rollout, plan = shared.rollout, shared.plan
    # Four of the longest sequences in a row, and micro-batches of about the same size.
    row = 4 * rollout.max_tokens
    together = row * plan.learner_devices
    separate = preset(
        config,
        learner__share_prefix="false",
        plan__row_tokens=row,
        plan__micro_batch_tokens=together * max(1, (plan.micro_batch_tokens or 0) // together),
    )
    opened, prompts = open_model(shared, role="learner"), rollout.prompts_per_step
    adapter = random_adapter(opened.policy, np.random.default_rng(0))
    lengths = completion_lengths(
        prompts * rollout.group_size, mean=mean, cap=rollout.max_new_tokens
    )
    vocab = SMALL["vocab_size"]
    rollouts = random_rollouts(lengths, prompt=prompt, prompts=prompts, vocab=vocab)
    case = Case(shared, opened.policy, opened.vocabulary, opened.base, adapter, rollouts)
    gradients = {"shared": case.ours(), "separate": replace(case, config=separate).ours()}
    return _beside_shared(gradients, repeats=repeats)


def _beside_shared(gradients: Mapping[str, Gradient], *, repeats: int) -> dict[str, Any]:
    """Returns positions, temporaries and seconds, in turns, and ratios to shared prompts."""
    seconds = medians({name: one.run for name, one in gradients.items()}, repeats=repeats)
    return {
        **{f"{name}_positions": one.positions for name, one in gradients.items()},
        **{f"{name}_mib": one.temporary_bytes / 2**20 for name, one in gradients.items()},
        **{f"{name}_s": value for name, value in seconds.items()},
        **{
            f"{name}_ratio": value / seconds["shared"]
            for name, value in seconds.items()
            if name != "shared"
        },
    }


BENCHMARK = Benchmark(
    (
        Section(
            "gradient",
            "The gradient of a LoRA under 262,144 entries: two layers, width 64, sequences of "
            "256 + 768 tokens, float32; medians of runs in turns",
            [
                Row(f"{1024 * n:,} tokens", memory_and_time, {"sequences": n, "repeats": 3})
                for n in (1, 4)
            ],
            (
                Bound("memory_ratio", least=10),
                # Absent where a program is too large to run.
                Bound("time_ratio", least=1, optional=True),
            ),
        ),
        Section(
            "exact",
            "The same gradient against whole logits in float32: the LoRA's worst leaf, relative "
            "to its norm; and how far rounding in the body takes both",
            [
                Row(dtype, exactness, {"sequences": 1, "dtype": dtype})
                for dtype in ("float32", "bfloat16")
            ],
            (
                Bound("apart", most=1e-5, rows="float32"),
                Bound("apart", most=1e-2, rows="bfloat16"),
                Bound("rounded_ratio", most=1.1, rows="bf*"),
            ),
        ),
        Section(
            "shared",
            "A step's gradient of 4 groups, seven layers of width 128, float32: rollouts share "
            "their prompt, have one each, or a padded row each (Tunix); medians of runs in turns",
            [
                Row(
                    f"prompts of {prompt}, {mean} tokens of at most {cap}, groups of {group}",
                    shared_prompts,
                    {"prompt": prompt, "mean": mean, "cap": cap, "group": group, "repeats": 3},
                )
                for prompt, mean, cap in ((40, 3, 6), (40, 48, 128), (160, 48, 128), (320, 48, 128))
                for group in (8, 16)
            ],
            (Bound("separate_ratio", least=1.0), Bound("tunix_ratio", least=1.0)),
        ),
        Section(
            "updates",
            "A whole update of a preset, without its optimizer, on two CPU devices: shared and "
            "separate prompts; medians of runs in turns. `python -m launch.demo.gemma` fetches "
            "Gemma 3 270m",
            [
                Row(config, shared_prompts_of, {"config": config, "repeats": 5} | lengths)
                for config, lengths in (
                    ("demo", {"prompt": 44, "mean": 27}),
                    ("gemma3_270m_cpu", {"prompt": 40, "mean": 3}),
                )
            ],
            (Bound("separate_ratio", least=1.0),),
            CPU_ONLY | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        ),
    )
)
