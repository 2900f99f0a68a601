"""`python -m launch.bench learner`: the cost of gradients beside Tunix's.

All sides have the same weights, tokens and loss: GRPO at ratio 1 without a KL term, a mean over all
tokens, and no optimizer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from configs.schema import Config
from launch.bench.harness import Bound, Figures, Row, Section, medians
from launch.bench.shapes import SMALL, Model, one_device, policy_of, random_model
from launch.bench.tunix import PAD, Peer, train_example
from pipeline.compute.learner.batches import DeviceBatch, place_inputs
from pipeline.compute.learner.programs import LearnerPrograms
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.data.batching import batches_to_learn
from pipeline.data.packed_batch import TokenBatch
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


class Gradient(NamedTuple):
    """A compiled gradient of a step, which returns that of each LoRA matrix, by path.

    The positions are those that it computes, padding included.
    """

    run: Callable[[], Mapping[str, jax.Array]]
    temporary_bytes: int
    positions: int


def packed(config: Config, policy: Policy, rollouts: Sequence[Rollout]) -> list[TokenBatch]:
    """The micro-batches of a step."""
    shape = LearnerPrograms(policy, config, VOCABULARY).shape
    return batches_to_learn(rollouts, config=config, shape=shape, keep_zero_advantage=True)


def ours(config: Config, model: Model, rollouts: Sequence[Rollout]) -> Gradient:
    """Compiles our gradient program for each size of the step's micro-batches."""
    policy, base, adapter = model
    batches = []
    for batch in packed(config, policy, rollouts):
        inputs = place_inputs(batch, policy.mesh)
        advantages = jax.device_put(batch.advantages, inputs.tokens.sharding)
        batches.append(DeviceBatch(inputs, advantages))
    zeros = jax.tree.map(jnp.zeros_like, adapter)
    program = policy.jit(LearnerPrograms(policy, config, VOCABULARY).gradient)
    compiled: dict[int, jax.stages.Compiled] = {
        size: program.lower(base, adapter, zeros, batch).compile()
        for size, batch in {batch.advantages.size: batch for batch in batches}.items()
    }

    def run() -> Params:
        total = zeros
        for batch in batches:
            total, _, _ = compiled[batch.advantages.size](base, adapter, total, batch)
        return jax.block_until_ready(total)

    temporary = max(map(_temporary_bytes, compiled.values()))
    return Gradient(run, temporary, sum(batch.advantages.size for batch in batches))


def theirs(config: Config, model: Model, rollouts: Sequence[Rollout]) -> Gradient:
    """Compiles Tunix's gradient program: a row for each rollout, padded to the longest."""
    policy, base, adapter = model
    peer = Peer.create(policy.architecture.config, config.lora)
    longest = max(len(rollout.completion.tokens) for rollout in rollouts)
    completions = np.full((len(rollouts), longest), PAD, np.int32)
    for row, rollout in zip(completions, rollouts, strict=True):
        row[: len(rollout.completion.tokens)] = rollout.completion.tokens
    example = train_example(
        jnp.stack([rollout.completion.prompt_tokens for rollout in rollouts]),
        jnp.asarray(completions),
        jnp.asarray([rollout.advantage for rollout in rollouts], jnp.float32),
    )
    given = (*peer.with_values({**base, **adapter}), example)
    gradient = partial(peer.gradient, temperature=config.rollout.temperature)
    program = jax.jit(gradient).lower(*given).compile()

    def run() -> dict[str, jax.Array]:
        _, found = jax.block_until_ready(program(*given))
        flat = nnx.to_flat_state(found)
        return {".".join(map(str, path)): leaf[...] for path, leaf in flat}

    positions = example.prompt_ids.size + completions.size
    return Gradient(run, _temporary_bytes(program), positions)


def _temporary_bytes(program: jax.stages.Compiled) -> int:
    memory: Any = program.memory_analysis()
    return int(memory.temp_size_in_bytes)


def random_rollouts(
    lengths: Sequence[int], *, prompt: int, prompts: int, vocab: int
) -> list[Rollout]:
    """Rollouts of these lengths with random tokens and advantages, the same at each call.

    They take turns with the different prompts, all of `prompt` tokens.
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


def make_config(*, prompt: int, new: int, in_row: int, **changes: Any) -> Config:
    """Micro-batches of one row, which has room for `in_row` of the longest sequences."""
    row = in_row * (prompt + new)
    settings = {
        "model__dtype": "float32",
        "lora__rank": 8,
        "lora__alpha": 16.0,
        "rollout__temperature": 0.9,
        "learner__token_weights": "token",
        "plan__row_tokens": row,
        "plan__micro_batch_tokens": row,
    }
    return one_device("demo", slots=16, prompt=prompt, new=new, **settings | changes)


def wide_gradient(*, dtype: str, repeats: int) -> Figures:
    """Temporaries, time and difference of the gradients of ours and of Tunix, for one sequence.

    In bfloat16 also the difference of each from Tunix's gradient in float32 at the same values,
    which is the rounding of the dtype.
    """
    exact, config = (
        make_config(prompt=PROMPT, new=COMPLETION, in_row=1, model__dtype=one)
        for one in ("float32", dtype)
    )
    model = random_model(BODY, config)
    rollouts = random_rollouts([COMPLETION], prompt=PROMPT, prompts=1, vocab=BODY["vocab_size"])
    we, they = ours(config, model, rollouts), theirs(config, model, rollouts)
    one, other = we.run(), they.run()
    found = {"apart": apart(one, other), **_beside(we, {"tunix": they}, repeats=repeats)}
    if dtype == "float32":
        return found
    policy = policy_of(BODY, exact, jax.devices()[:1])
    base, adapter = (
        {name: x.astype(dtype).astype(jnp.float32) for name, x in params.items()}
        for params in model[1:]
    )
    reference = theirs(exact, (policy, base, adapter), rollouts).run()
    rounded = {"ours_rounded": apart(one, reference), "tunix_rounded": apart(other, reference)}
    return {**found, **rounded, "more_rounded": rounded["ours_rounded"] / rounded["tunix_rounded"]}


def shared_prompts(*, prompt: int, mean: int, cap: int, group: int, repeats: int) -> Figures:
    """A step of four groups, each side in one pass: shared and separate prompts, Tunix."""
    lengths = completion_lengths(4 * group, mean=mean, cap=cap)
    rollouts = random_rollouts(lengths, prompt=prompt, prompts=4, vocab=SMALL["vocab_size"])

    def in_rows(**changes: Any) -> Config:
        # With four sequences in a row separate prompts have little padding.
        return make_config(prompt=prompt, new=cap, in_row=4, rollout__group_size=group, **changes)

    model = random_model(SMALL, in_rows())

    def in_one_pass(share: str) -> Gradient:
        config = in_rows(learner__share_prefix=share)
        rows = len(packed(config, model[0], rollouts))
        whole = {"plan__micro_batch_tokens": rows * config.row_tokens}
        return ours(in_rows(learner__share_prefix=share, **whole), model, rollouts)

    others = {"separate": in_one_pass("false"), "tunix": theirs(in_rows(), model, rollouts)}
    return _beside(in_one_pass("true"), others, repeats=repeats)


def _beside(we: Gradient, others: Mapping[str, Gradient], *, repeats: int) -> Figures:
    """Positions, temporaries and seconds, in turns, and ratios to ours."""
    every = {"ours": we, **others}
    seconds = medians({name: one.run for name, one in every.items()}, repeats=repeats)
    return {
        **{f"{name}_positions": one.positions for name, one in every.items()},
        **{f"{name}_mib": one.temporary_bytes / 2**20 for name, one in every.items()},
        **{f"{name}_s": value for name, value in seconds.items()},
        **{f"{name}_ratio": seconds[name] / seconds["ours"] for name in others},
        "memory_ratio": others["tunix"].temporary_bytes / we.temporary_bytes,
    }


def apart(one: Mapping[str, jax.Array], other: Mapping[str, jax.Array]) -> float:
    """The largest |one - other| / |other| of a leaf, in Euclidean norms."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    exact = {name: np.asarray(value, np.float64) for name, value in other.items()}
    return max(
        float(np.linalg.norm(np.asarray(one[name], np.float64) - value) / np.linalg.norm(value))
        for name, value in exact.items()
    )


def sections(request: argparse.Namespace) -> list[Section]:
    """Rows for a large vocabulary, and for shared prompts."""
    repeats, dtypes = 3, {"float32": 40, "bfloat16": 80}
    shapes = [(40, 3, 6, 8), (160, 48, 128, 8), (320, 48, 128, 16)]
    if request.quick:
        repeats, dtypes, shapes = 1, {"float32": 40}, shapes[:1]
    wide = [
        Row(dtype, wide_gradient, {"dtype": dtype, "repeats": repeats}, seconds)
        for dtype, seconds in dtypes.items()
    ]
    shared = [
        Row(
            f"prompts of {prompt}, {mean} tokens of at most {cap}, groups of {group}",
            shared_prompts,
            {"prompt": prompt, "mean": mean, "cap": cap, "group": group, "repeats": repeats},
            seconds=prompt * group / 20,
        )
        for prompt, mean, cap, group in shapes
    ]
    return [
        Section(
            "gradient",
            "The gradient of a LoRA under 262,144 entries: two layers, width 64, a sequence of "
            "256 + 768 tokens. Differences are those of the LoRA's worst leaf, relative to its "
            "norm; in bfloat16 both sides round, and ours not more",
            wide,
            [
                Bound("memory_ratio", least=10),
                Bound("tunix_ratio", least=1, rows="float32"),
                Bound("apart", most=1e-5, rows="float32"),
                Bound("more_rounded", most=1.1, rows="bfloat16"),
            ],
        ),
        Section(
            "shared",
            "A step's gradient of 4 groups, seven layers of width 128, float32: rollouts share "
            "their prompt, have one each, or a padded row each (Tunix)",
            shared,
            # A GPU that is mostly idle computes the short rows as fast in Tunix's one pass.
            [
                Bound("separate_ratio", least=1.0),
                Bound("tunix_ratio", least=1.0, rows="prompts of 320*"),
            ],
        ),
    ]
