"""The gradient of groups whose rollouts share their prompt, beside separate prompts and Tunix."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launch.bench.harness import Bound, Row, Section, medians
from launch.bench.small_gemma import SMALL, VOCABULARY, small_config, small_policy
from launch.bench.tunix import PAD, Peer, train_example
from pipeline.compute.learner.batches import DeviceBatch, place_inputs
from pipeline.compute.learner.programs import LearnerPrograms
from pipeline.data.batching import micro_batches, token_weights
from pipeline.plan.cost_model.workload import completion_lengths
from pipeline.types import NO_TEXT, Completion, Rollout, RolloutName

PROMPTS = 4
"""Prompts of the step."""


def rollouts_of(*, prompt: int, mean: int, cap: int, group: int) -> list[Rollout]:
    """Returns groups of rollouts with random tokens and lognormal lengths."""
    rng = np.random.default_rng(0)

    def random_tokens(count: int) -> np.ndarray:
        return rng.integers(8, SMALL["vocab_size"], count).astype(np.int32)

    texts = [random_tokens(prompt) for _ in range(PROMPTS)]
    return [
        Rollout(
            Completion(
                name=RolloutName("train", 0, prompt_id=number % PROMPTS, sample=number // PROMPTS),
                prompt_tokens=texts[number % PROMPTS],
                tokens=random_tokens(length),
                logprobs=np.zeros(length, np.float32),
                stop_reason="length",
                version=0,
                adapter_sha256="",
            ),
            NO_TEXT,
            {},
            0.0,
            float(rng.standard_normal()),
        )
        for number, length in enumerate(completion_lengths(PROMPTS * group, mean=mean, cap=cap))
    ]


def update(*, prompt: int, mean: int, cap: int, group: int, repeats: int) -> dict[str, Any]:
    """Returns positions, temporaries and seconds of a step's gradient, in turns."""
    rollouts = rollouts_of(prompt=prompt, mean=mean, cap=cap, group=group)
    found, programs = dict[str, Any](), dict[str, partial[None]]()
    for name, share in (("shared", True), ("separate", False)):
        positions, program, given = _ours(rollouts, prompt=prompt, cap=cap, share=share)
        found |= {f"{name}_positions": positions, f"{name}_mib": _mib(program)}
        programs[f"{name}_s"] = partial(_run, program, given)
    positions, program, given = _theirs(rollouts)
    found |= {"tunix_positions": positions, "tunix_mib": _mib(program)}
    programs["tunix_s"] = partial(_run, program, given)
    seconds = medians(programs, repeats=repeats)
    ratios = {
        "separate_ratio": seconds["separate_s"] / seconds["shared_s"],
        "tunix_ratio": seconds["tunix_s"] / seconds["shared_s"],
    }
    return found | seconds | ratios


def _run(program: jax.stages.Compiled, given: tuple[Any, ...]) -> None:
    jax.block_until_ready(program(*given))


def _mib(program: jax.stages.Compiled) -> float:
    memory = program.memory_analysis()
    assert memory is not None
    return float(memory.temp_size_in_bytes / 2**20)


def _ours(rollouts: list[Rollout], *, prompt: int, cap: int, share: bool) -> tuple[int, Any, Any]:
    """Returns positions, the compiled gradient of all rows, and its arguments."""
    group = len(rollouts) // PROMPTS
    # Four of the longest sequences, so that separate prompts have little padding.
    row = 4 * (prompt + cap)
    settings = {
        "rollout__group_size": group,
        "rollout__max_prompt_tokens": prompt,
        "rollout__max_new_tokens": cap,
        "plan__segment_steps": 1,
        "plan__prefill_tokens": prompt,
        "plan__row_tokens": row,
        "learner__token_weights": "token",
        "learner__share_prefix": "true" if share else "false",
    }
    config = small_config(**settings, plan__micro_batch_tokens=row)
    policy, base, adapter = small_policy(config)
    weights = token_weights(rollouts, "token", budget=cap)
    packing: dict[str, Any] = {"weights": weights, "keep_zero_advantage": True}
    shape = LearnerPrograms(policy, config, VOCABULARY).shape
    rows = len(micro_batches(rollouts, shape=shape, **packing))
    config = small_config(**settings, plan__micro_batch_tokens=rows * row)
    programs = LearnerPrograms(policy, config, VOCABULARY)
    (packed,) = micro_batches(rollouts, shape=programs.shape, **packing)
    batch = DeviceBatch(place_inputs(packed, policy.mesh), jnp.asarray(packed.advantages))
    given = base, adapter, jax.tree.map(jnp.zeros_like, adapter), batch
    return rows * row, policy.jit(programs.gradient).lower(*given).compile(), given


def _theirs(rollouts: list[Rollout]) -> tuple[int, Any, Any]:
    """The same of Tunix: a row for each rollout, padded to the longest."""
    config = small_config()
    policy, base, adapter = small_policy(config)
    peer = Peer.create(
        policy.architecture.config, config.lora, temperature=config.rollout.temperature
    )
    longest = max(_lengths(rollouts))
    completions = np.full((len(rollouts), longest), PAD, np.int32)
    for row, rollout in zip(completions, rollouts, strict=True):
        row[: len(rollout.completion.tokens)] = rollout.completion.tokens
    example = train_example(
        jnp.stack([rollout.completion.prompt_tokens for rollout in rollouts]),
        jnp.asarray(completions),
        jnp.asarray([rollout.advantage for rollout in rollouts], jnp.float32),
    )
    given = (*peer.with_values({**base, **adapter}), example)
    positions = example.prompt_ids.size + completions.size
    return positions, jax.jit(peer.gradient).lower(*given).compile(), given


def _lengths(rollouts: list[Rollout]) -> list[int]:
    return [len(rollout.completion.tokens) for rollout in rollouts]


SHARED = Section(
    "shared",
    "A step's gradient of 4 groups, seven layers of width 128, float32: rollouts share their "
    "prompt, have one each, or a padded row each (Tunix); medians of runs in turns",
    [
        Row(
            f"prompts of {prompt}, {mean} tokens of at most {cap}, groups of {group}",
            update,
            {"prompt": prompt, "mean": mean, "cap": cap, "group": group, "repeats": 3},
        )
        for prompt, mean, cap in ((40, 3, 6), (40, 48, 128), (160, 48, 128), (320, 48, 128))
        for group in (8, 16)
    ],
    (Bound("separate_ratio", least=1.0), Bound("tunix_ratio", least=1.0)),
)
