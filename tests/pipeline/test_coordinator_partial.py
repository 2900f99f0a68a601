"""The loop with a cut-off: partial groups, dropped rollouts, killed and resumed runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema import Config
from pipeline.types import Completion, RolloutRequest
from tests.fakes import Disk, Process, Script
from tests.resumes import check_same_run
from tests.samples import make_config, make_data

STEPS = 5


def config_of(folder: Path, partial: str, *, cut_off: float = 0.6, **tables: Any) -> Config:
    """Six new rollouts per step, in groups of two."""
    rollout = {"partial": partial, "cut_off": cut_off, "prompts_per_step": 3}
    return make_config(
        folder,
        **{
            "rollout": rollout,
            "learner": {"importance_cap": 2.0} if partial == "keep" else {},
            "budget": {"steps": STEPS},
            "data": {"validation": {"path": "validation.jsonl"}},
            "eval": {"every_steps": 2},
            "checkpoint": {"every_steps": 3},
            **tables,
        },
    )


def process(config: Config, disk: Disk, script: Script | None = None) -> Process:
    return Process(config, disk=disk, script=script, data=make_data(validation=3))


class Watched:
    """A run and the rollouts that its learner trained on."""

    def __init__(self, config: Config) -> None:
        self.run = process(config, Disk())
        self.learned: list[list[Completion]] = []
        self.asked: list[tuple[str, int, int | None]] = []
        update = self.run.learner.update

        async def watch(rollouts: Sequence[Any], **scalars: float | None) -> dict[str, float]:
            self.learned.append([rollout.completion for rollout in rollouts])
            return await update(rollouts, **scalars)

        self.run.learner.update = watch  # type: ignore[method-assign]
        for sampler in self.run.samplers:
            self._watch(sampler)
        assert self.run.run() == "finished"

    def _watch(self, sampler: Any) -> None:
        generate = sampler.generate

        async def watch(
            requests: Sequence[RolloutRequest],
            *,
            temperature: float,
            min_finished: int | None = None,
        ) -> list[Completion]:
            self.asked.append((requests[-1].name.phase, len(requests), min_finished))
            drawn: list[Completion] = await generate(
                requests, temperature=temperature, min_finished=min_finished
            )
            return drawn

        sampler.generate = watch

    @property
    def metrics(self) -> list[dict[str, float]]:
        return self.run.folder.metrics

    @property
    def summary(self) -> dict[str, Any]:
        assert self.run.folder.summary is not None
        return self.run.folder.summary


def test_kept_rollouts_are_trained_on_when_the_last_of_their_group_finishes(tmp_path: Path):
    watched = Watched(config_of(tmp_path, "keep"))
    all_rollouts = [one for learned in watched.learned for one in learned]
    assert len({one.name for one in all_rollouts}) == len(all_rollouts)
    late = 0
    for step, learned in enumerate(watched.learned):
        groups = Counter(one.name.group for one in learned)
        assert set(groups.values()) <= {2}
        for one in learned:
            assert one.stop_reason in {"eos", "length"}
            versions = [segment.version for segment in one.segments]
            assert versions == sorted(set(versions))
            assert one.name.step <= versions[0]
            assert versions[-1] <= step
            late += versions[0] < step
        rows = watched.run.folder.read_rollouts(f"step_{step + 1:06d}") or []
        assert [row["versions"] for row in rows] == [
            [segment.version for segment in one.segments] for one in learned
        ]
        newest = {
            name
            for name in groups
            if max(one.version for one in learned if one.name.group == name) == step
        }
        assert newest == groups.keys()
    assert late > 2
    assert max(len(one.segments) for one in all_rollouts) >= 2


def test_truncated_continued_and_partial_rollouts_are_counted(tmp_path: Path):
    watched = Watched(config_of(tmp_path, "keep"))
    waiting = cut = 0
    for row, learned in zip(watched.metrics, watched.learned, strict=True):
        assert row["rollout/continued"] == cut
        assert row["rollout/dropped"] == 0
        assert row["rollout/partial"] == waiting + 6 - len(learned)
        waiting, cut = int(row["rollout/partial"]), int(row["rollout/truncated"])
        assert 0 < cut <= waiting
    found = {
        key: sum(row[f"rollout/{key}"] for row in watched.metrics)
        for key in ("truncated", "continued")
    }
    # Rollouts that are partial at the end are dropped.
    assert watched.summary["rollouts"] == {**found, "dropped": waiting}
    assert watched.summary["samples"] == STEPS * 6 - waiting
    # Tokens are counted when they are sampled, those of dropped rollouts too.
    learned_tokens = sum(len(one.tokens) for part in watched.learned for one in part)
    assert watched.summary["tokens_trained"] == learned_tokens
    assert watched.summary["tokens_generated"] > learned_tokens


def test_only_training_rollouts_are_truncated_by_each_samplers_share(tmp_path: Path):
    watched = Watched(config_of(tmp_path, "keep", cut_off=0.5, plan={"samplers": 2}))
    train = [
        (count, min_finished) for phase, count, min_finished in watched.asked if phase == "train"
    ]
    assert train[:2] == [(4, 2), (2, 1)]
    assert all(min_finished == -(-count // 2) for count, min_finished in train)
    others = {min_finished for phase, _, min_finished in watched.asked if phase != "train"}
    assert others == {None}


def test_dropped_rollouts_are_removed_from_their_groups(tmp_path: Path):
    watched = Watched(config_of(tmp_path, "drop"))
    sizes: Counter[int] = Counter()
    for row, learned in zip(watched.metrics, watched.learned, strict=True):
        # At least 0.6 of six.
        assert len(learned) == 4
        assert row["rollout/truncated"] == row["rollout/dropped"] == 2
        assert row["rollout/continued"] == row["rollout/partial"] == 0
        groups = Counter(one.name.group for one in learned)
        sizes.update(groups.values())
        assert row["groups/mixed"] + row["groups/all_equal"] + row["groups/short"] == len(groups)
        assert row["groups/short"] == sum(size == 1 for size in groups.values())
    assert set(sizes) == {1, 2}
    lost = STEPS * 6 - sum(map(len, watched.learned))
    assert watched.summary["rollouts"] == {"truncated": lost, "continued": 0, "dropped": lost}
    assert watched.summary["samples"] == sum(map(len, watched.learned))


def test_a_step_without_finished_groups_has_no_trained_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # One of six may finish: its group is kept until the other does.
    watched = Watched(config_of(tmp_path, "keep", cut_off=0.1, budget={"steps": 2}))
    assert watched.learned[0] == []
    first = watched.metrics[0]
    assert (first["learner/tokens_trained"], first["groups/mixed"]) == (0, 0)
    assert first["rollout/partial"] == 6
    assert not any(name.startswith("reward/") for name in first)
    assert watched.run.learner.version == 2
    assert watched.run.folder.read_rollouts("step_000001") == []
    assert "step 1/2  reward no group has finished  " in capsys.readouterr().out


def test_without_a_cut_off_there_are_no_metrics_of_it(tmp_path: Path):
    run = process(make_config(tmp_path), Disk())
    run.run()
    counts = {f"rollout/{name}" for name in ("partial", "truncated", "continued", "dropped")}
    assert not any(counts & row.keys() for row in run.folder.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("partial", ["keep", "drop"])
@pytest.mark.parametrize("hard", [True, False])
def test_promise_3_a_run_ended_at_any_call_is_the_same_run(
    tmp_path: Path, partial: str, *, hard: bool
):
    check_same_run(
        lambda folder, disk, script: process(config_of(folder, partial), disk, script),
        tmp_path,
        hard=hard,
    )


def test_partial_rollouts_are_in_the_checkpoint_and_an_extended_run_continues_them(tmp_path: Path):
    config, disk = config_of(tmp_path, "keep", budget={"steps": 2}), Disk()
    first = process(config, disk)
    first.run()
    assert first.folder.summary is not None
    waiting = disk[2][1]["sampling"]["partial"]
    assert first.folder.summary["rollouts"]["dropped"] == len(waiting) > 0
    second = process(config, disk)
    found = second.coordinator.progress.sampling.partial.completions
    for one, two in zip(
        found, first.coordinator.progress.sampling.partial.completions, strict=True
    ):
        assert (one.name, one.version) == (two.name, two.version)
        np.testing.assert_array_equal(one.versions, two.versions)
        np.testing.assert_array_equal(one.logprobs, two.logprobs)
    second.deadline.steps = 3
    second.run()
    assert second.folder.metrics[-1]["rollout/continued"] == sum(
        row["stop_reason"] == "truncated" for row in waiting
    )
    assert second.folder.summary is not None
    assert second.folder.summary["rollouts"]["dropped"] == len(disk[3][1]["sampling"]["partial"])
