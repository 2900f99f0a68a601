"""What W&B's own reader finds in the files of a run that was stopped twice."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

import pytest

from tests.launch.cluster_fixtures import (
    PATIENCE_S,
    VALIDATED,
    Head,
    finish,
    train_command,
    wait_for_lines,
    write_config,
)
from tests.pipeline.run.wandb_files import WandbFiles

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(4 * PATIENCE_S)]

STEPS = 5
SETTINGS = [
    *(f"--budget.steps={STEPS}", *VALIDATED, "--wandb.mode=offline", "--wandb.table_every=2"),
]


def logged(entry: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an entry of the journal about an evaluation."""
    prefix = f"eval/{entry['name']}"
    found = {f"{prefix}/{key}": value for key, value in entry.items() if isinstance(value, float)}
    return {f"{prefix}/version": entry["step"], **found}


@pytest.fixture(scope="module")
def found(head: Head, tmp_path_factory: pytest.TempPathFactory) -> WandbFiles:
    """The files of a run that was stopped after its first and its third step."""
    folder = tmp_path_factory.mktemp("stopped")
    config, run = write_config(folder, name="stopped"), folder / "runs" / "stopped"
    for steps in (1, 3, None):
        process = head.start(*train_command(config, *SETTINGS))
        if steps is not None:
            wait_for_lines(run / "metrics.jsonl", steps, process)
            process.send_signal(signal.SIGINT)
        status, output = finish(process)
        assert status == (0 if steps is None else 130), output
        assert output.count("wandb sync") == 1
    return WandbFiles(run)


def test_wandb_has_every_metric_and_evaluation_once(found: WandbFiles):
    rows = [row["_step"] for row in found.rows]
    assert rows == sorted(set(rows))
    by_step = {row["step"]: row for row in found.rows if "step" in row}
    recorded = found.folder.metrics
    assert list(by_step) == [row["step"] for row in recorded] == list(range(1, STEPS + 1))
    for row in recorded:
        numbers = {key: value for key, value in row.items() if not isinstance(value, str)}
        assert numbers == {key: by_step[row["step"]][key] for key in numbers}
    evaluations = found.folder.valid_entries("evaluated")
    versions = [entry["step"] for entry in evaluations if entry["name"] == "validation"]
    assert versions == list(range(STEPS + 1))
    for entry in evaluations:
        key = f"eval/{entry['name']}/version"
        (row,) = (row for row in found.rows if row.get(key) == entry["step"])
        assert logged(entry).items() <= row.items()
    defined = {
        record["glob_name"]: record for record in found.of("metric") if "glob_name" in record
    }
    assert defined["reward/*"]["step_metric"] == "step"
    validation = defined["eval/validation/*"]
    assert validation["step_metric"] == "eval/validation/version"
    assert validation["summary"] == {"none": True}


def test_the_summary_has_the_exported_version(found: WandbFiles):
    final, entries = found.folder.summary, found.folder.valid_entries("evaluated")
    assert final is not None
    best, summary = final["best"]["step"], found.summary
    assert summary["best/step"] == summary["export/version"] == best
    (validation,) = (e for e in entries if (e["name"], e["step"]) == ("validation", best))
    expected = logged(validation)
    (after,) = (entry for entry in entries if entry["name"] == "test_after")
    expected |= logged(after)
    versions = {key for key in expected if key.endswith("/version")}
    assert {key: summary[key] for key in expected.keys() - versions} == {
        key: value for key, value in expected.items() if key not in versions
    }
    assert summary["reward/mean"] == found.folder.metrics[-1]["reward/mean"]
    assert summary["ended"] == "finished"
    assert summary["eval/paired_p"] == final["eval"]["paired_p"]
    # The evaluation before training was of an earlier process.
    assert summary["eval/before/accuracy"] == final["eval"]["before"]["accuracy"]


def test_tables_are_of_the_steps_rollouts(found: WandbFiles):
    rows = {row["step"]: row for row in found.rows if "step" in row}
    assert [step for step, row in rows.items() if "rollouts.path" in row] == [1, 2, 4]
    for step in (1, 2, 4):
        recorded = {
            (record["text"], record["advantage"])
            for record in found.folder.read_rollouts(f"step_{step:06d}")
        }
        table = found.table(rows[step])
        at = {name: number for number, name in enumerate(table["columns"])}
        shown = {(line[at["text"]], line[at["advantage"]]) for line in table["data"]}
        assert shown <= recorded
        assert {line[at["pick"]] for line in table["data"]} == {"best", "median", "worst"}
        assert {line[at["step"]] for line in table["data"]} == {step}
        assert "reward/exact" in at
