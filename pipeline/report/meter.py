"""Figures of a run while it goes on: ledger, goodput, speed, memory, cost."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pipeline.contracts.sizes import Sizes
from pipeline.contracts.topology import GIB
from pipeline.contracts.workers import ProcessUse
from pipeline.report.goodput import Hardware, cost, goodput, speeds
from pipeline.run.ledger import Ledger, Work, kind_of

Figures = dict[str, float]


class RunMeter:
    """Measures a run.

    Args:
        ledger: of the run.
        hardware: of the run.
    """

    def __init__(self, ledger: Ledger, hardware: Hardware) -> None:
        self.ledger = ledger
        self._hardware = hardware
        self._uses: dict[str, ProcessUse] = {}

    def account(
        self,
        step: int,
        uses: Mapping[str, ProcessUse],
        *,
        tokens: Mapping[str, int],
        work: Work | None = None,
    ) -> None:
        """Closes the interval since the last account.

        Args:
            step: training steps done, the one of `work` included.
            uses: of all workers.
            tokens: generated tokens of the interval, by fate.
            work: of a training step.
        """
        # One that did not report is as it was.
        self._uses = self._uses | {name: use for name, use in uses.items() if use.memory}
        spans = {process: use.spans for process, use in uses.items()}
        self.ledger.account(
            step,
            spans,
            tokens={fate: count for fate, count in tokens.items() if count},
            work=work,
            repeated=work is not None and self.ledger.is_repeated(step),
        )

    def step_metrics(self, sizes: Sizes) -> Figures:
        """Metrics of the accounts since the last call: seconds, tokens, goodput, speed, memory.

        Args:
            sizes: in force.
        """
        recent = self.ledger.take()
        found = {
            f"ledger/{kind}/{row}_s": value
            for kind, rows in recent.seconds.items()
            for row, value in rows.items()
        }
        generated = {"generated": sum(recent.tokens.values()), **recent.tokens}
        parts: dict[str, Mapping[str, float]] = {
            "tokens": {fate: float(count) for fate, count in generated.items()},
            "goodput": goodput(recent.seconds, self._hardware),
            "speed": speeds(recent.seconds, recent.work, self._hardware),
            "cost": cost(self.ledger.held_s, self.ledger.total.tokens, self._hardware),
            "hbm": self._memory(sizes),
            "compile": {
                "programs": float(sum(use.programs for use in self._uses.values())),
                "seconds": sum(use.programs_s for use in self._uses.values()),
            },
        }
        for part, figures in parts.items():
            found |= {f"{part}/{name}": value for name, value in figures.items()}
        return found

    def close(self) -> None:
        """Accounts for the time since the last account: the workers have ended.

        A run whose processes are not known yet has no ledger. A full disk does not change how the
        run ended.
        """
        if self.ledger.processes:
            with suppress(OSError):
                self.account(self.ledger.step, {}, tokens={})

    def summary(self) -> dict[str, Any]:
        """The ledger of the whole run, goodput and cost, for `summary.json`."""
        ledger, total = self.ledger, self.ledger.total
        return {
            "ledger": {
                "wall_s": ledger.wall_s,
                "first_step_s": ledger.first_step_s,
                "processes": len(ledger.processes),
                "seconds": {kind: dict(rows) for kind, rows in total.seconds.items()},
                "tokens": {fate: count for fate, count in total.tokens.items() if count},
            },
            "goodput": goodput(total.seconds, self._hardware),
            "speed": speeds(total.seconds, total.work, self._hardware),
            "cost": cost(ledger.held_s, total.tokens, self._hardware),
        }

    def _memory(self, sizes: Sizes) -> Figures:
        """GiB of a chip: planned, compiled (the largest program with all arrays), in use, peak."""
        planned, found = self._hardware.planned_bytes(sizes), Figures()
        for process, use in self._uses.items():
            if use.memory is None:
                continue
            memory = use.memory
            known = {
                "planned": planned.get(kind_of(process)),
                "compiled": max(memory.programs.values(), default=None),
                "in_use": memory.arrays,
                "peak": memory.peak,
            }
            name = process.replace(" ", "_")
            found |= {
                f"{name}/{key}_gib": size / GIB for key, size in known.items() if size is not None
            }
        return found
