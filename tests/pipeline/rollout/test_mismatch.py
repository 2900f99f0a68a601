"""Mismatch of sampler and learner, check by check."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from pipeline.rollout.mismatch import (
    MismatchError,
    check_labels,
    check_mean,
    check_probe,
    probe_statistic,
    sync,
)
from pipeline.types import Completion, Published, RolloutName, RolloutRequest
from tests import samples, stub_workers
from tests.run_process import Script
from tests.samples import FRESH, PROBE, changed, completion, make_prompts
from tests.stub_workers import StubLearner, StubSampler


def team(samplers: int) -> tuple[Script, list[StubSampler], StubLearner]:
    script = Script()
    made = [StubSampler(script, number=number) for number in range(samplers)]
    return script, made, StubLearner(script, disk={})


EFFECT = abs(int(PROBE[:6], 16) - int(FRESH[:6], 16)) / 2**20 / 10
"""What the random adapter changes of a fake log-prob."""


def probe(
    samplers: list[StubSampler],
    learner: StubLearner,
    *,
    prompts: int = 3,
    max_new_tokens: int = 64,
) -> float:
    work = check_probe(
        samplers,
        learner,
        make_prompts(prompts),
        bound=1e-3,
        temperature=1.0,
        max_new_tokens=max_new_tokens,
    )
    return asyncio.run(work)


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
    with pytest.raises(MismatchError, match=r"by 0\.5 on average, allowed 0\.001 \(mismatch\.mean"):
        check_mean({"mismatch_mean": 0.5}, bound=1e-3)
    with pytest.raises(MismatchError):
        check_mean({"mismatch_mean": float("nan")}, bound=1e-3)


def test_the_probe_goes_through_every_sampler_and_the_learner():
    script, samplers, learner = team(2)
    learner.score_error = 5e-4 * EFFECT
    assert probe(samplers, learner) == pytest.approx(5e-4, rel=1e-2)
    assert script.calls == [
        "learner.publish probe",
        *("sampler0.load -1", "sampler0.generate:probe 0", "learner.score probe", "learner.score"),
        *("sampler1.load -1", "sampler1.generate:probe 0", "learner.score probe", "learner.score"),
    ]


def test_two_sides_that_both_ignore_the_adapter_are_caught(monkeypatch: pytest.MonkeyPatch):
    """They agree perfectly, for example if qwix attached LoRA to no forward pass."""
    _, samplers, learner = team(1)
    monkeypatch.setattr(
        stub_workers, "logprobs", lambda tokens, _: np.full(len(tokens), -1.0, np.float32)
    )
    with pytest.raises(MismatchError, match="LoRA does not reach its model"):
        probe(samplers, learner)


def shifted(drawn: Completion) -> Completion:
    """As with wrong positions."""
    drawn.segments[0].logprobs[:] += 0.2 * EFFECT
    return drawn


def without_adapter(drawn: Completion) -> Completion:
    drawn.segments[0].logprobs[:] = samples.logprobs(drawn.tokens, FRESH)
    return drawn


def nan_in(prompt_id: int) -> Callable[[Completion], Completion]:
    def broken(drawn: Completion) -> Completion:
        if drawn.name.prompt_id == prompt_id:
            drawn.segments[0].logprobs[2] = np.nan
        return drawn

    return broken


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            shifted,
            r"of sampler 1 differ .* by 0\.2 of .* allowed 0\.001 .* --mismatch\.probe 0\.4",
        ),
        (without_adapter, "LoRA does not reach sampler 1"),
        *[(nan_in(prompt), "by nan of what the adapter changes") for prompt in (1, 2, 3)],
        (
            lambda drawn: changed(drawn, version=0),
            r"was sampled by version 0 .* published is -1",
        ),
    ],
)
def test_a_single_sampler_that_differs_is_named_with_causes_and_remedies(
    change: Callable[[Completion], Completion], message: str
):
    _, samplers, learner = team(2)
    draw = samplers[1].draw
    samplers[1].draw = lambda *given: change(draw(*given))  # type: ignore[method-assign]
    with pytest.raises(MismatchError, match=message):
        probe(samplers, learner)


def test_samplers_get_different_rollouts_of_the_same_prompts():
    _, samplers, learner = team(2)
    names: list[tuple[int, int]] = []
    for sampler in samplers:
        draw = sampler.draw

        def spy(request: RolloutRequest, temperature: float, draw=draw):
            names.append((request.name.prompt_id, request.name.sample))
            return draw(request, temperature)

        sampler.draw = spy  # type: ignore[method-assign]
    probe(samplers, learner, prompts=20)
    assert names == [(prompt, sampler) for sampler in (0, 1) for prompt in range(1, 9)]
    names.clear()
    # 64 tokens in completions of three: three samples of each of eight prompts.
    probe(samplers, learner, prompts=20, max_new_tokens=3)
    assert sorted(names) == [(prompt, sample) for prompt in range(1, 9) for sample in range(6)]


def test_a_sync_compares_hashes():
    _, samplers, _ = team(2)
    published = Published(4, PROBE, PROBE)
    asyncio.run(sync(samplers, published))
    assert [(sampler.version, sampler.adapter) for sampler in samplers] == [(4, PROBE)] * 2
    with pytest.raises(
        MismatchError, match=rf"holds adapter {PROBE[:12]}, version 5 is {'0' * 12}"
    ):
        asyncio.run(sync(samplers, Published(5, "0" * 64, PROBE)))


def test_the_first_wrong_label_is_named():
    published = Published(2, "a" * 64, None)

    def labelled(sample: int, version: int, sha: str):
        name = RolloutName("train", 2, 7, sample)
        drawn = RolloutRequest(name, np.zeros(1, np.int32))
        return completion(drawn, version=version, adapter_sha256=sha)

    right = labelled(0, 2, "a" * 64)
    check_labels([right], published)
    with pytest.raises(
        MismatchError, match=r"sample=1\) was sampled by version 1 \(aaaaaaaaaaaa\)"
    ):
        check_labels([right, labelled(1, 1, "a" * 64), labelled(2, 0, "")], published)
    with pytest.raises(MismatchError, match=r"version 2 \(bbbbbbbbbbbb\), published is 2 \(aaaa"):
        check_labels([labelled(3, 2, "b" * 64)], published)
