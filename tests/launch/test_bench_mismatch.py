"""The probe of sampler against learner finds planted faults, and rounding does not trip it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.bench.mismatch import FORMATS, measure, probe_config

TINY = str(Path(__file__).parents[2] / "launch" / "demo" / "tiny_gemma3")


def check(*, number_format: str, adapters: int, engine: bool) -> None:
    found = measure(
        model=TINY, number_format=number_format, adapters=adapters, faulty=1, engine=engine
    )
    bound = probe_config(TINY, number_format=number_format).mismatch_bounds.probe
    faults = {name: value for name, value in found.items() if name not in {"device", "rounding"}}
    assert found["rounding"] < bound < min(faults.values()), found
    assert len(faults) == (12 if engine else 6)


def test_faults_of_adapters_are_found():
    check(number_format="float32", adapters=1, engine=False)


@pytest.mark.slow
@pytest.mark.parametrize("number_format", [name for name in FORMATS if name != "int8_matmul"])
def test_planted_faults_are_found_and_rounding_is_allowed(number_format: str):
    check(number_format=number_format, adapters=20, engine=True)
