"""The largest workload: lengths, numbers, distinct prompts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema import Config
from launch.rehearsal import workload
from pipeline.compute.decode.schedule import groups
from pipeline.contracts.adapters import Published
from pipeline.contracts.rollouts import Completion
from pipeline.inputs.dataset.batching import batch_shape, batches_to_learn, batches_to_score
from pipeline.inputs.dataset.packing import packed_batches
from tests.fakes import completion, make_config, make_prompts

PUBLISHED = Published(4, "abc", None)
PROMPTS = make_prompts(5)
ROW = 88


def config(folder: Path, **tables: Any) -> Config:
    return make_config(folder, **tables)


def sampled(config: Config) -> list[Completion]:
    """Short completions of the requests of `decode_requests`."""
    requests = workload.decode_requests(config, PROMPTS)
    return [completion(request, "ab") for request in requests]


def test_a_prompt_is_repeated_behind_its_bos():
    tokens = np.array([2, 7, 8, 9], np.int32)
    assert workload.full_prompt(tokens, 9).tolist() == [2, 7, 8, 9, 7, 8, 9, 7, 8]
    assert workload.full_prompt(tokens, 3).tolist() == [2, 7, 8]
    assert workload.full_prompt(tokens, 1).tolist() == [2]
    assert workload.full_prompt(tokens[:1], 3).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("slots", "samplers", "each"),
    [(2, 1, 2), (16, 1, 8), (3, 3, 3)],
    ids=["a step", "more slots than a step has rollouts", "a prompt for each sampler"],
)
def test_decode_requests_are_a_step_or_fill_all_slots(
    tmp_path: Path, slots: int, samplers: int, each: int
):
    plan = {"platform": "cpu", "placement": "split", "slots": slots, "samplers": samplers}
    requests = workload.decode_requests(config(tmp_path, plan=plan), PROMPTS)
    by_prompt = Counter(request.name.prompt_id for request in requests)
    assert set(by_prompt.values()) == {each}
    assert len(by_prompt) == max(2, samplers)
    assert {len(request.prompt_tokens) for request in requests} == {8}
    assert all(request.hold and request.max_new_tokens is None for request in requests)
    assert set(by_prompt) <= {prompt.id for prompt in PROMPTS}
    assert len({request.name for request in requests}) == len(requests)


def test_prefill_requests_fill_one_prefill_on_all_devices_with_distinct_prompts(tmp_path: Path):
    plan = {"platform": "cpu", "placement": "split", "slots": 16, "samplers": 2}
    plan |= {"sampler_devices": 2, "prefill_tokens": 24, "prompt_buckets": [4]}
    for bucket, rows in ((8, 3), (4, 6)):
        requests = workload.prefill_requests(
            config(tmp_path, plan=plan), PROMPTS, bucket=bucket, published=PUBLISHED
        )
        assert len(requests) == 2 * 2 * rows == len(groups(requests))
        assert {len(request.prompt_tokens) for request in requests} == {bucket}
        assert {request.max_new_tokens for request in requests} == {1}


def test_longer_buckets_hold_partial_completions(tmp_path: Path):
    rollout = {"partial": "keep", "cut_off": 0.5, "group_size": 2, "prompts_per_step": 2}
    rollout |= {"max_prompt_tokens": 8, "max_new_tokens": 80}
    given = config(tmp_path, rollout=rollout, learner={"importance_cap": 2.0})
    assert given.prompt_buckets == (8, 48, 88)
    for bucket, partial in ((48, 40), (88, 79)):
        for request in workload.prefill_requests(
            given, PROMPTS, bucket=bucket, published=PUBLISHED
        ):
            assert request.partial is not None
            assert len(request.prompt_tokens) == 8
            assert (request.num_partial, request.max_new_tokens) == (partial, partial + 1)
            assert len(request.prefill_tokens) == 8 + partial
            (span,) = request.partial.version_spans
            assert (span.version, span.adapter_sha256) == (4, "abc")


def test_segment_requests_fill_fewer_slots_evenly(tmp_path: Path):
    plan = {"platform": "cpu", "placement": "split", "slots": 16, "samplers": 2}
    plan |= {"sampler_devices": 2, "segment_steps": 5}
    requests = workload.segment_requests(config(tmp_path, plan=plan), PROMPTS, slots=8)
    assert len(requests) == 2 * 8
    assert [len(group.members) for group in groups(requests)] == [4] * 4
    assert {request.max_new_tokens for request in requests} == {5}


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("rollouts", [2, 5, 8])
def test_an_update_fills_every_compiled_size(tmp_path: Path, rows: int, rollouts: int):
    given = config(
        tmp_path,
        rollout={"group_size": rollouts},
        plan={"micro_batch_tokens": rows * 2 * ROW, "row_tokens": 2 * ROW},
        learner={"overlong": "mask"},
    )
    shape = batch_shape(given, pad=0)
    scored = workload.full_completions(given, sampled(given), PUBLISHED)
    learned = workload.training_rollouts(scored)
    sizes = shape.split(workload.update_rows(given))
    assert set(sizes) == set(shape.sizes)
    assert len(scored) >= given.rollout.size
    for batches in (
        batches_to_score(scored, shape=shape),
        batches_to_learn(learned, config=given, shape=shape, keep_zero_advantage=False),
    ):
        assert [len(batch.tokens) for batch in batches] == sizes
        assert all((batch.segments > 0).all() for batch in batches)
    assert {len(one.prompt_tokens) + len(one.tokens) for one in scored} == {ROW}
    assert {rollout.advantage for rollout in learned} == {1.0, -1.0}


def test_sft_rows_are_full(tmp_path: Path):
    given = config(
        tmp_path,
        run={"phases": ["sft", "grpo"]},
        sft={"train": {"path": "demonstrations.jsonl"}, "steps": 1, "sequences_per_step": 7},
        plan={"micro_batch_tokens": 4 * ROW, "row_tokens": ROW},
    )
    sequences = workload.sft_rows(given, PROMPTS)
    assert len(sequences) == 8 + 1
    batches = packed_batches(sequences, shape=batch_shape(given, pad=0))
    assert all((batch.segments > 0).all() for batch in batches)


def test_a_few_prompts_of_each_bucket_are_evaluated(tmp_path: Path):
    plan = {"platform": "cpu", "placement": "split", "slots": 2, "prompt_buckets": [2, 4]}
    prompts = make_prompts(10)
    longer = [
        type(prompt)(100 + prompt.id, prompt.text, np.arange(6, dtype=np.int32), "", {})
        for prompt in prompts[:2]
    ]
    chosen = workload.evaluation_prompts(config(tmp_path, plan=plan), [*prompts, *longer])
    assert [prompt.id for prompt in chosen] == [1, 2, 3, 4, 101, 102]
