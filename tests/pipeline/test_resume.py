"""Promise 3: a run of the real actor that ends anywhere and resumes is the undisturbed run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from actors.colocated_actor import ColocatedActor
from configs.alarms import THRESHOLDS, Threshold
from configs.schema import Config
from pipeline.run import record_files, run_folder
from pipeline.run.mirror import Copier, Snapshot, fetch_run
from pipeline.run.run_folder import RunFolder
from tests.real_actor import VALIDATED, RealRun, real_config
from tests.run_process import Killed, Script, kill

CASES: dict[str, dict[str, Any]] = {
    "validation": VALIDATED,
    "partial rollouts": {
        **VALIDATED,
        "rollout": {"partial": "keep", "cut_off": 0.6, "prompts_per_step": 3},
        "checkpoint": {"every_steps": 3},
    },
    "dynamic sampling, ahead": {
        "rollout": {
            "dynamic_sampling": "capped",
            "max_prompts_per_step": 5,
            "ahead": "one",
        },
        "plan": {"placement": "split"},
    },
    "sft": {
        **VALIDATED,
        "run": {"phases": ["sft", "grpo"]},
        "sft": {"train": {"path": "sft.jsonl"}, "steps": 2, "sequences_per_step": 2},
        "checkpoint": {"every_steps": 2},
    },
}


@pytest.fixture(scope="module", autouse=True)
def few_groups_may_be_equal() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(THRESHOLDS, "all_equal", Threshold("above", 0.4, 1))
        yield


def config_of(folder: Path, case: str) -> Config:
    tables = dict(CASES[case])
    tables["run"] = {**tables.get("run", {}), "name": "run", "dir": str(folder)}
    return real_config(folder, **tables)


def noting_writes(write: Callable[..., None], script: Script) -> Callable[..., None]:
    """A function that notes each write to the run folder before it, so that it may be the end."""

    def noted(path: Path, *args: Any, **how: Any) -> None:
        script.note(f"write {path.name}")
        write(path, *args, **how)

    return noted


def run_noted(run: RealRun) -> str:
    """Runs; the writes of records are calls of the script, too. "killed" if it is killed."""
    with pytest.MonkeyPatch.context() as patch:
        noted = noting_writes(record_files.append_row, run.script)
        patch.setattr(run_folder, "append_row", noted)
        noted = noting_writes(record_files.write_atomically, run.script)
        patch.setattr(record_files, "write_atomically", noted)
        try:
            return run.run()
        except Killed:
            return "killed"
        finally:
            run.worker.close()


class Whole:
    """The undisturbed run of each case: its calls and its result."""

    def __init__(self, actor: ColocatedActor, folder: Path) -> None:
        self.actor, self._folder = actor, folder
        self._runs: dict[str, tuple[list[str], Any]] = {}

    def of(self, case: str) -> tuple[list[str], Any]:
        if case not in self._runs:
            run = RealRun(config_of(self._folder / case, case), self.actor)
            assert run_noted(run) == "finished"
            self._runs[case] = run.script.calls, run.result
        return self._runs[case]


@pytest.fixture(scope="module")
def whole(actor: ColocatedActor, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(actor, tmp_path_factory.mktemp("whole"))


def check_same(
    run: RealRun, expected: tuple[Mapping[str, Any], list[int], list[np.ndarray]]
) -> None:
    records, alarms, state = run.result
    assert (records, alarms) == expected[:2]
    for one, other in zip(state, expected[2], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("case", CASES)
def test_promise_3_a_run_that_ends_anywhere_and_resumes_is_the_same_run(
    whole: Whole, tmp_path_factory: pytest.TempPathFactory, case: str
):
    calls, expected = whole.of(case)

    @settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
    @given(
        at=st.integers(0, len(calls) - 1),
        how=st.sampled_from(["kill", "stop", "disk hangs"]),
        later=st.integers(0, 40),
    )
    @example(at=calls.index("generate:train 3"), how="stop", later=0)
    def check(at: int, how: str, later: int) -> None:
        config = config_of(tmp_path_factory.mktemp("run"), case)
        first = RealRun(config, whole.actor)
        on = first.script.on
        if how == "disk hangs":  # checkpoints are not completed for some time before the kill
            on[at], on[at + later] = first.worker.lose_writes, kill
        else:
            on[at] = kill if how == "kill" else first.script.stop.set
        ended = run_noted(first)
        assert ended in ({"killed"} if how == "kill" else {"killed", "interrupted", "finished"})
        if ended != "finished":
            second = RealRun(config, whole.actor)
            assert run_noted(second) == "finished"
            check_same(second, expected)

    check()


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_promise_3_another_host_continues_from_the_mirror(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
):
    """A host and its folder are lost; the next one has another home."""
    calls, expected = whole.of("validation")
    here, there, mirror = tmp_path / "ann/runs", tmp_path / "bob/work/runs", tmp_path / "mirror"
    mirror.mkdir()
    monkeypatch.setenv("HOME", str(here.parent))

    def on_host(folder: Path) -> Config:
        given: dict[str, Any] = config_of(folder, "validation").model_dump(exclude_unset=True)
        given["run"] |= {"mirror": str(mirror)}
        for split in ("train", "validation", "test"):
            given["data"][split]["path"] = str(folder / f"{split}.jsonl")
        return Config.model_validate(given)

    first = RealRun(on_host(here), whole.actor)

    def lost() -> None:
        first.worker.actor.checkpoints.wait()
        Copier(f"{mirror}/run").copy(Snapshot(first.folder.path))
        raise Killed

    first.script.on[int(share * len(calls))] = lost
    assert run_noted(first) == "killed"
    shutil.rmtree(here)
    monkeypatch.setenv("HOME", str(there.parent))
    config, said = on_host(there), list[str]()
    fetch_run(config, say=said.append)
    assert len(said) == 1
    RunFolder.of(config).check(config)
    second = RealRun(config, whole.actor)
    assert second.resumed_from is not None
    assert run_noted(second) == "finished"
    check_same(second, expected)
