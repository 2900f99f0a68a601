"""`python -m launch.bench balance`: calibrated sizes beside fixed ones, on this machine's CPU.

The variants of a row run in one process and alternate step by step, so that other load of the
machine affects all of them equally.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launch.bench.child import CPU_ONLY
from launch.bench.table import Benchmark, Claim, Column, Figures, Row, Section

FIXED = (2, 8, 32, 64)
"""Fixed numbers of slots."""
_OF_BEST, _OF_RECIPE = 0.98, 3.0


def _row(name: str, *, prompts_per_step: int, steps: int) -> Row:
    arguments = {"prompts_per_step": prompts_per_step, "steps": steps, "repeats": 5}
    return Row(name, "launch.bench.balance_case:tokens_a_second", arguments, CPU_ONLY)


def _claims(found: Mapping[str, Figures]) -> Iterator[Claim]:
    for name, row in found.items():
        best, recipe = row.get("of_best", 0), row.get("of_recipe", 0)
        what = f"{name}: {best:.3f} of the best fixed number of slots ({_OF_BEST})"
        yield Claim(what, best >= _OF_BEST)
        what = f"{name}: {recipe:.1f} times the recipe that Tunix ships ({_OF_RECIPE:g})"
        yield Claim(what, recipe >= _OF_RECIPE)


BENCHMARK = Benchmark(
    (
        Section(
            "trained",
            "Trained tokens a second of sampling and updates: 7 layers of width 128, prompts of at "
            "most 64 tokens and completions of at most 256, lengths lognormal, 8 rollouts a "
            "prompt; fixed slots use the calibrated micro-batches, and are measured once if they "
            "equal the calibrated slots; medians of 5 runs, alternating step by step",
            (
                Column("slots", "slots found"),
                Column("rows", "rows of a micro-batch"),
                Column("start_s", "start, s", "{:.0f}"),
                Column("tokens_found", "found", "{:,.0f}"),
                *(Column(f"tokens_{slots}", f"{slots} slots", "{:,.0f}") for slots in FIXED),
                Column("tokens_recipe", "Tunix's recipe, 1 x 2", "{:,.0f}"),
                Column("of_best", "of the best", "{:.3f}"),
                Column("of_recipe", "of the recipe", "{:.1f}"),
            ),
            (
                _row("64 rollouts a step", prompts_per_step=8, steps=6),
                _row("16 rollouts a step", prompts_per_step=2, steps=24),
            ),
            _claims,
        ),
    )
)
