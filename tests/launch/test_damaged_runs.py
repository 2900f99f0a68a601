"""One file of a run folder is damaged: the run resumes to the same result, says so, or is refused.

The folders are of a run that was killed and of one that has finished; nothing is ever deleted.
"""

from __future__ import annotations

import copy
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from launch import report, reward
from launch.exits import exit_status
from launch.preparation import finished
from pipeline.contracts.clock import Clock
from pipeline.run.requests import append_request
from pipeline.run.run_folder import RunFolder
from tests.damage import damages
from tests.fakes import Disk, FakeClock, Killed, left_behind, make_config, make_data
from tests.launch.test_session import Session

pytestmark = pytest.mark.slow

REQUEST = """
run = { name = "run" }
model = { path = "nowhere" }
data = { train = { path = "train.jsonl" }, test = { path = "test.jsonl" } }
rewards.functions = [{ name = "correct", function = "rewards.correctness:exact_answer" }]
rollout = { group_size = 2, prompts_per_step = 2, max_prompt_tokens = 8, max_new_tokens = 80 }
plan = { platform = "cpu", placement = "split", slots = 2, micro_batch_tokens = 176 }
budget = { steps = 4 }
"""
FLIPS = 4
"""Places of a file where a bit is flipped."""
RUNNING = (
    *("config.json", "journal.jsonl", "metrics.jsonl", "control.jsonl"),
    *("plan.json", ".lock", "rollouts/step_000001.jsonl", "rollouts/step_000003.jsonl"),
    *("rollouts/test_before.jsonl", "rollouts/validation_000000.jsonl"),
    "rollouts/validation_000002.jsonl",
)
"""Files of a run that was killed in its fourth step."""
ENDED = (
    *RUNNING,
    *("summary.json", "export/adapter", "rollouts/step_000004.jsonl"),
    *("rollouts/test_after.jsonl", "rollouts/validation_000004.jsonl"),
)
"""Files of a finished run."""
READ = (
    *("config.json", "journal.jsonl", "metrics.jsonl", "plan.json"),
    *("rollouts/step_000001.jsonl", "rollouts/test_after.jsonl", "summary.json"),
)
"""Files that reports and `launch.reward` read, or may read."""
REPLACED = {
    *(".lock", "config.json", "plan.json", "summary.json"),
    *("export/adapter", "rollouts/test_after.jsonl"),
}
"""Files that a run replaces."""
SKILL = (0.1, 0.2, 0.4, 0.6, 0.5, 0.7, 0.8)
"""Share of correct answers, by version."""


@dataclass(frozen=True)
class Outcome:
    """What a start did.

    Attributes:
        status: exit status.
        said: what it printed.
        left: what it left behind.
    """

    status: int
    said: str
    left: Mapping[str, Any]


@dataclass(frozen=True)
class Template:
    """A run folder to damage copies of.

    Attributes:
        folder: `run.dir`.
        disk: its checkpoints.
    """

    folder: Path
    disk: Disk

    @property
    def files(self) -> dict[str, bytes]:
        return files(self.folder / "run")


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def config_of(folder: Path, steps: int) -> Config:
    paths = {name: {"path": f"{name}.jsonl"} for name in ("train", "validation", "test")}
    checked: dict[str, dict[str, Any]] = {"checkpoint": {"every_steps": 2}, "data": paths}
    return make_config(folder, budget={"steps": steps}, eval={"every_steps": 2}, **checked)


def run_to_end(config: Config, disk: Disk, *, killed_at: int | None = None) -> int:
    """Runs one process on a clock that stands still; returns its exit status."""
    session = Session(config, disk, clock=FakeClock())
    data = make_data(train=8, validation=20, test=20)
    session.prepared = replace(session.prepared, data=data)
    session.samplers[0].skill = lambda version: SKILL[max(version, 0)]
    if not session.folder.holds_run:
        session.script.on["learner.update 0"] = lambda: _request(session.folder)

    def kill() -> None:
        session.folder.record_used_s(60.0)
        raise Killed

    if killed_at is not None:
        session.script.on[f"learner.update {killed_at}"] = kill
    with closing(session.folder):
        return session.run()


def _request(folder: RunFolder) -> None:
    append_request(folder.path, "evaluate")


@pytest.fixture(scope="module", autouse=True)
def still_clock() -> Iterator[None]:
    """The clock of all processes stands still: seconds are equal, too; none leaves a thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launch.session.Clock", partial(Clock, now=FakeClock()))
        yield


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Template:
    folder, disk = tmp_path_factory.mktemp("killed"), Disk()
    with pytest.raises(Killed):
        run_to_end(config_of(folder, 4), disk, killed_at=3)
    return Template(folder, disk)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Template:
    folder, disk = tmp_path_factory.mktemp("ended"), Disk()
    assert run_to_end(config_of(folder, 4), disk) == 0
    return Template(folder, disk)


@pytest.fixture
def start(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Starts a copy of a run as `launch.train` does, with one file changed."""

    def start(template: Template, steps: int, changed: Mapping[str, bytes | None]) -> Outcome:
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        shutil.copytree(template.folder, tmp_path / "runs")
        for name, content in changed.items():
            write(tmp_path / "runs" / "run" / name, content)
        config, disk = config_of(tmp_path / "runs", steps), copy.deepcopy(template.disk)

        def command() -> int:
            message = finished(config, extend=None)
            if message is None:
                return run_to_end(config, disk)
            sys.stdout.write(message)
            return 0

        capsys.readouterr()
        status = exit_status(command, int)
        said = capsys.readouterr()
        text = said.out + said.err
        assert status in {0, 1, 2}
        assert "Traceback" not in text
        folder = RunFolder.of(config)
        return Outcome(status, text, {} if status else left_behind(folder))

    return start


def write(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


def lines(content: bytes) -> set[bytes]:
    """The complete lines of a file of records, without their checksums."""
    found = re.sub(rb', "crc32": "[0-9a-f]{8}"', b"", content).split(b"\n")
    return {line for line in found if line.startswith(b"{") and line.endswith(b"}")}


def check_nothing_is_deleted(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> None:
    """Compares the files of a run folder before and after a start."""
    kept = set[bytes]().union(*map(lines, after.values()))
    for name, content in before.items():
        if name not in REPLACED and not after.get(name, b"").startswith(content):
            assert content in after.values() or lines(content) <= kept, name


@pytest.mark.parametrize(
    ("state", "steps", "name"),
    [
        *(("killed", 4, name) for name in RUNNING),
        *(("ended", 4, name) for name in ENDED),
        *(("ended", 6, name) for name in ENDED),
    ],
)
def test_invariant_12_a_damaged_file_is_never_silently_wrong(
    request: pytest.FixtureRequest, start: Any, tmp_path: Path, state: str, steps: int, name: str
):
    template: Template = request.getfixturevalue(state)
    whole = start(template, steps, {})
    assert whole.status == 0
    stem = Path(name).stem
    for what, content in damages(template.files[name], flips=FLIPS):
        found = start(template, steps, {name: content})
        before = {file: old for file, old in template.files.items() if file != name}
        before |= {} if content is None else {name: content}
        after = files(tmp_path / "runs" / "run")
        told = f"{name} {what}: {found.status} {found.said}"
        if found.status:
            assert found.status == 2, told
            assert stem in found.said, told
            assert after.items() >= (before | {".lock": after[".lock"]}).items(), told
            continue
        check_nothing_is_deleted(before, after)
        is_said = stem in found.said
        for part in ("summary", "metrics"):
            unread = (state, steps, name, part) == ("ended", 4, "metrics.jsonl", "metrics")
            assert found.left[part] == whole.left[part] or is_said or unread, told
        for file, rows in whole.left["rollouts"].items():
            if not name.endswith(file):
                assert found.left["rollouts"].get(file) == rows or is_said, f"{file}: {told}"


@pytest.mark.parametrize("command", ["report", "reward"])
@pytest.mark.parametrize("name", READ)
def test_what_is_read_from_a_damaged_file_is_never_silently_wrong(
    ended: Template,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    name: str,
):
    monkeypatch.setenv("GEMMA_GRPO_HOME", str(tmp_path))
    run = tmp_path / "runs" / "run"
    toml = tmp_path / "request.toml"
    toml.write_text(REQUEST, encoding="utf-8")

    def read(changed: Mapping[str, bytes | None]) -> tuple[int, str]:
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        shutil.copytree(ended.folder, tmp_path / "runs")
        for file, content in changed.items():
            write(run / file, content)
        before = files(run)
        if command == "report":
            status = report.main([str(run), "--out", str(tmp_path / "page.html")])
        else:
            status = reward.main([str(toml), "--rollouts", str(run)])
        said = capsys.readouterr()
        assert files(run) == before
        page = (tmp_path / "page.html").read_text("utf-8") if command == "report" else ""
        assert "Traceback" not in said.out + said.err
        return status, said.out + said.err + page

    whole = read({})
    assert whole[0] in {0, 1}, whole[1]
    for what, content in damages(ended.files[name], flips=1):
        found = read({name: content})
        new = set(found[1].splitlines()) - set(whole[1].splitlines())
        is_said = any(Path(name).name in line for line in new)
        assert found[0] in {0, 1, 2}
        assert found == whole or is_said, f"{name} {what}: {sorted(new)}"
