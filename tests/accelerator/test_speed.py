"""Speed and memory of the programs of Gemma 3 270m and 1b with random weights, on one chip."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property

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


class Results:
    """What the programs of a model took; each is computed once.

    Args:
        model: a shape in `PUBLISHED`, or `SMALL`.
        chip: the device.
        rates: its measured speeds.
    """

    def __init__(self, model: str, chip: jax.Device, rates: Rates) -> None:
        self._is_small = model == SMALL
        name, sizes = (None, REDUCED) if self._is_small else (model, Sizes())
        self._programs = Programs(name, chip, rates, sizes)

    @cached_property
    def gradient(self) -> Measured:
        """Computed before decoding, which takes more memory and would hide its peak."""
        return self._programs.gradient()

    @cached_property
    def decode(self) -> dict[str, Measured]:
        """Segments and prefill."""
        _ = self.gradient
        return self._programs.decode()

    def limit(self, found: Measured) -> str:
        """The share of the chip's limit, in words; virtual devices have none."""
        return "" if self._is_small else f", {found.share:.0%} of the limit ({found.regime})"


@pytest.fixture(scope="module")
def rates(chips: list[jax.Device], *, virtual: bool) -> Rates:
    """Speeds of the chip in large sums and products; on a CPU in small ones."""
    return measured(chips[:1], **({"added": 2**12, "factors": 32} if virtual else {}))


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, chips: list[jax.Device], rates: Rates
) -> Iterator[Results]:
    """The programs of a model on the first chip."""
    yield Results(request.param, chips[0], rates)
    jax.clear_caches()


def test_gradient_speed(results: Results, report: Report) -> None:
    found = results.gradient
    assert found.mfu is not None
    text = f"{1e6 / found.rate:.2f} us a position, MFU {found.mfu:.1%}"
    report(text + results.limit(found), _figures(found))


@pytest.mark.parametrize("program", range(3), ids=("many_slots", "few_slots", "prefill"))
def test_decode_speed(results: Results, report: Report, program: int) -> None:
    name = list(results.decode)[program]
    found = results.decode[name]
    assert found.limit_s > 0
    report(f"{name}: {found.rate:,.0f} tokens/s{results.limit(found)}", _figures(found))


@pytest.mark.parametrize("program", ["gradient", "decode"])
def test_memory_is_what_the_compiler_reports(
    results: Results, report: Report, program: str
) -> None:
    found = results.gradient if program == "gradient" else next(iter(results.decode.values()))
    text = f"{found.expected_bytes / GIB:.2f} GiB by the compiler"
    if found.peak_bytes is not None:
        text += f", peak {found.peak_bytes / GIB:.2f} GiB"
    report(text, _figures(found))
    if not found.sets_peak:
        pytest.skip("the devices report no peak, or an earlier program took more memory")
    assert found.peak_bytes == pytest.approx(found.expected_bytes, rel=ERROR)


def _figures(found: Measured) -> dict[str, object]:
    return {**asdict(found), "share": found.share}
