"""`python -m launch.bench learner`: the cost of gradients beside Tunix's.

All sides have the same weights, tokens and loss: GRPO at ratio 1 without a KL term, a mean over all
tokens, and no optimizer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from configs.schema import Config
from launch.bench.harness import Benchmark, Bound, Figures, Row, Section, medians
from launch.bench.small_gemma import SLOTS, SMALL, one_device, random_policy
from launch.bench.tunix import PAD, Peer, train_example
from pipeline.compute.learner.batches import DeviceBatch, place_inputs
from pipeline.compute.learner.programs import LearnerPrograms
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.vocabulary import Vocabulary
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

    def theirs(self) -> Gradient:
        """Compiles Tunix's gradient program: a row for each rollout, padded to the longest."""
        peer = Peer.create(
            self.policy.architecture.config,
            self.config.lora,
            temperature=self.config.rollout.temperature,
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


def _temporary_bytes(program: jax.stages.Compiled) -> int:
    memory = program.memory_analysis()
    assert memory is not None
    return int(memory.temp_size_in_bytes)


def make_config(
    *,
    prompt: int,
    new: int,
    group: int,
    in_row: int,
    rows: int = 1,
    dtype: str = "float32",
    share: bool = True,
) -> Config:
    """Micro-batches of `rows` rows, each with room for `in_row` of the longest sequences."""
    row = in_row * (prompt + new)
    return one_device(
        "demo",
        slots=SLOTS,
        prompt=prompt,
        new=new,
        model__dtype=dtype,
        lora__rank=8,
        lora__alpha=16.0,
        rollout__group_size=group,
        rollout__temperature=0.9,
        learner__token_weights="token",
        learner__share_prefix=str(share).lower(),
        plan__row_tokens=row,
        plan__micro_batch_tokens=rows * row,
    )


def wide_case(*, sequences: int, dtype: str) -> Case:
    """`BODY` with random weights and sequences of the same length, the same at each call."""
    sizes: dict[str, Any] = {"prompt": PROMPT, "new": COMPLETION, "group": 2}
    config = make_config(**sizes, in_row=1, rows=sequences, dtype=dtype)
    policy, base, adapter = random_policy(BODY, dtype, config.lora, scales={})
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


def wide_gradient(*, dtype: str, repeats: int) -> Figures:
    """Temporaries, time and difference of the gradients of ours and of Tunix, in turns.

    Args:
        dtype: of the model.
        repeats: of each.

    Returns:
        In bfloat16 also the difference of each from Tunix's gradient in float32 at the same values,
        which is the rounding of the dtype.
    """
    case = wide_case(sequences=1, dtype=dtype)
    ours, theirs = case.ours(), case.theirs()
    one, other = ours.run(), theirs.run()
    found = {"apart": apart(one, other), **_beside(ours, {"tunix": theirs}, repeats=repeats)}
    if dtype == "float32":
        return found

    def widened(params: Params) -> Params:
        return {name: x.astype(dtype).astype(jnp.float32) for name, x in params.items()}

    wide = wide_case(sequences=1, dtype="float32")
    exact = replace(wide, base=widened(case.base), adapter=widened(case.adapter)).theirs().run()
    rounded = {"ours_rounded": apart(one, exact), "tunix_rounded": apart(other, exact)}
    return {**found, **rounded, "more_rounded": rounded["ours_rounded"] / rounded["tunix_rounded"]}


def shared_prompts(*, prompt: int, mean: int, cap: int, group: int, repeats: int) -> Figures:
    """A step of four groups, each side in one pass: shared and separate prompts, Tunix."""
    # With four sequences in a row separate prompts have little padding.
    sizes: dict[str, Any] = {"prompt": prompt, "new": cap, "group": group, "in_row": 4}
    lora = make_config(**sizes).lora
    policy, base, adapter = random_policy(SMALL, "float32", lora, scales={})
    lengths = completion_lengths(4 * group, mean=mean, cap=cap)
    rollouts = random_rollouts(lengths, prompt=prompt, prompts=4, vocab=SMALL["vocab_size"])

    def in_one_pass(*, share: bool) -> Case:
        one_row = make_config(**sizes, share=share)
        case = Case(one_row, policy, VOCABULARY, base, adapter, rollouts)
        return replace(case, config=make_config(**sizes, share=share, rows=len(case.batches)))

    shared, separate = in_one_pass(share=True), in_one_pass(share=False)
    others = {"separate": separate.ours(), "tunix": shared.theirs()}
    return _beside(shared.ours(), others, repeats=repeats)


def _beside(ours: Gradient, others: Mapping[str, Gradient], *, repeats: int) -> Figures:
    """Positions, temporaries and seconds, in turns, and ratios to ours."""
    every = {"ours": ours, **others}
    seconds = medians({name: one.run for name, one in every.items()}, repeats=repeats)
    return {
        **{f"{name}_positions": one.positions for name, one in every.items()},
        **{f"{name}_mib": one.temporary_bytes / 2**20 for name, one in every.items()},
        **{f"{name}_s": value for name, value in seconds.items()},
        **{f"{name}_ratio": seconds[name] / seconds["ours"] for name in others},
        "memory_ratio": others["tunix"].temporary_bytes / ours.temporary_bytes,
    }


def apart(one: Mapping[str, jax.Array], other: Mapping[str, jax.Array]) -> float:
    """Returns the largest |one - other| / |other| of a leaf, in Euclidean norms."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    exact = {name: np.asarray(value, np.float64) for name, value in other.items()}
    return max(
        float(np.linalg.norm(np.asarray(one[name], np.float64) - value) / np.linalg.norm(value))
        for name, value in exact.items()
    )


def benchmark(request: argparse.Namespace) -> Benchmark:
    """Rows for a large vocabulary, and for shared prompts."""
    quick = request.quick
    repeats = 1 if quick else 3
    wide = Section(
        "gradient",
        "The gradient of a LoRA under 262,144 entries: two layers, width 64, a sequence of "
        "256 + 768 tokens; medians of runs in turns. Differences are those of the LoRA's worst "
        "leaf, relative to its norm; in bfloat16 both sides round, and ours not more",
        [
            Row(dtype, wide_gradient, {"dtype": dtype, "repeats": repeats}, seconds=seconds)
            for dtype, seconds in (("float32", 40), ("bfloat16", 80))
            if not quick or dtype == "float32"
        ],
        [
            Bound("memory_ratio", least=10),
            Bound("tunix_ratio", least=1, rows="float32"),
            Bound("apart", most=1e-5, rows="float32"),
            Bound("more_rounded", most=1.1, rows="bfloat16"),
        ],
    )
    shapes = ((40, 3, 6, 8), (160, 48, 128, 8), (320, 48, 128, 16))
    shared = Section(
        "shared",
        "A step's gradient of 4 groups, seven layers of width 128, float32: rollouts share their "
        "prompt, have one each, or a padded row each (Tunix); medians of runs in turns",
        [
            Row(
                f"prompts of {prompt}, {mean} tokens of at most {cap}, groups of {group}",
                shared_prompts,
                {"prompt": prompt, "mean": mean, "cap": cap, "group": group, "repeats": repeats},
                seconds=prompt * group / 20,
            )
            for prompt, mean, cap, group in (shapes[:1] if quick else shapes)
        ],
        # A GPU that is mostly idle computes the short rows as fast in Tunix's one pass.
        [
            Bound("separate_ratio", least=1.0),
            Bound("tunix_ratio", least=1.0, rows="prompts of 320*"),
        ],
    )
    return Benchmark([wide, shared])
