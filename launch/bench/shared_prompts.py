"""The gradient of groups whose rollouts share their prompt, beside separate prompts and Tunix.

    python -m launch.bench.shared_prompts CONFIG.toml --prompt 40 --mean 3 [--repeats 5]

compares an update of a configuration's model with shared and with separate prompts, in turns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.load import load_config
from configs.schema import Config
from launch.bench.harness import Bound, Row, Section, medians
from launch.bench.small_gemma import SMALL, VOCABULARY, small_config, small_policy
from launch.bench.tunix import PAD, Peer, train_example
from pipeline.compute.learner.batches import DeviceBatch, place_inputs
from pipeline.compute.learner.programs import LearnerPrograms
from pipeline.compute.opening import open_model
from pipeline.data.batching import micro_batches, token_weights
from pipeline.plan.cost_model.workload import completion_lengths
from pipeline.types import NO_TEXT, Completion, Rollout, RolloutName, Segment

PROMPTS = 4
"""Prompts of the step."""


def rollouts_of(
    *, prompt: int, mean: int, cap: int, group: int, prompts: int = PROMPTS
) -> list[Rollout]:
    """Returns groups of rollouts with random tokens and lognormal lengths."""
    rng = np.random.default_rng(0)

    def random_tokens(count: int) -> np.ndarray:
        return rng.integers(8, SMALL["vocab_size"], count).astype(np.int32)

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
        for number, length in enumerate(completion_lengths(prompts * group, mean=mean, cap=cap))
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


def update_of(
    shared: Config, separate: Config, *, prompt: int, mean: int, repeats: int
) -> dict[str, Any]:
    """Returns positions and seconds of an update of a configuration's model, in turns.

    The tokens are random, and the optimizer is left out.

    Args:
        shared: the configuration.
        separate: the same with `separate_settings`.
        prompt: tokens of each prompt.
        mean: tokens of a completion, on average; at most `rollout.max_new_tokens`.
        repeats: runs of each.
    """
    opened, rollout = open_model(shared, role="learner"), shared.rollout
    policy, cap = opened.policy, rollout.max_new_tokens
    rng = np.random.default_rng(0)
    adapter = policy.place_adapter(
        {
            name: 0.01 * rng.standard_normal(shape.shape).astype(np.float32)
            for name, shape in sorted(policy.adapter_shapes.items())
        }
    )
    group, prompts = rollout.group_size, rollout.prompts_per_step
    rollouts = rollouts_of(prompt=prompt, mean=mean, cap=cap, group=group, prompts=prompts)
    weights = token_weights(rollouts, shared.learner.variant.token_weights, budget=cap)
    found, programs = dict[str, Any](), dict[str, Callable[[], None]]()
    for name, one in (("shared", shared), ("separate", separate)):
        own = LearnerPrograms(policy, one, opened.vocabulary)
        packed = micro_batches(
            rollouts, shape=own.shape, weights=weights, keep_zero_advantage=False
        )
        batches = [
            DeviceBatch(
                inputs := place_inputs(row, policy.mesh),
                jax.device_put(row.advantages, inputs.tokens.sharding),
            )
            for row in packed
        ]
        zeros, gradient = jax.tree.map(jnp.zeros_like, adapter), policy.jit(own.gradient)
        compiled = {
            shape: gradient.lower(opened.base, adapter, zeros, batch).compile()
            for shape, batch in {batch.advantages.shape: batch for batch in batches}.items()
        }

        def run(batches: Any = batches, compiled: Any = compiled, total: Any = zeros) -> None:
            for batch in batches:
                total, _, _ = compiled[batch.advantages.shape](opened.base, adapter, total, batch)
            jax.block_until_ready(total)

        found[f"{name}_positions"] = sum(batch.advantages.size for batch in batches)
        programs[f"{name}_s"] = run
    seconds = medians(programs, repeats=repeats)
    return found | seconds | {"ratio": seconds["separate_s"] / seconds["shared_s"]}


def separate_settings(config: Config) -> list[tuple[str, str]]:
    """Settings for separate prompts, in micro-batches of about the same size.

    A row has four of the longest sequences, so that there is little padding.
    """
    row = 4 * config.rollout.max_tokens
    together = row * config.plan.learner_devices
    batch = together * max(1, (config.plan.micro_batch_tokens or 0) // together)
    sizes = {"plan.row_tokens": row, "plan.micro_batch_tokens": batch}
    return [("learner.share_prefix", "false"), *((key, str(size)) for key, size in sizes.items())]


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


def main() -> None:
    """Compares the updates of a configuration and prints them as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="configuration, e.g. configs/demo.toml")
    parser.add_argument("--prompt", type=int, required=True, help="tokens of each prompt")
    parser.add_argument("--mean", type=int, required=True, help="mean tokens of a completion")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each; default: 5")
    given = parser.parse_args()
    try:
        config = load_config(given.config)
        separate = load_config(given.config, separate_settings(config))
    except (FileNotFoundError, ValueError) as mistake:
        parser.error(str(mistake))
    found = update_of(config, separate, prompt=given.prompt, mean=given.mean, repeats=given.repeats)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
