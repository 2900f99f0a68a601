"""The report of a rehearsal: figures, and the lines that show them."""

from __future__ import annotations

from typing import Any

import pytest

from launch.rehearsal.report import Failure, Result, Row, lines, report
from pipeline.contracts.sizes import Sizes
from pipeline.plan.cost_model.roofline import Seconds

GIB = 2**30
ROWS = (
    Row("probe", 0.0625, note="agree"),
    Row(
        "decode",
        2.5,
        planned=Seconds(1.0, 2.0, 4.0, "bandwidth"),
        planned_bytes=3 * GIB,
        compiled_bytes=2 * GIB,
    ),
)
ON_CHIP = (
    Row("update", 7.0, compiled_bytes=9 * GIB, peak_bytes=10 * GIB, is_peak=True),
    Row("sync", 0.25, peak_bytes=10 * GIB),
)


def result(**changes: Any) -> Result:
    sizes = Sizes(8, 1024)
    given = {"rows": ROWS, "failure": None, "first": sizes, "sizes": sizes, "limit_bytes": None}
    return Result(**given | changes)


def shown(found: Result) -> list[str]:
    return list(lines(report("mine", found)))


def row(found: Result, name: str) -> list[str]:
    return next(line.split() for line in shown(found) if line.startswith(name))


def test_figures_are_seconds_and_gib():
    found = report("mine", result(limit_bytes=16 * GIB))
    assert found["name"] == "mine"
    assert (found["works"], found["failed"], found["device_limit_gib"]) == (True, None, 16.0)
    probe, decode = found["phases"]
    assert (probe["planned_s"], probe["planned_gib"], probe["note"]) == (None, None, "agree")
    assert decode["planned_s"] == {"low": 1.0, "expected": 2.0, "high": 4.0}
    assert (decode["measured_s"], decode["planned_gib"], decode["compiled_gib"]) == (2.5, 3.0, 2.0)
    assert found["sizes"] == {"slots": 8, "micro_batch_tokens": 1024}


def test_lines_show_plan_beside_measurement_and_mark_estimates():
    assert row(result(), "probe") == ["probe", "0.062", "agree"]
    assert row(result(), "decode") == ["decode", "~2.00", "~1.00", "~4.00", "2.50", "~3.00", "2.00"]
    assert "on the device: this platform reports no memory in use" in shown(result())
    assert shown(result())[-1] == (
        "everything fits and works with plan.slots = 8 and plan.micro_batch_tokens = 1024"
    )


def test_small_models_are_shown_in_mib():
    small = (Row("decode", 1.0, planned_bytes=3 * 2**20, compiled_bytes=2**19),)
    assert row(result(rows=small), "decode") == ["decode", "1.00", "~3.00", "0.50"]
    assert any("MiB planned" in line for line in shown(result(rows=small)))


def test_an_unchanged_peak_is_marked_as_a_bound():
    found = result(rows=ON_CHIP, limit_bytes=16 * GIB)
    assert row(found, "update") == ["update", "7.00", "9.00", "10.00"]
    assert row(found, "sync") == ["sync", "0.250", "<10.00"]
    assert any("peak so far of 16.00 GiB" in line for line in shown(found))


@pytest.mark.parametrize("works", [True, False])
def test_the_last_lines_show_the_outcome(works: bool):
    failure = None if works else Failure("update", "out of memory; the next are 4")
    *_, smaller, outcome = shown(result(first=Sizes(16, 1024), failure=failure))
    assert smaller == (
        "memory ran out: continued with plan.slots = 8 and plan.micro_batch_tokens = 1024 "
        "instead of plan.slots = 16 and plan.micro_batch_tokens = 1024"
    )
    failed = "FAILED: update: out of memory; the next are 4"
    assert (outcome == failed) is not works
    found = report("mine", result(failure=failure))
    assert found["works"] is works
    if failure is not None:
        assert found["failed"] == {"phase": "update", "why": failure.why}
