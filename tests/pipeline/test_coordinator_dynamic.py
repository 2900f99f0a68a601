"""The loop with dynamic sampling: rounds, trained groups, counters, killed and resumed runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from pipeline.data.order import consecutive_prompts
from pipeline.rollout.dynamic_sampling import has_signal
from pipeline.types import Completion, Rollout, RolloutRequest
from tests.fakes import Disk, Process, Script
from tests.resumes import check_same_run
from tests.samples import completion, make_config, make_data

STEPS, TRAIN, CAP = 5, 15, 7
WRONG = "<reasoning>1</reasoning><answer>no</answer>"


def config_of(folder: Path, **tables: Any) -> Config:
    """Three groups of two per step, from at most seven prompts."""
    rollout = {
        "dynamic_sampling": "capped",
        "max_prompts_per_step": CAP,
        "prompts_per_step": 3,
        **tables.pop("rollout", {}),
    }
    return make_config(
        folder,
        **{
            "rollout": rollout,
            "budget": {"steps": STEPS},
            "checkpoint": {"every_steps": 3},
            **tables,
        },
    )


def process(config: Config, disk: Disk, script: Script | None = None) -> Process:
    return Process(config, disk=disk, script=script, data=make_data(train=TRAIN))


def give_signal(run: Process, signal: set[int]) -> None:
    """Groups of these prompts have signal, all others none."""
    (sampler,) = run.samplers
    usual = sampler.draw

    def draw(request: RolloutRequest, temperature: float) -> Completion:
        name = request.name
        if name.phase != "train":
            return usual(request, temperature)
        right = f"<reasoning>1</reasoning><answer>{2 * name.prompt_id}</answer>"
        text = right if name.prompt_id in signal and name.sample else WRONG
        version, sha256 = sampler.version, sampler.adapter
        return completion(request, text, version=version, adapter_sha256=sha256)

    sampler.draw = draw  # type: ignore[method-assign]


class Watched:
    """A run, the requests to its sampler, and the rollouts that its learner trained on.

    Args:
        config: of the run.
        signal: ids of the prompts whose groups have signal; None: random.
        script: events during the run.
    """

    def __init__(
        self,
        config: Config,
        *,
        signal: set[int] | None = None,
        script: Script | None = None,
        run: Process | None = None,
    ) -> None:
        self.run = run or process(config, Disk(), script)
        self.learned: list[list[Rollout]] = []
        self.rounds: dict[int, list[list[int]]] = {}
        self._update = self.run.learner.update
        self.run.learner.update = self._watch_update  # type: ignore[method-assign]
        (self._sampler,) = self.run.samplers
        self._generate = self._sampler.generate
        self._sampler.generate = self._watch_generate  # type: ignore[method-assign]
        if signal is not None:
            give_signal(self.run, signal)
        assert self.run.run() == "finished"

    async def _watch_update(self, rollouts: Sequence[Rollout], **how: Any) -> dict[str, float]:
        self.learned.append(list(rollouts))
        return await self._update(rollouts, **how)

    async def _watch_generate(
        self, requests: Sequence[RolloutRequest], **how: Any
    ) -> list[Completion]:
        first = requests[0].name
        if first.phase == "train":
            asked = list(dict.fromkeys(request.name.prompt_id for request in requests))
            self.rounds.setdefault(first.step, []).append(asked)
        return await self._generate(requests, **how)

    @property
    def metrics(self) -> list[dict[str, float]]:
        return self.run.folder.metrics

    def groups(self, step: int) -> list[list[Rollout]]:
        """The rollouts trained on in a step, group by group."""
        pairs = zip(*[iter(self.learned[step])] * 2, strict=True)
        groups = [list(pair) for pair in pairs]
        assert all(one.completion.name.group == two.completion.name.group for one, two in groups)
        return groups


def test_further_rounds_are_sampled_up_to_enough_signal_or_the_cap(tmp_path: Path):
    watched = Watched(config_of(tmp_path))
    several = 0
    for step in range(STEPS):
        rounds, row = watched.rounds[step], watched.metrics[step]
        drawn = sum(map(len, rounds))
        assert len(rounds[0]) == 3
        assert row["rollout/rounds"] == len(rounds)
        assert row["rollout/prompts"] == drawn <= CAP
        groups = watched.groups(step)
        assert len(groups) == 3
        signal = sum(map(has_signal, groups))
        assert signal == min(3, row["groups/mixed"])
        assert signal == 3 or drawn == CAP
        unused = row["rollout/groups_replaced"] + row["rollout/groups_surplus"]
        assert unused == drawn - 3
        assert row["rollout/groups_surplus"] == max(0, row["groups/mixed"] - 3)
        assert row["groups/mixed"] + row["groups/all_equal"] == drawn
        several += len(rounds) > 1
    assert several > 1


def test_rounds_by_hand(tmp_path: Path):
    prompts = make_data(train=TRAIN).train.prompts
    order = [
        prompt.id
        for start in range(TRAIN)
        for prompt in consecutive_prompts(prompts, seed=3, start=start, count=1, window=CAP)
    ]
    # Of the first three groups the second has signal, of the next ones the third and fourth.
    signal = {order[1], order[5], order[6]}
    watched = Watched(config_of(tmp_path, budget={"steps": 1}), signal=signal)
    # Two are missing, and 1 of 3 gives an estimated share of 1.5 / 4: six prompts would be needed,
    # but four are left.
    assert watched.rounds[0] == [sorted(order[:3]), sorted(order[3:7])]
    kept = [group[0].completion.name.prompt_id for group in watched.groups(0)]
    assert kept == [order[1], order[5], order[6]]
    (row,) = watched.metrics
    wrong = len(WRONG) + 1
    assert row["rollout/tokens_wasted"] == 4 * 2 * wrong
    assert (row["rollout/groups_replaced"], row["rollout/groups_surplus"]) == (4, 0)
    assert row["rollout/signal_share"] == 3.5 / 8
    # Reward metrics cover all sampled rollouts: 3 of 14 are right, all well formed.
    assert row["reward/correct"] == pytest.approx(3 / 14)
    rows = watched.run.folder.read_rollouts("step_000001") or []
    assert [row["prompt_id"] for row in rows] == [id_ for id_ in kept for _ in range(2)]
    summary = watched.run.folder.summary
    assert summary is not None
    assert (summary["samples"], summary["rollouts"]["unused"]) == (14, 8)
    assert summary["tokens_generated"] == summary["tokens_trained"] + 4 * 2 * wrong


def test_without_any_signal_the_first_groups_are_kept(tmp_path: Path):
    watched = Watched(config_of(tmp_path, budget={"steps": 2}), signal=set())
    for step in range(2):
        assert sum(map(len, watched.rounds[step])) == CAP
        kept = [group[0].completion.name.prompt_id for group in watched.groups(step)]
        assert sorted(kept) == watched.rounds[step][0]
        assert {rollout.advantage for rollout in watched.learned[step]} == {0.0}
    # The share is known from the first step: all remaining prompts are requested at once.
    assert [len(part) for part in watched.rounds[1]] == [3, 4]


def test_with_signal_in_all_groups_there_is_one_round(tmp_path: Path):
    watched = Watched(config_of(tmp_path), signal=set(range(TRAIN + 1)))
    assert all(len(rounds) == 1 for rounds in watched.rounds.values())
    assert {row["rollout/tokens_wasted"] for row in watched.metrics} == {0.0}


def test_prompts_of_all_rounds_form_complete_epochs(tmp_path: Path):
    watched = Watched(config_of(tmp_path, budget={"steps": 12}))
    stream: list[int] = []
    for step in range(12):
        own = [id_ for part in watched.rounds[step] for id_ in part]
        assert len(set(own)) == len(own)
        stream += own
    for start in range(0, len(stream) - TRAIN + 1, TRAIN):
        assert sorted(stream[start : start + TRAIN]) == list(range(1, TRAIN + 1))
    assert watched.run.coordinator.progress.sampling.prompts_sampled == len(stream) > 36


def test_without_dynamic_sampling_there_are_no_metrics_of_it(tmp_path: Path):
    run = process(make_config(tmp_path), Disk())
    run.run()
    new = ("rounds", "replaced", "wasted", "gain", "staleness", "signal", "drawing", "wait_s")
    assert not any(word in name for row in run.folder.metrics for name in row for word in new)
    assert run.folder.summary is not None
    assert "unused" not in run.folder.summary["rollouts"]


# --- decisions by the clock


def slow(*, sampling: float = 1.0, learning: float = 1.0) -> Script:
    durations = {"sampler0.generate:train": sampling, "learner.update": learning}
    return Script(durations=durations)


def test_a_step_without_time_has_no_further_round(tmp_path: Path):
    config = config_of(tmp_path, budget={"time": "83s", "steps": None})
    watched = Watched(config, signal=set(), script=slow(sampling=10.0, learning=5.0))
    # 20 + 5 s per step while there is time; the third starts with 33 s left, and after its first
    # round 23 are left, less than a step of 25.
    assert [len(rounds) for rounds in watched.rounds.values()] == [2, 2, 1]
    assert watched.run.script.clock.seconds == 65


# --- a resumed run of steps is the same run


SHORT: dict[str, Any] = {"budget": {"steps": 3}, "checkpoint": {"every_steps": 2}}


def ended_at_any_call(
    configured: Callable[[Path], Config],
    folder: Path,
    *,
    hard: bool,
    durations: Mapping[str, float],
) -> None:
    whole = check_same_run(
        lambda own, disk, script: process(
            configured(own), disk, replace(script, durations=durations)
        ),
        folder,
        hard=hard,
    )
    assert any(row["rollout/rounds"] > 1 for row in whole.folder.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("hard", [True, False])
def test_promise_3_a_run_ended_at_any_call_is_the_same_run(tmp_path: Path, *, hard: bool):
    durations = {"sampler0.generate:train": 10.0, "learner.update": 60.0}
    ended_at_any_call(
        lambda folder: config_of(folder, **SHORT), tmp_path, hard=hard, durations=durations
    )


@pytest.mark.slow
@pytest.mark.parametrize("hard", [True, False])
def test_promise_3_with_rollouts_sampled_ahead(tmp_path: Path, *, hard: bool):
    ahead: dict[str, Any] = {"rollout": {"ahead": "one"}, "learner": {"importance_cap": 2.0}}
    ended_at_any_call(
        lambda folder: config_of(folder, **SHORT, **ahead), tmp_path, hard=hard, durations={}
    )
