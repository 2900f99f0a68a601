"""Rows of `launch.bench` that the TPU compiler answers: their requests, figures and claims."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from launch.bench import hbm, plan, rollout, v5e
from launch.bench.harness import Row
from pipeline.plan.program_names import devices_of, split_name
from pipeline.plan.topology import GIB, HBM_GIB


@pytest.fixture
def answers(monkeypatch, tmp_path):
    """Replaces the compiler; the figures that it returns, and the requests that it received."""
    figures: dict[str, Any] = {"fits": True, "hbm_bytes": 4 * GIB, "seconds": 0.2, "compile_s": 1.0}
    asked: list[tuple[Any, str]] = []

    def ask(config, _shape, programs):
        asked.extend((config, program) for program in programs)
        return {program: SimpleNamespace(**figures) for program in programs}

    def traced(request, *, beside, timed):
        assert not timed
        asked.append(request)
        gib = (figures["hbm_bytes"] + beside) / GIB if figures["hbm_bytes"] else None
        return {"fits": figures["fits"], "gib": gib, "ms": None}

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(v5e, "compile_programs", ask)
    # A fill is traced and compiled here: its program stands for the trace.
    monkeypatch.setattr(rollout, "trace", lambda config, _, program: ((config, program), 1))
    monkeypatch.setattr(rollout, "traced_figures", traced)
    return figures, asked


ROWS = [
    pytest.param(row, id=f"{benchmark.__name__.rpartition('.')[2]} {row.name}")
    for benchmark in (hbm, plan, rollout)
    for section in benchmark.BENCHMARK.sections
    for row in section.rows
    if row.measure in {hbm.ours, plan.compared, rollout.memory}
]


@pytest.mark.parametrize("row", ROWS)
def test_every_row_requests_its_programs(answers, row: Row):
    figures, asked = answers
    figures["hbm_bytes"] = GIB
    assert row.measure(**row.arguments)["fits"]
    for config, program in asked:
        kind, size = split_name(program)
        devices = devices_of(config, program)
        assert devices.count == row.arguments.get("devices", 1)
        if kind == "segment":
            assert config.slots == size
        if kind in {"gradient", "score", "reference_top_k"}:
            assert config.micro_batch_rows == size
        for setting, value in row.arguments.items():
            table, _, key = setting.partition("__")
            if key and key not in {"slots", "micro_batch_tokens"}:
                assert getattr(getattr(config, table), key) == value


def test_estimates_beside_the_compilers_figures(answers):
    figures, _ = answers
    given: dict[str, Any] = {"model": "gemma3_1b", "program": "segment 8", "length": 1312}
    found = plan.compared(**given)
    assert found["compiled_gib"] == 4.0
    assert found["error"] == pytest.approx(100 * (found["estimated_gib"] / 4 - 1))
    assert found["share"] == 100 * 4 / HBM_GIB
    figures |= {"fits": False, "hbm_bytes": 17 * GIB}
    refused = plan.compared(**given)
    assert (refused["compiled_gib"], refused["fits"]) == (17.0, False)
    assert "error" not in refused


def test_errors_are_bounded_by_memory_use():
    found: dict[str, dict[str, Any]] = {
        "a": {"share": 70.0, "error": 9.0},
        "b": {"share": 70.0, "error": -6.0},
        "c": {"share": 60.0, "error": -24.0},
        "d": {"fits": False, "estimated_gib": 16.0},
        "e": {"fits": False, "estimated_gib": 15.0},
        "f": {"failed": "so"},
    }
    claims = list(plan.errors_are_bounded(found))
    assert [claim.holds for claim in claims] == [False, True, True, False]
    expected = "over 60% of a chip: -5 to +10%: 2 rows, from -6.0 to +9.0; b -6.0"
    assert claims[0].text == expected
    assert claims[2].text == "d: does not fit; estimated 16.00 of 15.75"


def test_adam_counts_beside_the_gradient(answers):
    found = hbm.ours(sequences=2)
    # Rank 32 on all matrices of gemma3-1b: 25.1 million parameters, two float32 moments of each.
    assert found["gib"] - 4 == pytest.approx(2 * 4 * 25.13e6 / GIB, rel=1e-3)
    assert found["us_per_token"] == pytest.approx(1e6 * 0.2 / 2048)


def test_all_of_a_sampler_counts_beside_its_programs(answers):
    found = rollout.memory(slots=512)
    caches = 512 * found["kv_mb"] * 1e6 / GIB
    assert found["prefill_gib"] - 4 == pytest.approx(caches, rel=0.01)
    # Base and adapter, which a fill does not take.
    assert found["fill_gib"] - 4 == pytest.approx(2.0e9 / GIB, rel=0.06)
    assert 4 < found["segment_gib"] < found["fill_gib"]
    assert found["gib"] == max(found["prefill_gib"], found["fill_gib"])
    assert found["kv_mb"] == pytest.approx(16.9, abs=0.05)
    assert found["kv_share"] == pytest.approx(0.48, abs=0.005)
    assert found["tokens_per_s"] == pytest.approx(512 / (0.2 / 32))
