"""What all commands share: light imports, exit statuses, one line per mistake."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.exits import EXIT_CLUSTER_LOST, Failure, exit_status
from launch.flags import output_file

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


LONGEST_HELP = 45
"""Lines of a help, in 80 columns; a screen."""


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
    for command, (status, shown, heavy) in json.loads(done.stdout).items():
        assert (status or 0, heavy) == (0, ["asyncio"] if command == "train" else []), command
        assert f"python -m launch.{command} {HELP[command]}" in shown
        assert len(shown.splitlines()) <= LONGEST_HELP, command


def test_the_driver_never_loads_jax():
    done = python("""
import sys
import launch.chat, launch.data, launch.evaluate, launch.export, launch.session
import pipeline.evaluate.conversation, pipeline.data.inspection
import actors.handles
print([name for name in ("jax", "flax", "qwix", "orbax") if name in sys.modules])
""")
    assert done.stdout == "[]\n", done.stderr


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


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path, told in (
        (tmp_path, f"{tmp_path} is a folder; name a file"),
        ("gs://bucket/a.json", "gs:// is not supported; "),
        (tmp_path / "no" / "a.json", f"no folder {tmp_path / 'no'}"),
    ):
        with pytest.raises(ValueError, match=f"^command line: --json: {re.escape(told)}"):
            output_file("--json", str(path))
