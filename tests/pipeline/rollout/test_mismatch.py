"""Mismatch of sampler and learner, check by check."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.rollout.mismatch import (
    MismatchError,
    check_mean,
    check_probe,
    probe_statistic,
)
from pipeline.types import Completion, RolloutRequest
from tests import stub_workers
from tests.run_process import Script
from tests.samples import FRESH, PROBE, make_config, make_prompts
from tests.stub_workers import StubWorker

EFFECT = abs(int(PROBE[:6], 16) - int(FRESH[:6], 16)) / 2**20 / 10
"""What the random adapter changes of a log-prob of the stub."""


def team() -> list[StubWorker]:
    """Two samplers; the first one is the learner, too."""
    return [StubWorker(Script(), disk={}) for _ in range(2)]


def probe(workers: list[Any], *, prompts: int = 3, max_new_tokens: int = 64) -> float:
    config = make_config(Path(), rollout={"max_new_tokens": max_new_tokens})
    return asyncio.run(check_probe(workers, workers[0], make_prompts(prompts), config=config))


def test_the_statistic_by_hand():
    scored, effect = np.zeros(130), np.full(130, 2.0)
    sampled = np.concatenate([np.full(65, 0.1), np.full(65, -0.3)])
    # Two pieces of 65 tokens with means 0.1 and 0.3, as a share of 2.
    assert probe_statistic(sampled, scored, effect) == pytest.approx(0.15)
    improbable = np.zeros(130)
    improbable[7] = 1.3
    assert probe_statistic(improbable, scored, effect) == pytest.approx(0.01)
    assert probe_statistic(sampled[:3], scored[:3], effect[:3]) == pytest.approx(0.05)


def test_a_mean_above_its_bound_is_an_error():
    check_mean({"mismatch_mean": 1e-3}, bound=1e-3)
    check_mean({}, bound=1e-3)  # a step without signal trains on nothing and measures nothing
    for mean in (0.5, float("nan")):
        with pytest.raises(MismatchError, match=r"on average, allowed 0\.001 \(mismatch\.mean_st"):
            check_mean({"mismatch_mean": mean}, bound=1e-3)


def test_two_sides_that_both_ignore_the_adapter_are_caught(monkeypatch: pytest.MonkeyPatch):
    """They agree perfectly, for example if qwix attached LoRA to no forward pass."""
    monkeypatch.setattr(
        stub_workers, "logprobs", lambda tokens, _: np.full(len(tokens), -1.0, np.float32)
    )
    with pytest.raises(MismatchError, match="LoRA does not reach its model"):
        probe(team())


def shifted(drawn: Completion) -> None:
    """As with wrong positions."""
    drawn.segments[0].logprobs[:] += 0.2 * EFFECT


def with_nan(drawn: Completion) -> None:
    if drawn.name.prompt_id == 2:
        drawn.segments[0].logprobs[2] = np.nan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            shifted,
            r"of sampler 1 differ .* by 0\.2 of .* allowed 0\.001 .* --mismatch\.probe 0\.4",
        ),
        (with_nan, "by nan of what the adapter changes"),
    ],
)
def test_promise_1_a_single_sampler_that_differs_is_named_with_causes_and_remedies(
    change: Callable[[Completion], None], message: str
):
    workers = team()
    draw = workers[1].draw

    def changed_one(request: RolloutRequest) -> Completion:
        drawn = draw(request)
        change(drawn)
        return drawn

    workers[1].draw = changed_one  # type: ignore[method-assign]
    with pytest.raises(MismatchError, match=message):
        probe(workers)


def test_samplers_get_different_rollouts_of_the_same_prompts():
    workers, names = team(), list[tuple[int, int]]()
    for worker in workers:
        draw = worker.draw

        def spy(request: RolloutRequest, draw: Any = draw) -> Completion:
            names.append((request.name.prompt_id, request.name.sample))
            return draw(request)

        worker.draw = spy  # type: ignore[method-assign]
    workers[0].score_error = 5e-4 * EFFECT
    assert probe(workers, prompts=20) == pytest.approx(5e-4, rel=1e-2)
    assert names == [(prompt, sampler) for sampler in (0, 1) for prompt in range(1, 9)]
    names.clear()
    # 64 tokens in completions of three: three samples of each of eight prompts.
    probe(workers, prompts=20, max_new_tokens=3)
    assert sorted(names) == [(prompt, sample) for prompt in range(1, 9) for sample in range(6)]
