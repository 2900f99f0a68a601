"""The task of `make gemma`: disjoint names, right answers, and what the repository holds of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.load import load_config
from launch.demo.queues import main, template, write_splits
from tests.launch.cluster_fixtures import PROJECT

FOLDER = PROJECT / "launch" / "demo" / "queues"


def test_the_splits_are_those_of_the_repository(tmp_path: Path) -> None:
    for file in write_splits(tmp_path, seed=0):
        assert file.read_bytes() == (FOLDER / file.name).read_bytes()


def test_the_preset_has_the_template_of_three_examples() -> None:
    config = load_config(PROJECT / "configs" / "gemma3_270m_cpu.toml")
    assert config.prompt.template == template(3)


def test_kinds_of_answers_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"queue": "Eva, Jim, Ruth, Mark", "name": "Jim", "answer": "Ruth"}
    test = tmp_path / "test.jsonl"
    test.write_text(f"{json.dumps(row)}\n" * 4, encoding="utf-8")
    config = {"data": {"test": {"path": str(test)}}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "rollouts").mkdir()
    for when, answers in (
        ("before", ["Ruth", "Eva", "Kate", "Caylan"]),
        ("after", ["Ruth", "Ruth", "Ruth", None]),
    ):
        lines = [{"prompt_id": n, "found": found} for n, found in enumerate(answers, start=1)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "rollouts" / f"test_{when}.jsonl").write_text(text, encoding="utf-8")
    assert main(["--answers", str(tmp_path)]) == 0
    before, after = capsys.readouterr().out.splitlines()
    for kind in ("right", "another of the queue", "another name", "no name"):
        assert f"{kind} 25.0%" in before
    assert after == "after: right 75.0%, no name 25.0% of 4"
