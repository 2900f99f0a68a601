"""The table of a rehearsal: seconds and memory of each phase, beside the plan's.

Measured figures are those that the run recorded, and memory that its workers reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.schema import Config
from pipeline.contracts.evaluations import prompts_of
from pipeline.contracts.memory import MemoryUse
from pipeline.contracts.model_shape import ModelShape
from pipeline.contracts.sizes import Sizes, sized
from pipeline.contracts.speeds import Lengths
from pipeline.contracts.topology import GIB
from pipeline.plan.cost_model.hardware import topology_of
from pipeline.plan.cost_model.memory import memory_during
from pipeline.plan.cost_model.programs import built_programs, compile_s, programs_of
from pipeline.plan.cost_model.roofline import Seconds
from pipeline.plan.forecast import RunTimes
from pipeline.plan.search.fitting import PlanCase, estimate_plan
from pipeline.plan.size_controller import REPLAN
from pipeline.report.plan_lines import table
from pipeline.run.run_folder import RunFolder

Figures = dict[str, Any]
"""JSON."""

PHASES: Mapping[str, tuple[str, ...]] = {
    "start": (),
    "calibration": (),
    "evaluation": (),
    "validation": (),
    "SFT update": ("sft_gradient",),
    "sampling": ("prefill", "fill", "segment"),
    "rewards": (),
    "update": ("score", "reference_top_k", "gradient"),
    "sync": (),
    "checkpoint": (),
    "restore": (),
    "export": (),
}
"""The phases in the order of the table, each with the kinds of programs whose memory it shows."""
PHASE_OF_PROMPTS = {"train": "sampling", "test": "evaluation", "validation": "validation"}
"""The phase that generates completions of a split."""
_LAPS = {
    "sampling": "time/sample_s",
    "rewards": "time/reward_s",
    "update": "time/learn_s",
    "sync": "time/sync_s",
}
"""Metrics of a GRPO step with the seconds of its phases."""


@dataclass
class Observed:
    """What a run does not record of a worker's process.

    Attributes:
        memory: the last report; None: there is none.
        peaks: the device's peak so far, in bytes, when a phase ended for the first time.
        seconds: of phases.
    """

    memory: MemoryUse | None = None
    peaks: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def figures(config: Config, observed: Sequence[Observed], *, shape: ModelShape | None) -> Figures:
    """All figures: seconds, and GiB of the fullest device.

    Args:
        config: of the rehearsed run, which has ended.
        observed: of each process.
        shape: of the model; None: unknown, so nothing is planned.
    """
    folder = RunFolder.of(config)
    plan, replans = folder.plan, list(folder.events(REPLAN))
    assert plan is not None
    planned_s, planned_bytes = dict[str, Seconds](), dict[str, int]()
    if shape is not None and config.plan.platform != "gpu":
        in_force = sized(config, Sizes.of_json(plan["in_force"]))
        counts = {entry["name"]: prompts_of(entry) for entry in folder.events("evaluated")}
        evaluated = {
            "test": counts.get("test_before", 0),
            "validation": counts.get("validation", 0),
        }
        planned_s = planned_seconds(config, in_force, shape, evaluated)
        planned_bytes = planned_memory(in_force, shape)
    measured_s = measured_seconds(folder)
    for one in observed:
        measured_s |= one.seconds
    uses = [one.memory for one in observed if one.memory is not None]

    def row(phase: str) -> Figures:
        seconds = planned_s.get(phase)
        compiled = [
            size
            for use in uses
            for name, size in use.programs.items()
            if name.partition(" ")[0] in PHASES[phase]
        ]
        return {
            "phase": phase,
            "planned_s": None
            if seconds is None
            else {"low": seconds.low, "expected": seconds.expected, "high": seconds.high},
            "measured_s": measured_s[phase],
            "planned_gib": _gib(planned_bytes.get(phase)),
            "compiled_gib": _gib(max(compiled, default=None)),
            "device_peak_gib": _gib(
                max((one.peaks[phase] for one in observed if phase in one.peaks), default=None)
            ),
        }

    failures = [entry["error"] for entry in folder.events("failed")]
    return {
        "name": config.run.name,
        "works": not failures,
        "failed": failures[-1] if failures else None,
        "sizes": plan["in_force"],
        "first_sizes": replans[0]["from"] if replans else plan["in_force"],
        "device_limit_gib": _gib(
            min((use.limit for use in uses if use.limit is not None), default=None)
        ),
        "phases": [row(phase) for phase in PHASES if phase in measured_s],
    }


def _gib(size: int | None) -> float | None:
    return None if size is None else size / GIB


def planned_seconds(
    config: Config, in_force: Config, shape: ModelShape, evaluated: Mapping[str, int]
) -> dict[str, Seconds]:
    """The plan's seconds by phase, for sequences of the maximum length.

    Args:
        config: of the rehearsed run.
        in_force: the same with the sizes in force.
        shape: of the model.
        evaluated: number of prompts by split.
    """
    lengths = Lengths(config.rollout.max_prompt_tokens, config.rollout.max_new_tokens)
    case = PlanCase(config, shape, topology_of(config, None), lengths)
    plan = estimate_plan(case, config.run.name, in_force, configured=True)
    compiling = compile_s(built_programs(in_force, shape), shape, chip=case.topology.chip)
    times, step = RunTimes.of(case, plan, evaluated, compiling=compiling), plan.step.seconds
    return {
        "start": times.start + times.compile,
        "calibration": times.calibration,
        "evaluation": times.tests,
        "validation": times.validation,
        "SFT update": times.sft_step,
        "sampling": step["prefill"] + step["decode"],
        "rewards": step["rewards"],
        "update": step["score"] + step["update"],
        "sync": step["sync"],
        "checkpoint": times.checkpoint,
        "export": times.export,
    }


def planned_memory(config: Config, shape: ModelShape) -> dict[str, int]:
    """The plan's peak bytes of a chip, by phase.

    Args:
        config: with the sizes in force.
        shape: of the model.
    """
    found = dict[str, int]()
    for phase, kinds in PHASES.items():
        for name in programs_of(config):
            if name.partition(" ")[0] in kinds:
                size = memory_during(config, shape, name, phase=phase).total
                found[phase] = max(size, found.get(phase, 0))
    return found


def measured_seconds(folder: RunFolder) -> dict[str, float]:
    """The seconds of the phases that a run has recorded."""
    found = dict[str, float]()
    for entry in folder.entries():
        match entry["event"]:
            case "started":
                found["start"] = entry["elapsed_s"]
            case "calibrated":
                found["calibration"] = entry["seconds"]
            case "reserved":
                split = entry["reason"].removesuffix(" evaluation")
                if split in PHASE_OF_PROMPTS:
                    found.setdefault(PHASE_OF_PROMPTS[split], entry["seconds"])
            case "exported":
                found["export"] = entry["seconds"]
    if "start" in found:
        found["start"] -= found.get("calibration", 0.0)
    for row in folder.metrics:
        if "sft/loss" not in row:
            # A step that ends the run before its update has no times of the update.
            found |= {phase: row[lap] for phase, lap in _LAPS.items() if lap in row}
        else:
            found["SFT update"] = row["time/learn_s"]
    return found


def lines(found: Figures) -> Iterator[str]:
    """The table as text, the meaning of its marks, and the outcome."""
    phases = found["phases"]
    yield f"rehearsal of {found['name']}: one step at full length"
    yield (
        "~ estimated by the plan, with its range; compiled: the figure of this machine's compiler "
        "plus the arrays on the device; all seconds measured once"
    )
    if any(phase["device_peak_gib"] is not None for phase in phases):
        limit = found["device_limit_gib"]
        of = "" if limit is None else f" of {limit:.2f} GiB"
        yield f"on the device: peak so far{of}"
    else:
        yield "on the device: this platform reports no memory in use"
    largest = max((one["compiled_gib"] or one["planned_gib"] or 0 for one in phases), default=0)
    unit, factor = ("GiB", 1) if largest >= 1 else ("MiB", 1024)
    seconds = ("s planned", "from", "to", "s measured")
    head = ["", *seconds, f"{unit} planned", "compiled", "on the device", ""]
    yield from table([head, *(_cells(phase, factor) for phase in phases)])
    sizes, first = _sizes(found["sizes"]), _sizes(found["first_sizes"])
    if sizes != first:
        yield f"memory ran out: continued with {sizes} instead of {first}"
    if found["works"]:
        yield f"everything fits and works with {sizes}"
    else:
        yield f"FAILED: {found['failed']}"


def _cells(phase: Figures, factor: int) -> list[str]:
    planned, given = ["", "", ""], phase["planned_s"]
    if given is not None:
        planned = [f"~{_seconds(given[pace])}" for pace in ("expected", "low", "high")]
    sizes = [
        "" if phase[key] is None else f"{mark}{factor * phase[key]:,.2f}"
        for key, mark in (("planned_gib", "~"), ("compiled_gib", ""), ("device_peak_gib", ""))
    ]
    return [phase["phase"], *planned, _seconds(phase["measured_s"]), *sizes, ""]


def _seconds(number: float) -> str:
    return f"{number:.2f}" if number >= 1 else f"{number:.3f}"


def _sizes(sizes: Mapping[str, int]) -> str:
    return " and ".join(f"plan.{name} = {size}" for name, size in sizes.items())
