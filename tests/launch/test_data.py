"""`launch.data`: its report, messages for mistakes, light imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.data import main
from tests.launch.small_run import everything_below, rows, write_rows


@pytest.fixture
def request_file(request_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "100")
    return request_path


def shown(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> tuple[str, str]:
    assert main(argv) == status
    found = capsys.readouterr()
    return found.out, found.err


def test_everything_is_shown_and_nothing_written(
    request_file: Path, capsys: pytest.CaptureFixture[str]
):
    folder = request_file.parent
    write_rows(folder / "train.jsonl", [*rows(0, 6), rows(1, 1)[0], *rows(102, 2)])
    before = everything_below(folder)
    out, err = shown(capsys, str(request_file))
    assert err == ""
    assert "train, prompt 1: " in out
    assert "train, prompt 2: " not in out
    assert "  question: 'tom has 100 apples.'" in out
    assert "=<start_of_turn> " in out
    assert "train: 7 prompts, excluded: 2 in a later split, duplicates kept: 1\n" in out
    assert "note: answers are the last answer block, but no training prompt contains '<an" in out
    assert everything_below(folder) == before


def test_a_mixture_and_demonstrations_are_shown(
    request_file: Path, capsys: pytest.CaptureFixture[str]
):
    folder = request_file.parent
    write_rows(folder / "more.jsonl", rows(50, 3))
    write_rows(folder / "set.jsonl", rows(51, 1))
    demonstrations = [{"question": "tom has 9 apples.", "completion": "<answer>9</answer>"}]
    write_rows(folder / "sft.jsonl", demonstrations)
    settings = ["--data.mixture.0.name=more", "--data.mixture.0.path=more.jsonl"]
    settings += ["--data.mixture.0.weight=0.5", "--eval.sets.0.name=extra"]
    settings += ["--eval.sets.0.path=set.jsonl", "--sft.train.path=sft.jsonl", "--sft.steps=1"]
    out, err = shown(capsys, str(request_file), *settings, '--run.phases=["sft", "grpo"]')
    assert err == ""
    assert "mixture.more, prompt 1000000001: " in out
    assert "sets.extra, prompt 1: " in out
    assert "  completion tokens:\n" in out
    assert "sft, tokens of the demonstrations: 1 of " in out
    assert out.endswith("sft: 1 demonstrations\n")


def test_refused_rows_are_shown_first(request_file: Path, capsys: pytest.CaptureFixture[str]):
    write_rows(request_file.parent / "train.jsonl", [*rows(0, 6), "broken"])
    out, err = shown(capsys, str(request_file), status=2)
    assert "train: 6 prompts, excluded: 1 malformed\n  row 7: not JSON" in out
    assert err.startswith("a run would refuse the malformed rows of train; fix them")
    out, err = shown(capsys, str(request_file), "--data.malformed=skip")
    assert err == ""
