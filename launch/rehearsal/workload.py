"""The largest workload of a run: longest prompts and completions, all compiled sizes.

Sequences are the run's own prompts, repeated to full length: only their number and lengths matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from configs.schema import Config
from pipeline.contracts.adapters import Published
from pipeline.contracts.batches import PackedRow
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
"""Phase in the rollout names, which gives RNG keys that no run uses."""
_EVALUATED_PER_BUCKET = 4
"""Prompts of each bucket that are evaluated."""
_VARIANTS = 64
"""Different prompts that are made of each prompt at most."""


def full_prompt(tokens: np.ndarray, length: int) -> np.ndarray:
    """Returns `length` tokens: <bos>, then the other tokens repeated. int32 `seq`."""
    body = tokens[1:] if len(tokens) > 1 else tokens
    return np.concatenate([tokens[:1], np.resize(body, length - 1)]).astype(np.int32)


def decode_requests(config: Config, prompts: Sequence[Prompt]) -> list[RolloutRequest]:
    """Returns requests of full length for a step's rollouts, or for all slots if there are more.

    Args:
        config: with sizes.
        prompts: of training, at least those of one step.
    """
    plan = config.plan
    chosen = prompts[: max(config.rollout.prompts_per_step, plan.num_samplers)]
    count = max(config.rollout.size, plan.num_samplers * config.slots)
    return [
        RolloutRequest(
            RolloutName(PHASE, 0, prompt.id, sample),
            full_prompt(prompt.tokens, config.rollout.max_prompt_tokens),
            hold=True,
        )
        for prompt in chosen
        for sample in range(-(-count // len(chosen)))
    ]


def prefill_requests(
    config: Config, prompts: Sequence[Prompt], *, bucket: int, published: Published
) -> list[RolloutRequest]:
    """Returns distinct prompts of a bucket's length that fill one prefill on all devices.

    One token each is generated.

    Args:
        config: with sizes.
        prompts: of training.
        bucket: buckets beyond the longest prompt hold prompts with partial completions.
        published: the version that the partial completions claim.
    """
    plan, rollout = config.plan, config.rollout
    longest = min(bucket, rollout.max_prompt_tokens)
    number = plan.num_samplers * plan.sampler_shards * config.prefill_rows(bucket)
    requests = []
    for index, tokens in enumerate(_distinct_prompts(prompts, longest, number)):
        name = RolloutName(PHASE, bucket, index, 0)
        partial = None
        if bucket > longest:
            part = min(bucket - longest, rollout.max_new_tokens - 1)
            partial = _completion(config, name, tokens, tokens, part, published)
        new = 1 if partial is None else len(partial.tokens) + 1
        requests.append(
            RolloutRequest(name, tokens, max_new_tokens=new, partial=partial, hold=True)
        )
    return requests


def segment_requests(
    config: Config, prompts: Sequence[Prompt], *, slots: int
) -> list[RolloutRequest]:
    """Returns `slots` rollouts per sampler, even over its devices, for one decode segment."""
    plan = config.plan
    number = plan.num_samplers * plan.sampler_shards
    return [
        RolloutRequest(
            RolloutName(PHASE, slots, index, sample),
            tokens,
            max_new_tokens=config.segment_steps,
            hold=True,
        )
        for index, tokens in enumerate(
            _distinct_prompts(prompts, config.rollout.max_prompt_tokens, number)
        )
        for sample in range(slots // plan.sampler_shards)
    ]


def evaluation_prompts(config: Config, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Returns a few unchanged prompts of each bucket."""
    chosen: dict[int, list[Prompt]] = {}
    for prompt in prompts:
        chosen.setdefault(config.prompt_bucket(len(prompt.tokens)), []).append(prompt)
    return [prompt for _, own in sorted(chosen.items()) for prompt in own[:_EVALUATED_PER_BUCKET]]


def update_rows(config: Config) -> int:
    """Number of rows of a step whose sequences all have full length; see `_full_batches`."""
    return _full_batches(config, -(-config.rollout.size // _sequences_per_row(config)))


def full_completions(
    config: Config, sampled: Sequence[Completion], published: Published
) -> list[Completion]:
    """Returns completions of full length that fill `update_rows`, made of sampled ones.

    Args:
        config: with sizes.
        sampled: at least one completion.
        published: the version that the completions claim.
    """
    number = update_rows(config) * _sequences_per_row(config)
    sources = [sampled[index % len(sampled)] for index in range(number)]
    longest = config.rollout.max_prompt_tokens
    return [
        _completion(
            config,
            RolloutName(PHASE, 0, index, 0),
            full_prompt(source.prompt_tokens, longest),
            source.tokens,
            config.rollout.max_new_tokens,
            published,
        )
        for index, source in enumerate(sources)
    ]


def training_rollouts(scored: Sequence[Completion]) -> list[Rollout]:
    """Returns rollouts with advantages 1 and -1 in turns."""
    signs = [1.0 - 2.0 * (index % 2) for index in range(len(scored))]
    return [Rollout(one, "", {}, sign, sign) for one, sign in zip(scored, signs, strict=True)]


def sft_rows(config: Config, prompts: Sequence[Prompt]) -> list[PackedRow]:
    """Returns rows of full-length demonstrations for one SFT step; see `_full_batches`."""
    rows = _full_batches(config, config.sft.sequences_per_step)
    each = _sequences_per_row(config)
    longest, new = config.rollout.max_prompt_tokens, config.rollout.max_new_tokens
    demonstrations = [
        Demonstration(index, tokens, np.resize(tokens, new))
        for index, tokens in enumerate(_distinct_prompts(prompts, longest, rows * each))
    ]
    return [tuple(demonstrations[row * each : (row + 1) * each]) for row in range(rows)]


def _full_batches(config: Config, rows: int) -> int:
    """Rounds `rows` up to full micro-batches, plus a small one if two sizes are compiled."""
    shape = batch_shape(config, pad=0)
    small = shape.tail_rows if len(shape.sizes) > 1 else 0
    return -(-rows // shape.rows) * shape.rows + small


def _sequences_per_row(config: Config) -> int:
    """Number of full-length sequences in a packed row."""
    return config.row_tokens // config.rollout.max_tokens


def _distinct_prompts(prompts: Sequence[Prompt], length: int, number: int) -> list[np.ndarray]:
    """Returns `number` prompts of a length, all distinct if the prompts' tokens allow it."""
    found: dict[bytes, np.ndarray] = {}
    for variant, index in product(range(_VARIANTS), range(len(prompts))):
        tokens, others = prompts[index].tokens, prompts[(index + variant) % len(prompts)].tokens
        body = np.roll(np.concatenate([tokens[1:], others[1:]]), -variant)
        one = full_prompt(np.concatenate([tokens[:1], body]), length)
        found.setdefault(one.tobytes(), one)
        if len(found) == number:
            break
    unique = list(found.values())
    return [unique[index % len(unique)] for index in range(number)]


def _completion(
    config: Config,
    name: RolloutName,
    prompt: np.ndarray,
    tokens: np.ndarray,
    length: int,
    published: Published,
) -> Completion:
    # "eos": the update may exclude truncated completions, see learner.overlong.
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
