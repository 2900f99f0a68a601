"""Times of small programs compiled by XLA, against hand-computed numbers.

`programs/blocks.hlo` and the others are described in `test_hlo`. `programs/update.hlo` (v5e): 64
rows of a table of 65,536, width 1,152, are looked up, and three times multiplied with a matrix and
written to a row of a cache; then the top 8 of each row. Its matrix, table and cache are in HBM.
"""

from __future__ import annotations

import pytest

from pipeline.compute.aot.estimated_time import (
    BYTES_PER_S,
    CLOCK_HZ,
    Work,
    program_seconds,
    works_of,
)
from pipeline.compute.aot.hlo import Module, parse
from tests.pipeline.compute.aot.test_hlo import text

NOTHING: dict[str, int] = {}
"""A schedule in which the instructions of a program take nothing."""


def estimated(module: Module, schedule: dict[str, int] = NOTHING) -> float:
    """Seconds of instructions that the compiler has an estimate of."""
    works = works_of(module, schedule)
    return sum(one.runs * one.seconds for one in works if "estimated_cycles" in one.line.text)


def test_estimates_are_cycles_times_trips():
    # 4 x (a slice + 8 x four fusions).
    cycles = 4 * (1868 + 8 * (2653 + 1825 + 1977 + 1830))
    assert estimated(parse(text("blocks"))) == pytest.approx(cycles / CLOCK_HZ)
    # 64 x (slice, product, iota, two slices of the sorted); copies of both results.
    cycles = 64 * (1840 + 15635 + 17 + 1832 + 1832) + 1916 + 1916
    assert estimated(parse(text("recipe"))) == pytest.approx(cycles / CLOCK_HZ)


def test_the_cheapest_branch_of_a_conditional_counts():
    doubled, five_products = 4140, 5 * (2304 + 80)
    found = estimated(parse(text("branches")))
    assert found == pytest.approx((1833 + doubled) / CLOCK_HZ)
    dear = text("branches").replace('"estimated_cycles":"4140"', '"estimated_cycles":"41400"')
    assert estimated(parse(dear)) == pytest.approx((1833 + five_products) / CLOCK_HZ)


def test_an_estimate_below_the_schedule_is_too_low():
    # One of the four fusions, 4 x 8 times: its estimate is 2,653 cycles.
    module, runs = parse(text("blocks")), 4 * 8
    found = estimated(module, {"fusion.9": 5000}) - estimated(module)
    assert found == pytest.approx(runs * (5000 - 2653) / CLOCK_HZ)


def test_traffic_is_what_is_read_and_written_in_hbm():
    moved = {work.line.name: work.hbm_bytes for work in works_of(parse(text("update")), NOTHING)}
    row = 2 * 1152
    assert moved["gather_fusion"] == 64 * row
    # A product in three runs: of each the whole matrix, and 64 rows of the cache.
    assert moved["flush_fusion"] == 1152 * row + 64 * row


WAITING = """HloModule jit_f

%fused (p.1: bf16[1024,1024]) -> bf16[1024,1024] {
  %p.1 = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %negate = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} negate(%p.1)
}

ENTRY %main (w: bf16[1024,1024], x: bf16[1024,1024]) -> bf16[1024,1024] {
  %w = bf16[1024,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %x = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %copy-start = (bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)}, bf16[1024,1024]{1,0:T(8,128)(2,1)}, \
u32[]{:S(2)}) copy-start(%w)
  %before = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} fusion(%x), kind=kLoop, calls=%fused, \
backend_config={"estimated_cycles":"CYCLES"}
  %copy-done = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  ROOT %after = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} fusion(%copy-done), kind=kLoop, \
calls=%fused, backend_config={"estimated_cycles":"500"}
}
"""
COPY_S = 2 * 1024 * 1024 / BYTES_PER_S


@pytest.mark.parametrize("cycles", [1500, 15_000])
def test_computation_waits_for_copies(cycles):
    works = works_of(parse(WAITING.replace("CYCLES", str(cycles))), NOTHING)
    seconds = {work.line.name: work.seconds for work in works}
    late = max(0.0, COPY_S - cycles / CLOCK_HZ)
    assert seconds.pop("copy-done") == pytest.approx(late)
    assert seconds == pytest.approx(
        {"copy-start": 0.0, "before": cycles / CLOCK_HZ, "after": 500 / CLOCK_HZ}
    )
    assert works[0].hbm_bytes == 2 * 1024 * 1024


def test_a_program_takes_at_least_its_traffic():
    line = works_of(parse(text("update")), NOTHING)[0].line
    short = Work(line, runs=2, seconds=1.0, hbm_bytes=int(BYTES_PER_S / 4))
    assert program_seconds([short]) == 2.0
    long = Work(line, runs=1, seconds=0.5, hbm_bytes=int(4 * BYTES_PER_S))
    assert program_seconds([short, long]) == 4.5
