"""`launch.bench plan`: its requests to the compiler, its figures, its claims about errors."""

from __future__ import annotations

from typing import Any

import pytest

from launch.bench import plan_bench, plan_case
from pipeline.contracts.programs import devices_of
from pipeline.plan import compiler
from pipeline.plan.compiler import CompilerReport

GIB = 2**30
ROWS = {row.name: row for section in plan_bench.BENCHMARK.sections for row in section.rows}


@pytest.fixture
def answers(monkeypatch, tmp_path):
    """Replaces the compiler; the figures that it returns, and the requests that it received."""
    figures: dict[str, Any] = {"fits": True, "hbm_bytes": 4 * GIB}
    asked = []

    def ask(config, _shape, programs, **_settings):
        for program in programs:
            asked.append((config, program))
            yield program, CompilerReport(compile_s=1.0, **figures)

    monkeypatch.setenv("GEMMA_GRPO_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "_compile", ask)
    return figures, asked


@pytest.mark.parametrize("name", ROWS)
def test_every_row_compiles_its_program(answers, name):
    _, asked = answers
    row = plan_case.compared(**ROWS[name].arguments)
    ((config, program),) = asked
    given = ROWS[name].arguments
    devices = devices_of(config, program)
    assert devices.count == given.get("plan__learner_devices", 1)
    assert program == given["program"]
    if program.startswith("segment"):
        assert config.plan.slots == int(program.split()[1])
    if program.startswith("gradient"):
        assert config.micro_batch_rows == int(program.split()[1])
    assert row["compiled_gib"] == 4.0
    assert row["error_percent"] == pytest.approx(100 * (row["estimated_gib"] / 4 - 1))
    assert row["share"] == 4 / 15.75


def test_a_program_that_does_not_fit(answers):
    figures, _ = answers
    figures |= {"fits": False, "hbm_bytes": 17 * GIB}
    row = plan_case.compared(model="gemma3_1b", program="segment 896", length=1312)
    assert row["needs_gib"] == 17.0
    assert row["refused"] is True
    assert "compiled_gib" not in row
    few = plan_case.compared(model="gemma3_1b", program="segment 8", length=1312)
    assert few["refused"] is False


def row(rows, share, error):
    return {"rows": rows, "share": share, "error_percent": error}


def test_claims_by_memory_use_and_by_fitted_or_checked():
    found = {
        "a": row("fitted", 0.7, 9.0),
        "b": row("fitted", 0.7, -6.0),
        "c": row("fitted", 0.3, -24.0),
        "d": row("checked", 0.61, -4.9),
        "e": row("checked", 0.6, 26.0),
        "f": row("checked", 0.1, 3.0),
    }
    claims = list(plan_bench.claims(found))
    assert [claim.holds for claim in claims] == [False, True, True, False]
    assert claims[0].text == (
        "fitted, over 60% of a chip: -5 to +10%: 1 of 2, from -6.0 (b) to +9.0 (a)"
    )
    assert claims[3].text == "checked, others: within 25%: 1 of 2, from +3.0 (f) to +26.0 (e)"


@pytest.mark.parametrize("refused", [True, False])
def test_the_estimate_of_a_program_that_does_not_fit_must_not_fit(refused):
    found = {"x": {"rows": "checked", "estimated_gib": 16.0, "refused": refused}}
    (claim,) = plan_bench.claims(found)
    assert claim.holds is refused
    assert claim.text == "x: does not fit; estimated 16.00 of 15.75"
