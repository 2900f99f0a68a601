"""Figures of a run while it goes on: seconds by phase, goodput, speed, memory, cost.

    MFU = 4 N T / (peak x chip-seconds of updates)

with N parameters and T tokens of the learner. A token costs 2 N operations forward and 2 N for the
gradient of the activations (PaLM, arXiv:2204.02311, appendix B, without the gradient of the frozen
weights). Forward passes of a reference or a teacher are not counted, but their seconds are. A CPU
has no MFU: its peak is not published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from configs.schema import Config
from pipeline.clock import PhaseClock
from pipeline.plan.cost_model.hardware import device_count, topology_of
from pipeline.plan.cost_model.memory import estimate_memory
from pipeline.plan.search.fitting import PlanCase
from pipeline.plan.sizes import Sizes, sized
from pipeline.plan.topology import GIB
from pipeline.progress import Progress
from pipeline.protocols import ProcessUse
from pipeline.run.goodput import DEVICE_PHASES, TimeUse, phase_seconds, step_seconds, time_use
from pipeline.run.history import ENDED
from pipeline.run.run_folder import RunFolder

Figures = dict[str, float]

LEARNER, SAMPLERS = "learner", "samplers"
"""Kinds of processes with devices."""
_OPERATIONS = 4.0
"""Operations per token and parameter that a LoRA update needs."""
_HOUR_S = 3600.0
_MILLION = 1e6


@dataclass(frozen=True)
class Hardware:
    """The chips of a run with their published limits, and what the model demands of them.

    Attributes:
        chips: chips of a process, by kind of process; a colocated run has a learner only.
        chip_hour_usd: price of a chip-hour; None: unknown.
        parameters: of the base; 0: unknown, as is what follows.
        flops: peak operations per second of a chip in bfloat16; 0: not published.
        planned_bytes: the planner's bytes of a chip for given sizes, by kind of process.
    """

    chips: Mapping[str, int]
    total_chips: int
    chip_hour_usd: float | None = None
    parameters: int = 0
    flops: float = 0.0
    planned_bytes: Callable[[Sizes], Mapping[str, int]] = lambda _: {}

    @staticmethod
    def of(config: Config) -> Hardware:
        """The hardware of a run.

        The limits of a GPU without `plan.gpu` are unknown, and so are the shapes of a model without
        `config.json`.
        """
        plan, total = config.plan, device_count(config)
        chips = {LEARNER: plan.learner_devices}
        if plan.placement == "split":
            chips[SAMPLERS] = plan.devices_per_sampler
        if plan.platform == "gpu" and plan.gpu is None:
            return Hardware(chips, total, plan.chip_hour_usd)
        chip = topology_of(config, None).chip
        known = Hardware(chips, total, chip.chip_hour_usd)
        try:
            case = PlanCase.of(config)
        except (FileNotFoundError, ValueError):
            return known
        return replace(
            known,
            parameters=case.shape.parameters,
            flops=0.0 if plan.platform == "cpu" else chip.bf16_flops,
            planned_bytes=lambda sizes: _planned_bytes(case, sizes),
        )


def _planned_bytes(case: PlanCase, sizes: Sizes) -> dict[str, int]:
    """The planner's bytes of a chip, by kind of process."""
    phases = estimate_memory(sized(case.config, sizes), case.shape)
    sampling = max(phases[phase].total() for phase in ("prefill", "decode"))
    learning = max(phases[phase].total() for phase in ("score", "update"))
    if case.config.plan.placement != "split":
        return {LEARNER: max(sampling, learning)}
    return {LEARNER: learning, SAMPLERS: sampling}


def speeds(row: Mapping[str, float], hardware: Hardware, *, passes: int) -> Figures:
    """Tokens per second of a step (`useful` per chip) and of its phases, all processes; `mfu`.

    What is not defined is left out. The learner passes `passes` times over the batch.
    """
    chips, learning = hardware.total_chips, hardware.chips[LEARNER]
    sampling = chips - learning if SAMPLERS in hardware.chips else learning
    prefill, decode, update = (chips * row[f"time/devices/{phase}_s"] for phase in DEVICE_PHASES)
    trained, positions, padded = (
        row.get(f"learner/{name}", row.get(f"sft/{name}", 0.0))
        for name in ("tokens_trained", "positions", "tokens_padded")
    )
    step_s, generated = step_seconds(row), row.get("tokens/generated", 0.0)
    learned, flops = passes * (positions - padded), hardware.flops * update
    ratios = {
        "generated_tokens_per_s": (generated, step_s),
        "trained_tokens_per_s": (trained, step_s),
        "useful_tokens_per_s_chip": (trained, step_s * chips),
        # Chip-seconds over chips: the mean seconds of a process.
        "prefill_tokens_per_s": (row.get("rollout/prompt_positions", 0.0), prefill / sampling),
        "decode_tokens_per_s": (generated, decode / sampling),
        "update_tokens_per_s": (learned, update / learning),
        "mfu": (_OPERATIONS * hardware.parameters * learned, flops),
    }
    return {name: amount / total for name, (amount, total) in ratios.items() if amount and total}


class RunMeter:
    """Measures a process of a run; `phases` are those of the driver."""

    def __init__(self, folder: RunFolder, hardware: Hardware, phases: PhaseClock) -> None:
        self.phases = phases
        self._folder, self._hardware = folder, hardware

    def start(
        self, uses: Mapping[str, ProcessUse], *, elapsed_s: float, used_before_s: float
    ) -> dict[str, Any]:
        """What the journal says of the time of a start; the clock begins anew.

        `used_before_s` are the seconds that earlier processes have used, of `elapsed_s`.
        """
        seconds = self.phases.take()
        compile_s = max((use.seconds.get("compile", 0.0) for use in uses.values()), default=0.0)
        loading_s = seconds.get("loading", 0.0)
        seconds["compile"] = min(compile_s, loading_s)
        seconds["loading"] = loading_s - seconds["compile"]
        return {"elapsed_s": elapsed_s, "used_before_s": used_before_s, "seconds": seconds}

    def driver_metrics(self) -> Figures:
        """`time/PHASE_s`: seconds of the driver by phase since the row before."""
        return {f"time/{phase}_s": value for phase, value in self.phases.take().items()}

    def step_metrics(
        self,
        row: Mapping[str, float],
        uses: Mapping[str, ProcessUse],
        *,
        passes: int,
        progress: Progress,
        sizes: Sizes,
    ) -> Figures:
        """Further metrics of a step: seconds of devices, goodput, speed, cost, memory.

        `row` are its metrics so far, with `time/elapsed_s` and those of `driver_metrics`.
        """
        found = {
            f"time/devices/{phase}_s": self._mean_over_chips(uses, phase) for phase in DEVICE_PHASES
        }
        scoring = uses["rewards"].seconds
        found |= {f"time/scoring/{part}_s": seconds for part, seconds in scoring.items()}
        row = {**row, **found}
        parts: dict[str, Mapping[str, float]] = {
            "goodput": TimeUse(phase_seconds(row), [row]).goodput,
            "speed": speeds(row, self._hardware, passes=passes),
            "cost": self.cost(progress, used_s=row["time/elapsed_s"]),
            "hbm": self._memory(uses, sizes),
        }
        for part, figures in parts.items():
            found |= {f"{part}/{name}": value for name, value in figures.items()}
        return found

    def cost(self, progress: Progress, *, used_s: float) -> Figures:
        """Dollars so far and per million tokens; empty without a price.

        `used_s` are the seconds that the run has used; waits for devices do not count.
        """
        hardware = self._hardware
        if hardware.chip_hour_usd is None:
            return {}
        usd = used_s / _HOUR_S * hardware.total_chips * hardware.chip_hour_usd
        found = {"usd": usd}
        if progress.tokens_generated:
            found["usd_per_mtoken_generated"] = _MILLION * usd / progress.tokens_generated
        if progress.tokens_trained:
            found["usd_per_mtoken_trained"] = _MILLION * usd / progress.tokens_trained
        return found

    def end(self, *, elapsed_s: float) -> tuple[TimeUse, dict[str, float]]:
        """Where the time of the run went, and the seconds since the last row, for the journal."""
        folder, seconds = self._folder, self.phases.take()
        entry = {"event": ENDED, "elapsed_s": elapsed_s, "seconds": seconds}
        return time_use(folder.metrics, [*folder.entries(), entry]), seconds

    def _mean_over_chips(self, uses: Mapping[str, ProcessUse], phase: str) -> float:
        chips = self._hardware.chips
        seconds = (
            chips.get(_kind(name), 0) * use.seconds.get(phase, 0.0) for name, use in uses.items()
        )
        return sum(seconds) / self._hardware.total_chips

    def _memory(self, uses: Mapping[str, ProcessUse], sizes: Sizes) -> Figures:
        """GiB of a chip: planned, compiled (the largest program with all arrays), in use, peak."""
        planned, found = self._hardware.planned_bytes(sizes), Figures()
        for process, use in uses.items():
            if use.memory is None:
                continue
            known = {"planned": planned.get(_kind(process)), **vars(use.memory)}
            name = process.replace(" ", "_")
            found |= {
                f"{name}/{key}_gib": size / GIB for key, size in known.items() if size is not None
            }
        return found


def _kind(process: str) -> str:
    """The kind of a process with devices: `learner`, or `samplers` of "sampler 0"."""
    return SAMPLERS if process.startswith("sampler ") else process
