"""Rows of `launch.bench hbm`: their requests to the TPU compiler, and figures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from launch.bench import __main__ as bench
from launch.bench import costs, hbm
from launch.bench.harness import Row
from pipeline.plan.topology import GIB


@pytest.fixture
def asked(monkeypatch, tmp_path) -> list[tuple[Any, str]]:
    """Replaces the compiler; the requests that it received."""
    found = SimpleNamespace(fits=True, hbm_bytes=4 * GIB, seconds=0.2, compile_s=1.0)
    received: list[tuple[Any, str]] = []

    def ask(config, _shape, programs):
        received.extend((config, program) for program in programs)
        return dict.fromkeys(programs, found)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(costs, "compile_programs", ask)
    return received


ROWS = [
    pytest.param(row, id=row.name)
    for section in bench.prepare(["hbm"])[1]
    for row in section.rows
    if row.measure is hbm.ours
]


@pytest.mark.parametrize("row", ROWS)
def test_every_row_requests_its_program(asked, row: Row):
    assert row.measure(**row.arguments)["fits"]
    ((config, program),) = asked
    assert program == f"gradient {config.micro_batch_rows}"


def test_adam_counts_beside_the_gradient(asked):
    found = hbm.ours(sequences=2)
    # Rank 32 on all matrices of gemma3-1b: 25.1 million parameters, two float32 moments of each.
    assert found["gib"] - 4 == pytest.approx(2 * 4 * 25.13e6 / GIB, rel=1e-3)
    assert found["us_per_token"] == pytest.approx(1e6 * 0.2 / 2048)
