"""The fullest work that a run can give: longest prompts, longest completions, all compiled sizes.

What is read and learned is made of the run's own prompts, repeated until they are long enough. What
it says means nothing; how much of it there is means everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from configs.schema import Config
from pipeline.contracts.adapters import Published
from pipeline.contracts.batches import Packed
from pipeline.contracts.rollouts import (
    Completion,
    Demonstration,
    Prompt,
    Rollout,
    RolloutName,
    RolloutRequest,
)
from pipeline.inputs.dataset.batching import batch_shape

PHASE = "rehearsal"
"""Of the names of what is drawn; no run draws the same noise."""
_ITEMS = 4
"""Prompts of each bucket that are evaluated."""
_TURNS = 64
"""How often each prompt may be made into a different one."""


def full_prompt(tokens: np.ndarray, length: int) -> np.ndarray:
    """So many tokens: <bos>, then the others over and over. int32 `seq`."""
    body = tokens[1:] if len(tokens) > 1 else tokens
    return np.concatenate([tokens[:1], np.resize(body, length - 1)]).astype(np.int32)


def to_draw(config: Config, prompts: Sequence[Prompt]) -> list[RolloutRequest]:
    """A step's rollouts, or as many as there are slots, if these are more; all as long as can be.

    Args:
        config: with sizes.
        prompts: of training, at least as many as a step has.
    """
    plan = config.plan
    chosen = prompts[: max(config.rollout.prompts_per_step, plan.num_samplers)]
    most = max(config.rollout.size, plan.num_samplers * config.slots)
    return [
        RolloutRequest(
            RolloutName(PHASE, 0, prompt.id, sample),
            full_prompt(prompt.tokens, config.rollout.max_prompt_tokens),
            hold=True,
        )
        for prompt in chosen
        for sample in range(-(-most // len(chosen)))
    ]


def to_read(
    config: Config, prompts: Sequence[Prompt], *, bucket: int, published: Published
) -> list[RolloutRequest]:
    """Different prompts of a bucket's length, as many as all devices read at once; one token each.

    Args:
        config: with sizes.
        prompts: of training.
        bucket: a longer one than prompts can be is for prompts with a part of a completion.
        published: who drew that part, as its label says.
    """
    plan, rollout = config.plan, config.rollout
    longest = min(bucket, rollout.max_prompt_tokens)
    number = plan.num_samplers * plan.sampler_shards * config.prefill_rows(bucket)
    found = []
    for place, tokens in enumerate(_different(prompts, longest, number)):
        name = RolloutName(PHASE, bucket, place, 0)
        partial = None
        if bucket > longest:
            part = min(bucket - longest, rollout.max_new_tokens - 1)
            partial = _completion(config, name, tokens, tokens, part, published)
        new = 1 if partial is None else len(partial.tokens) + 1
        found.append(RolloutRequest(name, tokens, max_new_tokens=new, partial=partial, hold=True))
    return found


def to_draw_in(config: Config, prompts: Sequence[Prompt], *, slots: int) -> list[RolloutRequest]:
    """So many rollouts for each sampler, evenly on its devices, for one segment of decoding."""
    plan = config.plan
    number = plan.num_samplers * plan.sampler_shards
    return [
        RolloutRequest(
            RolloutName(PHASE, slots, place, sample),
            tokens,
            max_new_tokens=config.segment_steps,
            hold=True,
        )
        for place, tokens in enumerate(
            _different(prompts, config.rollout.max_prompt_tokens, number)
        )
        for sample in range(slots // plan.sampler_shards)
    ]


def to_answer(config: Config, prompts: Sequence[Prompt]) -> list[Prompt]:
    """A few prompts of each bucket, as they are."""
    chosen: dict[int, list[Prompt]] = {}
    for prompt in prompts:
        chosen.setdefault(config.prompt_bucket(len(prompt.tokens)), []).append(prompt)
    return [prompt for _, own in sorted(chosen.items()) for prompt in own[:_ITEMS]]


def learned_rows(config: Config) -> int:
    """Rows of a step whose sequences are all as long as can be, filled up by `_filled`."""
    return _filled(config, -(-config.rollout.size // _a_row(config)))


def to_score(config: Config, drawn: Sequence[Completion], published: Published) -> list[Completion]:
    """Completions as long as can be that fill `learned_rows`, made of what was drawn.

    Args:
        config: with sizes.
        drawn: at least one.
        published: who drew them, as their label says.
    """
    number = learned_rows(config) * _a_row(config)
    sources = [drawn[place % len(drawn)] for place in range(number)]
    longest = config.rollout.max_prompt_tokens
    return [
        _completion(
            config,
            RolloutName(PHASE, 0, place, 0),
            full_prompt(source.prompt_tokens, longest),
            source.tokens,
            config.rollout.max_new_tokens,
            published,
        )
        for place, source in enumerate(sources)
    ]


def to_learn(scored: Sequence[Completion]) -> list[Rollout]:
    """Rollouts of which every other one is to become likelier."""
    signs = [1.0 - 2.0 * (place % 2) for place in range(len(scored))]
    return [Rollout(one, "", {}, sign, sign) for one, sign in zip(scored, signs, strict=True)]


def to_imitate(config: Config, prompts: Sequence[Prompt]) -> list[Packed]:
    """Rows of longest worked examples: of a warm start's step, filled up by `_filled`."""
    rows, each = _filled(config, config.sft.sequences_per_step), _a_row(config)
    longest, new = config.rollout.max_prompt_tokens, config.rollout.max_new_tokens
    examples = [
        Demonstration(place, tokens, np.resize(tokens, new))
        for place, tokens in enumerate(_different(prompts, longest, rows * each))
    ]
    return [tuple(examples[row * each : (row + 1) * each]) for row in range(rows)]


def _filled(config: Config, rows: int) -> int:
    """So many rows or more: full micro-batches and, where there are two sizes, a small one."""
    shape = batch_shape(config, pad=0)
    small = shape.tail_rows if len(shape.sizes) > 1 else 0
    return -(-rows // shape.rows) * shape.rows + small


def _a_row(config: Config) -> int:
    """Longest sequences in a packed row."""
    return config.row_tokens // config.rollout.max_tokens


def _different(prompts: Sequence[Prompt], length: int, number: int) -> list[np.ndarray]:
    """So many prompts of a length, no two alike where the prompts' own tokens allow it."""
    found: dict[bytes, np.ndarray] = {}
    for turn, place in product(range(_TURNS), range(len(prompts))):
        tokens, others = prompts[place].tokens, prompts[(place + turn) % len(prompts)].tokens
        body = np.roll(np.concatenate([tokens[1:], others[1:]]), -turn)
        one = full_prompt(np.concatenate([tokens[:1], body]), length)
        found.setdefault(one.tobytes(), one)
        if len(found) == number:
            break
    unique = list(found.values())
    return [unique[place % len(unique)] for place in range(number)]


def _completion(
    config: Config,
    name: RolloutName,
    prompt: np.ndarray,
    tokens: np.ndarray,
    length: int,
    published: Published,
) -> Completion:
    # "eos": completions that were cut may not be learned from, see learner.overlong.
    zeros = np.zeros(length, np.float32)
    return Completion(
        name=name,
        prompt_tokens=prompt,
        tokens=np.resize(tokens, length).astype(np.int32),
        logprobs=zeros,
        stop_reason="eos",
        version=published.version,
        adapter_sha256=published.sha256,
        processed_logprobs=zeros if config.rollout.truncates else None,
    )
