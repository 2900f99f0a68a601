"""Speed and memory of the programs of Gemma 3 270m and 1b with random weights, on one chip."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import jax
import pytest

from pipeline.plan.topology import GIB
from tests.accelerator.conftest import Report
from tests.accelerator.devices import Rates, measured
from tests.accelerator.speed import Measured, Programs, Sizes

pytestmark = pytest.mark.accelerator

MODELS = ("gemma-3-270m", "gemma-3-1b")
SMALL = "small"
"""The model on virtual CPU devices."""
REDUCED = Sizes(slots=(16, 8), rows=4, prompt=24, new=40)
"""Its sizes."""
ERROR = 0.1
"""Share of the peak by which it may differ from what the compiler reports."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One small model on virtual devices, else both of the real shapes."""
    if "results" in metafunc.fixturenames:
        models = (SMALL,) if metafunc.config.getoption("cpu", default=False) else MODELS
        metafunc.parametrize("results", models, indirect=True, scope="module")


@pytest.fixture(scope="module")
def rates(chips: list[jax.Device], *, virtual: bool) -> Rates:
    """Speeds of the chip in large sums and products; on a CPU in small ones."""
    return measured(chips[:1], **({"added": 2**12, "factors": 32} if virtual else {}))


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, chips: list[jax.Device], rates: Rates
) -> Iterator[Programs]:
    """The programs of a model on the first chip."""
    name, sizes = (None, REDUCED) if request.param == SMALL else (request.param, Sizes())
    yield Programs(name, chips[0], rates, sizes)
    jax.clear_caches()


def record(report: Report, found: Measured, text: str) -> None:
    """Records a program's figures."""
    report(text, {**asdict(found), "share": found.share})


def test_gradient_speed(results: Programs, report: Report) -> None:
    found = results.gradient
    assert found.mfu is not None
    text = f"{1e6 / found.rate:.2f} us a position, MFU {found.mfu:.1%}"
    record(report, found, f"{text}, {found.limit}")


@pytest.mark.parametrize("program", range(3), ids=("many_slots", "few_slots", "prefill"))
def test_decode_speed(results: Programs, report: Report, program: int) -> None:
    name = list(results.decode)[program]
    found = results.decode[name]
    assert found.limit_s > 0
    record(report, found, f"{name}: {found.rate:,.0f} tokens/s, {found.limit}")


@pytest.mark.parametrize("program", ["gradient", "decode"])
def test_memory_is_what_the_compiler_reports(
    results: Programs, report: Report, program: str
) -> None:
    found = results.gradient if program == "gradient" else next(iter(results.decode.values()))
    text = f"{found.expected_bytes / GIB:.2f} GiB by the compiler"
    if found.peak_bytes is not None:
        text += f", peak {found.peak_bytes / GIB:.2f} GiB"
    record(report, found, text)
    if not found.sets_peak:
        pytest.skip("the devices report no peak, or an earlier program took more memory")
    assert found.peak_bytes == pytest.approx(found.expected_bytes, rel=ERROR)
