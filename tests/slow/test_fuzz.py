"""Random damage to what users give: configurations and data.

Each case damages the demo's request at a place that its seed draws, and calls commands in this
process. A command ends with exit status 0, 1 or 2, and says why it is not 0 in lines without a
traceback.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

import configs
from launch import data, evaluate, plan, train
from launch.exits import exit_status

pytestmark = pytest.mark.slow

CASES = 60
"""Of each kind."""
_ROOT = Path(configs.__file__).parent.parent
_DEMO = _ROOT / "launch" / "demo"
_ROWS = 40
"""Rows of the damaged dataset."""
JUNK: Sequence[str] = (
    *('""', "-1", "0", "1e400", "nan", "inf", "true", "[]", "{}", "9" * 400, '"\\u0000"', "[[]]"),
    *("1e-320", '"' + "x" * 70_000 + '"', '"../../../etc/passwd"', '"/dev/null"', '"\\ud800"'),
    *('"é\u202e\U0001f600"', "[1, [2, {a = 3}]]", "1979-05-27", "0x7fffffffffffffffffff", "-0.0"),
    *("9223372036854775807", "-9223372036854775808", "1e308", "4611686018427387904", "65537"),
    *("[" * 2000 + "]" * 2000, "null", '"rewards.correctness:nothing"', '["a", 1]', '"1h"'),
)
"""Values in TOML and JSON, some of them invalid."""

PLAUSIBLE: Sequence[str] = (
    *("1", "2", "3", "7", "64", "1000", "1_000_000", "0.5", "1e-9", "0.0", "false", '"off"'),
    *('"auto"', '"colocated"', '"bfloat16"', '"token"', '"question"', '["<end_of_turn>"]'),
)
"""Values in TOML that many settings take, though not each."""

Damage = Callable[[Path, random.Random], None]
Command = Callable[[list[str]], int]


def junk_bytes(content: bytes, rng: random.Random) -> bytes:
    """A file as failing disks, editors and people leave it."""
    at = rng.randrange(len(content) + 1)
    end = min(len(content), at + rng.choice([1, 2, 8, 200]))
    middle = {
        "cut": b"",
        "twice": content[at:end] * 2,
        "noise": rng.randbytes(end - at),
        "zeros": bytes(end - at),
        "flip": bytes(byte ^ 1 << rng.randrange(8) for byte in content[at:end]),
        "text": rng.choice([b"\xff\xfe", b"\r", b"\xe2\x80\xa8", b"]" * 9, b"{" * 5000, b"\n\n"]),
    }[rng.choice(["cut", "twice", "noise", "zeros", "flip", "text"])]
    whole = content[:at] + middle + content[end:]
    return rng.choice([whole, whole, whole, content[:at], b"", bytes(len(content))])


def damage_config(folder: Path, rng: random.Random) -> None:
    """Replaces, repeats or invents settings."""
    path = folder / "request.toml"
    lines = path.read_text(encoding="utf-8").splitlines()
    places = [n for n, line in enumerate(lines) if re.match(r"\w+ = ", line)]
    for _ in range(rng.choice([1, 1, 2])):
        at = rng.choice(places)
        key, value = lines[at].split(" = ")[:2]
        plausible = f"{key} = {rng.choice(PLAUSIBLE)}"
        if re.fullmatch(r"[\d_]+", number := value.partition("#")[0].strip()):
            plausible = f"{key} = {int(int(number) * rng.choice([0, 0.3, 0.5, 1, 2, 3, 10, 1e4]))}"
        lines[at] = rng.choice(
            [
                *[plausible] * 6,
                f"{key} = {rng.choice(JUNK)}",
                lines[at] + "\n" + lines[at],
                f"{key}{rng.choice('xs_1')} = 1",
                f"[{key}]",
                f"{key}.{key} = {rng.choice(JUNK)}",
            ]
        )
    text = "\n".join(lines).encode("utf-8", errors="surrogateescape")
    path.write_bytes(junk_bytes(text, rng) if rng.random() < 0.2 else text)


def damage_rows(folder: Path, rng: random.Random) -> None:
    """Damages rows of the dataset: keys, types, sizes, encodings."""
    path = folder / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    values = [None, 7, 1e300, True, [], {}, ["a", 1], {"a": {"b": 1}}, "", " ", "\0", "\ud800"]
    values += ["x" * 10**6, "\u202e", "<start_of_turn>", "{question}", float("nan"), -(2**70)]
    for _ in range(rng.choice([1, 3, _ROWS])):
        row = rng.choice(rows)
        key = rng.choice([*row, "question", "answer", "new", ""])
        if rng.random() < 0.3:
            row.pop(key, None)
        else:
            row[key] = rng.choice(values)
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(junk_bytes(text, rng) if rng.random() < 0.5 else text)


def _evaluate(words: list[str]) -> int:
    return exit_status(lambda: int(evaluate.prepare(words) is None))


KINDS: dict[str, tuple[Damage, list[tuple[Command, list[str]]]]] = {
    "configurations": (
        damage_config,
        [
            *((main, []) for main in (plan.main, data.main, _evaluate)),
            (train.main, ["--dry-run", "--run.name", "new"]),
        ],
    ),
    "data rows": (
        damage_rows,
        [(data.main, []), (data.main, ["--data.malformed", "skip"])],
    ),
}
"""By kind: how it is damaged, and the commands with their arguments."""


def make_request(folder: Path) -> None:
    """Writes the demo's request with a small dataset and a copy of the model."""
    shutil.copytree(_DEMO / "tiny_gemma3", folder / "model")
    for name in ("train", "validation", "test"):
        with (_DEMO / "data" / f"{name}.jsonl").open(encoding="utf-8") as file:
            (folder / f"{name}.jsonl").write_text(
                "".join(next(file) for _ in range(_ROWS)), "utf-8"
            )
    text = (_ROOT / "configs" / "demo.toml").read_text(encoding="utf-8")
    text = text.replace("../launch/demo/tiny_gemma3", "model").replace("../launch/demo/data/", "")
    text = f'run = {{ name = "fuzz", dir = "{folder / "runs"}" }}\n{text}'
    (folder / "request.toml").write_text(text, encoding="utf-8")


def run_case(kind: str, seed: int) -> list[str]:
    """Damages a fresh request and calls the commands of its kind; returns what is wrong."""
    damage, commands = KINDS[kind]
    with tempfile.TemporaryDirectory(prefix="grpo-fuzz-") as name:
        make_request(Path(name))
        damage(Path(name), random.Random(f"{kind} {seed}"))
        request = str(Path(name) / "request.toml")
        found = [(main, _wrong(partial(main, [request, *words]))) for main, words in commands]
    return [f"{main.__module__}, seed {seed}: {wrong}" for main, wrong in found if wrong]


def _wrong(command: Callable[[], int]) -> str:
    """What is wrong with the end of a command; empty: nothing."""
    out, err = io.StringIO(), io.StringIO()
    status: int | None = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = command()
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else None
        except BaseException:  # noqa: BLE001  # any error is the finding
            traceback.print_exc()
    if status not in {0, 1, 2} or "Traceback" in err.getvalue():
        return err.getvalue().strip()[-2000:] or f"exit status {status}"
    if status and not (err.getvalue() + out.getvalue()).strip():
        return f"exit status {status} without a sentence"
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_input_never_gives_a_traceback(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [wrong for seed in range(CASES) for wrong in run_case(kind, seed)] == []
