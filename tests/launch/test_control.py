"""`launch.control`: what is refused, and a real run that is steered, killed and resumed."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.load import load_config
from launch import control
from launch.exits import exit_status
from pipeline.run.run_folder import RunFolder
from tests.launch.cluster_fixtures import (
    PATIENCE_S,
    VALIDATED,
    Head,
    copy_run,
    family,
    finish,
    private_environment,
    start,
    train_command,
    wait_for_lines,
    write_config,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def running(request_path: Path) -> Iterator[RunFolder]:
    """The folder of a run that a process holds."""
    config = load_config(request_path)
    folder = RunFolder.of(config)
    folder.create(config)
    yield folder
    folder.close()


def refused(*arguments: object, capsys: pytest.CaptureFixture[str]) -> str:
    """The line of a refused command."""
    assert control.main([str(argument) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("chekpoint", "command line: chekpoint: unknown; did you mean checkpoint?"),
        ("checkpoint now", "command line: checkpoint now: the arguments are checkpoint"),
        ("set learner.lr", "command line: set learner.lr: the arguments are set KEY VALUE"),
        ("set learner.lr -1e-3", "learner.lr = -0.001: must be a number, above 0 and at most 10"),
        ("set learner.lrr 1", "learner.lrr: unknown; did you mean learner.lr?"),
        ("set plan.slots 8", "plan.slots: may not change while a run runs; these may: learner.lr,"),
        ("set rewards.functions.right.weight 2", "nearest: rewards.functions.correct.weight"),
        ("evaluate", "evaluate: the run has no validation split"),
        ("extend 1h", "extend 1h: this run has budget.steps; give a number of steps"),
        ("extend -5", "extend -5: a budget can only be extended, not reduced; give an amount"),
        ("extend 0", "extend 0: this run has budget.steps; give a number of steps, at least 1"),
        ("checkpoint --now", "command line: unrecognized arguments: --now; --help describes the"),
    ],
)
def test_a_mistake_is_a_line_and_leaves_no_request(
    running: RunFolder, arguments: str, says: str, capsys: pytest.CaptureFixture[str]
):
    assert says in refused(running.path, *arguments.split(), capsys=capsys)
    assert not (running.path / "control.jsonl").exists()


def test_only_a_running_run_is_steered(running: RunFolder, capsys: pytest.CaptureFixture[str]):
    gone = running.path.with_name("smal")
    line = refused(gone, "checkpoint", capsys=capsys)
    assert line == f"{gone}: no such run folder; nearest: {running.path}"
    assert "not a run folder" in refused(running.path.parent, "checkpoint", capsys=capsys)
    running.close()
    line = refused(running.path, "checkpoint", capsys=capsys)
    assert "no process runs this run; resume it with the command that started it" in line
    running.write_summary({"ended": "finished", "steps": 3})
    line = refused(running.path, "checkpoint", capsys=capsys)
    assert "the run has finished after 3 steps; launch.train with --extend continues it" in line


def test_before_the_first_step_the_phase_is_named(
    request_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = RunFolder.of(load_config(request_path))
    with folder.held():
        line = refused(folder.path, "checkpoint", capsys=capsys)
        first = f"{folder.path}: the run starts for the first time"
        assert line == f"{first} (loading and compiling); try again when it trains"
        folder.status.write_text('{"phase": "device_wait"}')
        line = refused(folder.path, "checkpoint", capsys=capsys)
        assert line == f"{first} (waiting for devices); try again when it trains"


def test_a_request_without_waiting_is_a_line_in_the_run_folder(running: RunFolder):
    for arguments in (["set", "learner.lr", "1e-4"], ["export"]):
        assert control.main([str(running.path), *arguments, "--no-wait"]) == 0
    lines = (running.path / "control.jsonl").read_text().splitlines()
    assert '"verb": "set", "key": "learner.lr", "value": 0.0001, "crc32"' in lines[0]
    assert '"verb": "export", "crc32"' in lines[1]


def test_a_run_that_ends_before_fails_the_command(
    running: RunFolder, capsys: pytest.CaptureFixture[str]
):
    request = control.prepare([str(running.path), "checkpoint"])
    running.close()
    assert exit_status(lambda: request, control.run) == 1
    error = capsys.readouterr().err
    assert "between two steps; now it is loading and compiling. Ctrl-C does not" in error
    assert "the run has ended without taking the request up" in error


def steered(run: Path) -> list[tuple[int, str]]:
    return [(entry["step"], entry["verb"]) for entry in RunFolder(run).events("steered")]


def adapter(run: Path) -> str:
    summary = RunFolder(run).summary
    assert summary is not None
    return str(summary["adapter_sha256"])


def check_profile(folder: Path) -> None:
    """A trace of each process."""
    for process in ("learner", "sampler_0"):
        (trace,) = (folder / process).rglob("*.trace.json.gz")
        assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert list((folder / process).rglob("*.xplane.pb"))


@pytest.mark.ray
@pytest.mark.timeout(4 * PATIENCE_S)
def test_invariant_7_a_steered_run_is_killed_stopped_and_resumed(
    head: Head, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    settings = [*VALIDATED, "--eval.every_steps=500", "--checkpoint.every_steps=500"]
    settings += ["--checkpoint.keep=9"]
    config, run = write_config(tmp_path, name="steered"), tmp_path / "runs" / "steered"
    # The other processes have no profile, which is a test that it changes nothing.
    first = train_command(config, *settings, "--budget.steps=500", "--profile.steps=1-2")
    process = start(first, private_environment())
    wait_for_lines(run / "metrics.jsonl", 1, process)
    ask = [["set", "learner.lr", "5e-4"], ["checkpoint"], ["evaluate"]]
    for arguments in ask[:2]:
        assert control.main([str(run), *arguments, "--no-wait"]) == 0
    assert control.main([str(run), *ask[2]]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    at = steered(run)[0][0]
    assert steered(run) == [(at, "set"), (at, "checkpoint"), (at, "evaluate")]
    assert said == f"after step {at}: this version is validated"
    assert control.main([str(run), "set", "learner.lr", "2e-3"]) == 0
    later = steered(run)[-1][0]
    assert capsys.readouterr().out == (
        f"learner.lr = 0.002 from step {later + 1} on (it was 0.0005)\n"
    )
    wait_for_lines(run / "metrics.jsonl", later + 1, process)
    for one in family(process.pid):
        one.kill()
    process.communicate(timeout=PATIENCE_S)
    check_profile(run / "profile")

    # The same file, which has the first learning rate.
    resume = train_command(config, *settings, f"--budget.steps={later + 3}")
    whole, copy = copy_run(run, tmp_path / "whole")
    process = head.start(*resume)
    wait_for_lines(run / "journal.jsonl", len(list(RunFolder(run).entries())) + 1, process)
    assert control.main([str(run), "stop-after-step", "--no-wait"]) == 0
    status, output = finish(process)
    assert status == 130, output
    assert "as launch.control has set:\n  learner.lr: was 0.001, now 0.002" in output
    assert "resuming after step" in output
    status, output = head.run(*resume)
    assert status == 0, output
    rates = {row["step"]: row["learner/lr"] for row in RunFolder(run).metrics}
    assert rates == {
        step: pytest.approx(1e-3 if step <= at else 5e-4 if step <= later else 2e-3)
        for step in range(1, later + 4)
    }

    # In one process, from the checkpoint before the first step.
    for folder in (copy / "checkpoints").iterdir():
        if folder.name.isdecimal() and int(folder.name) > 0:
            shutil.rmtree(folder)
    status, output = head.run(*train_command(whole, *settings, f"--budget.steps={later + 3}"))
    assert status == 0, output
    assert "resuming after step 0" in output
    assert adapter(copy) == adapter(run)
