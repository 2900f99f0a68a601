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
REDUCED = Sizes(slots=(16, 8), rows=4, prompt=24, new=40)
"""Sizes on virtual CPU devices, with a small model."""
ERROR = 0.1
"""Share of the peak by which it may differ from what the compiler reports."""


@pytest.fixture(scope="module")
def rates(chips: list[jax.Device], *, virtual: bool) -> Rates:
    """Speeds of the chip in large sums and products; on a CPU in small ones."""
    return measured(chips[:1], **({"added": 2**16, "factors": 128} if virtual else {}))


class Results:
    """What the programs of a model took; each is computed once.

    Args:
        programs: of the model.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs

    @cached_property
    def gradient(self) -> Measured:
        """Computed before decoding, which takes more memory and would hide its peak."""
        return self._programs.gradient()

    @cached_property
    def decode(self) -> dict[str, Measured]:
        """Segments and prefill."""
        _ = self.gradient
        return self._programs.decode()


@pytest.fixture(scope="module", params=MODELS)
def results(
    request: pytest.FixtureRequest, chips: list[jax.Device], rates: Rates, *, virtual: bool
) -> Iterator[Results]:
    """The programs of a model on the first chip."""
    name = None if virtual else request.param
    sizes = REDUCED if virtual else Sizes()
    yield Results(Programs(name, chips[0], rates, sizes))
    jax.clear_caches()


def test_gradient_speed(results: Results, report: Report) -> None:
    found = results.gradient
    text = f"{1e6 / found.rate:.2f} us a position, MFU {found.mfu:.1%}"
    report(f"{text}, {_limit(found)}", _figures(found))
    assert found.mfu is not None


@pytest.mark.parametrize("program", ["many slots", "few slots", "prefill"])
def test_decode_speed(results: Results, report: Report, program: str) -> None:
    many, few, prefill = results.decode
    name = {"many slots": many, "few slots": few, "prefill": prefill}[program]
    found = results.decode[name]
    report(f"{name}: {found.rate:,.0f} tokens/s, {_limit(found)}", _figures(found))
    assert found.limit_s > 0


@pytest.mark.parametrize("program", ["gradient", "decode"])
def test_memory_is_what_the_compiler_reports(
    results: Results, report: Report, program: str
) -> None:
    found = results.gradient if program == "gradient" else next(iter(results.decode.values()))
    text = f"{found.expected_bytes / GIB:.2f} GiB by the compiler"
    if found.peak_bytes is None:
        report(f"{text}; these devices do not report a peak", _figures(found))
        pytest.skip("the devices do not report their peak")
    text += f", peak {found.peak_bytes / GIB:.2f} GiB"
    if not found.sets_peak:
        report(f"{text}, of an earlier program", _figures(found))
        pytest.skip("an earlier program took more")
    report(text, _figures(found))
    assert found.peak_bytes == pytest.approx(found.expected_bytes, rel=ERROR)


def _limit(found: Measured) -> str:
    return f"{found.share:.0%} of the chip's limit ({found.regime})"


def _figures(found: Measured) -> dict[str, object]:
    return {**asdict(found), "share": found.share}
