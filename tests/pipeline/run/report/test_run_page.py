"""The report's page: of whatever a run folder holds, well-formed, and loading nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.run.report.curves import Panel, Series, chart, smooth
from pipeline.run.report.facts import events
from pipeline.run.report.run_page import run_page
from pipeline.run.report.run_records import read_run
from pipeline.run.run_folder import RunFolder
from tests.pipeline.run.report.test_verdict import run as planted
from tests.run_process import Killed, Script, kill
from tests.samples import make_config, make_data
from tests.stub_workers import Disk, StubRun

STEPS: dict[str, Any] = {
    "budget": {"steps": 6},
    "eval": {"every_steps": 2},
    "data": {"validation": {"path": "validation.jsonl"}},
}


def checked(text: str) -> None:
    """Checks a page: it loads nothing, and its ids are unique."""
    assert not re.search(r"<(script|iframe|object|embed|link|img)\b|http|@import", text)
    assert not re.search(r"<[^>]*\b(src|srcset|action|data)=", text)
    assert not re.search('<[^>]*href="[^#]', text)
    ids = re.findall(r'<[^>]* id="([^"]*)"', text)
    assert len(set(ids)) == len(ids)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of a finished run with evaluations."""
    run = StubRun(make_config(tmp_path, **STEPS), data=make_data(validation=4))
    assert run.run() == "finished"
    return run.folder.path


def test_a_finished_run_has_all_sections_and_charts(finished: Path):
    text = run_page(read_run(finished))
    checked(text)
    headings = set(re.findall(r"<h2[^>]*>([^<]*)</h2>", text))
    assert {"Curves", "Answers to the same prompts", "Rollouts", "Settings"} <= headings
    assert not re.search("</h2>\\s*<h2", text)  # an empty section
    assert str(finished) not in text
    assert len(re.findall(r"<svg.*?</svg>", text, re.DOTALL)) > 5


def test_events_are_in_words():
    changes = [["rewards.functions.format.weight", 0.1, 2.0]]
    journal = [
        {"event": "rewards_changed", "after_step": 2, "changes": changes},
        {"event": "reward_errors", "step": 3, "causes": {"raised": 2}, "first": None},
        {"event": "abandoned", "step": 3, "elapsed_s": 112.31423761399992},
    ]
    assert events(planted(journal=journal))[1:] == [
        ("", "2", "rewards changed", "rewards.functions.format.weight was 0.1, now 2.0"),
        ("", "3", "reward errors", "causes {raised = 2}"),
        ("", "3", "abandoned", "elapsed s 112.314"),
    ]


def test_texts_of_rollouts_are_shown_and_never_interpreted(finished: Path):
    path = finished / "rollouts" / "step_000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    evil = "</pre><script>alert(1)</script><img src=x>\x00\x1b[31m\ud800 {{ 7 * 7 }}"
    for row in rows:
        row |= {"text": evil, "prompt": evil, "reward": 1.0}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = run_page(read_run(finished))
    checked(text)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "{{ 7 * 7 }}" in text


def test_a_killed_and_a_resumed_run(tmp_path: Path):
    config, disk = make_config(tmp_path, **STEPS), Disk()
    script = Script(on={"learner.update 4": kill})
    run = StubRun(config, disk=disk, data=make_data(validation=4), script=script)
    with pytest.raises(Killed):
        run.run()
    run.folder.close()
    text = run_page(read_run(run.folder.path))
    checked(text)
    assert "it was killed" in text
    again = StubRun(config, disk=disk, data=make_data(validation=4))
    assert again.run() == "finished"
    assert "Dotted: resumed." in run_page(read_run(again.folder.path))


def test_missing_files_are_left_out(finished: Path, tmp_path: Path):
    for name in ("config.json", "journal.jsonl", "metrics.jsonl", "rollouts"):
        (finished / name).rename(finished / "elsewhere")
        checked(run_page(read_run(finished)))
        (finished / "elsewhere").rename(finished / name)
    folder = RunFolder(tmp_path)
    with folder.held():
        (tmp_path / "status.json").write_text(json.dumps({"phase": "device_wait"}))
        text = run_page(read_run(tmp_path))
    checked(text)
    assert "A process holds the folder; it is waiting for devices." in text


def test_a_chart_is_the_same_each_time_keeps_its_labels_and_is_smoothed():
    panel = Panel('a "title" <b> & more', [Series("x", [(1, 0.0), (2, 0.1)])])
    first = chart(panel)
    assert first == chart(panel)
    checked(first)
    assert ">0.03<" in first
    points = [(float(x), float(x % 2) - 1) for x in range(40)]
    found = smooth(points)
    assert [x for x, _ in found] == [x for x, _ in points]
    assert found[21][1] == pytest.approx(-0.4)  # five points, three of them 0
