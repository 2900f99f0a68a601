"""What all commands share: light imports, exit statuses, one line per mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from launch.__main__ import COMMANDS
from launch.exits import EXIT_CLUSTER_LOST, Failure, exit_status
from tests.launch.small_run import everything_below

PROJECT = Path(__file__).parents[2]
HEAVY = (
    *("jax", "flax", "orbax", "qwix", "tunix", "ray", "numpy", "scipy", "datasets"),
    *("sentencepiece", "wandb", "tqdm", "asyncio"),
)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False
    )


VERSION = "RUN_DIR[@STEP|@best|@last]"
HELP = {
    "plan": "CONFIG.toml [--table.key VALUE ...]",
    "doctor": "[CONFIG.toml] [--table.key VALUE ...]",
    "evaluate": f"{VERSION}|CONFIG.toml [--table.key VALUE ...]",
    "export": f"{VERSION} [--table.key VALUE ...] [options]",
    "chat": f"{VERSION}|CONFIG.toml [--table.key VALUE ...] [options]",
    "data": "CONFIG.toml [--table.key VALUE ...]",
    "report": "RUN_DIR [RUN_DIR ...]",
    "runs": "[RUNS_FOLDER | RUN_DIR]",
    "reward": "CONFIG.toml [--table.key VALUE ...]",
    # The last one: it may load asyncio, as its parent is one process.
    "train": "CONFIG.toml [--table.key VALUE ...]",
}
"""The usage of each command."""


def test_help_loads_nothing_heavy():
    done = python(f"""
import contextlib, importlib, io, json, sys
found = {{}}
for command in {[*HELP]}:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            status = importlib.import_module(f"launch.{{command}}").main(["--help"])
        except SystemExit as ended:
            status = ended.code
    found[command] = status, shown.getvalue(), [name for name in {HEAVY} if name in sys.modules]
print(json.dumps(found))
""")
    assert done.stderr == ""
    assert {*HELP, "bench"} == COMMANDS.keys()
    for command, (status, shown, heavy) in json.loads(done.stdout).items():
        assert (status or 0, heavy) == (0, ["asyncio"] if command == "train" else []), command
        assert f"python -m launch.{command} {HELP[command]}" in shown
        assert len(shown.splitlines()) <= 45, command  # a screen of 80 columns


def test_an_error_has_its_exit_status_and_one_line(capsys: pytest.CaptureFixture[str]):
    for error, status in (
        (FileNotFoundError("no folder x"), 2),
        (Failure("the cluster is gone", EXIT_CLUSTER_LOST), 75),
        (KeyboardInterrupt(), 130),
    ):

        def fail(error: BaseException = error) -> int:
            raise error

        assert exit_status(fail) == status
        assert capsys.readouterr().err.splitlines() == [f"{error}"][: status != 130]


def test_a_closed_pipe_ends_the_output():
    code = """
import os
from launch.exits import print_lines
read, write = os.pipe()
os.dup2(write, 1)
os.close(read), os.close(write)
def lines():
    yield from ["x" * 9_000] * 9
    raise AssertionError
print_lines(lines())
"""
    assert python(code).stderr == ""


PAST = "2024-01-01T00:00:00+00:00"
MISTAKES = {
    "evaluate": [
        (["moved@4"], "moved has no checkpoint 4; there are 3, 12, best, last"),
        (["movd@3"], "/movd; nearest: "),
        (["moved/checkpoints"], "is no run folder and no export in one"),
        (["moved", "--json", "no/a.json"], "command line: --json: no folder "),
        (["small.toml", "--data.test.path=gone.jsonl"], "data.test.path: no file"),
        (["small.toml", "--eval.samples=2"], "needs eval.temperature above 0"),
    ],
    "chat": [
        ([], "command line: RUN_DIR[@STEP|@best|@last]|CONFIG.toml is missing"),
        (["moved@first"], "no folder "),
        (["moved", "--temperature=-1"], "--temperature -1: must be at least 0"),
        (["moved", "--temprature=1"], "unknown; did you mean --temperature?"),
    ],
    "export": [
        (["moved"], "required: --out"),
        (["moved", "--out", "moved"], "--out moved: exists and is not an empty folder"),
        (["moved", "--out", "x", "--format", "gguf"], "invalid choice: 'gguf'"),
        (["moved", "--out", "x", "--public"], "--public has no effect without --push"),
        (["moved", "--out", "x", "--push", "ann/x"], "--push ann/x: write hf://USER/NAME"),
    ],
    "plan": [
        (["small.toml", "--topology", "v5e-9"], "--topology v5e-9: unknown; known topologies"),
        (["small.toml", "--verify"], "--verify: programs can be compiled for v5e-1,"),
        (
            ["small.toml", "--budget.steps", "none", "--budget.until", PAST],
            f"budget.until = {PAST} has passed",
        ),
    ],
    "data": [(["small.toml", "--data.test.path=absent.jsonl"], "data.test.path: no file")],
    "report": [([], "required: RUN_DIR; --help"), (["moved/rollouts"], "not a run folder")],
    "runs": [
        (["nowhere"], "nowhere: no such folder"),
        (["moved/rollouts"], "neither a run folder nor a folder of runs"),
    ],
    "reward": [
        (["small.toml", "--cases=none.jsonl"], "command line: --cases: no file none.jsonl"),
        (["small.toml", "--form=<answer>"], "--form '<answer>': must contain the word ANSWER"),
        (["small.toml", "--steps=1:2"], "--steps: needs --rollouts"),
        (["small.toml", "--rollouts", "moved", "--steps=all"], "all: must be A:B, A: or :B"),
        (["small.toml", "--rollouts", "moved", "--rows=3"], "has no effect with --rollouts"),
    ],
    "submit": [
        (["--no-wait"], "CONFIG.toml is missing"),
        (["small.toml", "--dry-run"], "--dry-run: not possible for a job"),
    ],
}
"""By command: arguments, and a part of the message."""


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(
    moved: Path, capsys: pytest.CaptureFixture[str], command: str
):
    main, before = import_module(f"launch.{command}").main, everything_below(moved.parent)
    for arguments, told in MISTAKES[command]:
        assert main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line
    assert everything_below(moved.parent) == before
