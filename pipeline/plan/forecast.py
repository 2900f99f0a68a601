"""What a plan makes of the budget: steps, tokens, seconds by what they are spent on, dollars, disk.

Everything a run does beside its steps is counted: starting, compiling, measuring sizes, the warm
start, all evaluations, checkpoints, the export. Each figure is an estimate; times have a range.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.schema import Config, Source
from pipeline.contracts.model_shape import DTYPE_BYTES
from pipeline.control.estimates import SAFETY
from pipeline.plan.calibrating import calibration_s, share_s
from pipeline.plan.cost_model.compile_time import compile_s
from pipeline.plan.cost_model.programs import built_programs
from pipeline.plan.cost_model.step import drawing, imitation_s
from pipeline.plan.cost_model.timing import Seconds, fixed
from pipeline.plan.search.search import Case, Planned

Pace = Literal["low", "expected", "high"]
"""Which end of every time's range."""
PACES: tuple[Pace, ...] = ("low", "expected", "high")

ROWS = 1000
"""Taken for the rows of a dataset whose number nothing tells."""

_START_S = {"cpu": 25.0, "gpu": 60.0, "tpu": 60.0}
"""Of the cluster, the processes and opening the devices."""
_READ_BYTES_PER_S, _WRITE_BYTES_PER_S = 0.5e9, 0.25e9
"""Of weights from a disk into memory, and of a merged model onto it."""
_EXPORT_FLOOR_S, _CHECKPOINT_FLOOR_S = 5.0, 0.5
_TEXT_BYTES, _ROW_BYTES, _ID_BYTES = 4.5, 420.0, 24.0
"""Of a token's text, of all else about a rollout, of a token's id and log-prob as JSON."""
_METRICS_BYTES = 2500.0
_FLOAT = 4


@dataclass(frozen=True)
class Outcome:
    """How a run goes at one pace.

    Attributes:
        steps: that it learns from, those of the warm start included.
        wall_s: from start to end.
        spent_s: seconds by what they are spent on.
        enough: whether there is time for a step of GRPO, where time is what is given.
    """

    steps: int
    wall_s: float
    min_finished: bool
    spent_s: Mapping[str, float]


@dataclass(frozen=True)
class Forecast:
    """What becomes of the budget.

    Attributes:
        outcomes: by pace.
        time_s: that is given; None: a number of steps is.
        grpo_steps: of the expected outcome, without the warm start's.
        samples: rollouts of these.
        tokens: that are trained.
        cost_usd: of the expected outcome; None: no price is known.
        disk_bytes: by what is written.
        programs: that are compiled; more for each size that is measured at the start.
        compile: seconds of all of them, one after the other.
        calibration: seconds of measuring sizes.
        share_s: within which that is done; 0: nothing is measured.
        rows: prompts of each evaluation.
        guessed: evaluations whose rows nothing tells.
    """

    outcomes: Mapping[Pace, Outcome]
    time_s: float | None
    grpo_steps: int
    samples: int
    tokens: float
    cost_usd: float | None
    disk_bytes: Mapping[str, float]
    programs: int
    compile: Seconds
    calibration: Seconds
    share_s: float
    rows: Mapping[str, int]
    guessed: tuple[str, ...]


def forecast(
    case: Case, plan: Planned, *, compiled_s: Mapping[str, float] | None = None
) -> Forecast:
    """What a plan makes of the configuration's budget.

    Args:
        case: what is planned.
        plan: the one that is taken.
        compiled_s: seconds of programs that were compiled already, by their names.
    """
    config, chip = plan.config, case.topology.chip
    names = built_programs(config, case.shape)
    compiling = compile_s(names, case.shape, chip=chip, known=compiled_s)
    rows = {name: _rows(source) for name, source in _tests(config).items()}
    counts = {name: ROWS if count is None else count for name, count in rows.items()}
    parts = Parts.of(case, plan, counts, compiling=compiling)
    given_s = _given_s(config)
    outcomes = {pace: _outcome(config, parts, pace, time_s=given_s) for pace in PACES}
    expected = outcomes["expected"]
    grpo = max(0, expected.steps - config.sft_steps)
    hours, price = expected.wall_s / 3600, chip.chip_hour_usd
    chips = 1 if chip.platform == "cpu" else case.topology.chips
    return Forecast(
        outcomes=outcomes,
        time_s=given_s,
        grpo_steps=grpo,
        samples=grpo * config.rollout.size,
        tokens=grpo * plan.step.tokens,
        cost_usd=None if price is None else hours * chips * price,
        disk_bytes=_disk(case, plan, grpo, sum(counts.values())),
        programs=len(names),
        compile=compiling,
        calibration=parts.calibration,
        share_s=share_s(config) if parts.calibration.high else 0.0,
        rows=counts,
        guessed=tuple(name for name, count in rows.items() if count is None),
    )


@dataclass(frozen=True)
class Parts:
    """Times of what a run does, each once."""

    start: Seconds
    compile: Seconds
    calibration: Seconds
    warm_step: Seconds
    step: Seconds
    checkpoint: Seconds
    tests: Seconds
    validation: Seconds
    export: Seconds

    @staticmethod
    def of(case: Case, plan: Planned, rows: Mapping[str, int], *, compiling: Seconds) -> Parts:
        """Of a plan.

        Args:
            case: what is planned.
            plan: the one that is taken.
            rows: prompts of each evaluation.
            compiling: all programs.
        """
        config, chip = plan.config, case.topology.chip
        pace = case.pace(config)
        base = case.shape.base_bytes(config.model.dtype, quantization=config.model.quantization)
        written = case.shape.parameters * _export_size(config)
        state = 3 * _FLOAT * case.shape.adapter_parameters(config.lora)

        def answers(name: str) -> Seconds:
            drawn = drawing(pace, case.lengths, prompts=rows[name], samples=config.eval.samples)
            return drawn.prefill + drawn.decode

        nothing = fixed(0.0, chip=chip)
        tests = sum((answers(name) for name in rows if name != "validation"), nothing)
        warm = imitation_s(pace) if config.run.warm_start else nothing
        load_s = base / _READ_BYTES_PER_S
        export_s = written / _WRITE_BYTES_PER_S + written / _READ_BYTES_PER_S
        return Parts(
            start=fixed(_START_S[chip.platform] + load_s, chip=chip),
            compile=compiling,
            calibration=calibration_s(case, plan),
            warm_step=warm,
            step=plan.step.total,
            checkpoint=fixed(_CHECKPOINT_FLOOR_S + state / _WRITE_BYTES_PER_S, chip=chip),
            tests=tests,
            validation=answers("validation") if "validation" in rows else nothing,
            export=fixed(_EXPORT_FLOOR_S + export_s, chip=chip),
        )

    def at(self, pace: Pace) -> dict[str, float]:
        """Seconds by name."""
        return {name: getattr(part, pace) for name, part in vars(self).items()}


def _given_s(config: Config) -> float | None:
    """The budget in seconds, if it is one of time; what is left where it has a date."""
    budget = config.budget
    if budget.until_s is None:
        return budget.time_s
    return max(0.0, budget.until_s - time.time())


def _outcome(config: Config, parts: Parts, pace: Pace, *, time_s: float | None) -> Outcome:
    s = parts.at(pace)
    warm = min(config.sft_steps, config.budget.steps or config.sft_steps)
    before = s["start"] + s["compile"] + s["calibration"] + s["tests"] + warm * s["warm_step"]
    if config.eval.validates:
        before += s["validation"]
    # With a deadline the untrained policy is exported, too, before the first step.
    exports = 1 if time_s is None else 2
    before += (exports - 1) * s["export"]
    end = s["tests"] + s["validation"] + s["export"]
    each = s["step"] + s["checkpoint"] / config.checkpoint.every_steps
    minutes = config.eval.every_minutes
    if config.eval.every_steps:
        each += s["validation"] / config.eval.every_steps
    elif minutes is not None:
        # A share of the time, whatever the steps take.
        each /= max(1e-3, 1 - s["validation"] / (60 * minutes + s["validation"]))
    if config.budget.steps is not None:
        steps = config.budget.steps - warm
    else:
        left = (time_s or 0.0) - before - SAFETY * (s["step"] + end)
        steps = max(0, math.floor(left / each))
    loop = steps * each
    spent = {
        "start": s["start"],
        "compile": s["compile"],
        "calibration": s["calibration"],
        "warm start": warm * s["warm_step"],
        "steps": steps * s["step"],
        "validation": (1 + bool(steps)) * s["validation"] if config.eval.validates else 0.0,
        "tests": 2 * s["tests"],
        "checkpoints": steps * s["checkpoint"] / config.checkpoint.every_steps,
        "export": exports * s["export"],
    }
    spent["validation"] += loop - spent["steps"] - spent["checkpoints"]
    min_finished = config.budget.steps is not None or steps > 0
    return Outcome(warm + steps, sum(spent.values()), min_finished, spent)


def _tests(config: Config) -> dict[str, Source]:
    found: dict[str, Source] = {"test": config.data.test}
    found |= {source.name: source for source in config.eval.sets}
    if config.data.validation is not None:
        found["validation"] = config.data.validation
    return found


def _rows(source: Source) -> int | None:
    """As many as a local file has lines, or as the settings say; None: nothing is downloaded."""
    count = None
    path = Path(source.path)
    if source.is_file and path.suffix == ".jsonl" and path.is_file():
        with path.open("rb") as lines:
            count = sum(1 for line in lines if line.strip())
    slices = re.search(r"\[(-?)(\d*):(\d*)\]$", source.split or "")
    if slices and slices[2] and (slices[1] or slices[3]):
        count = int(slices[2]) if slices[1] else int(slices[3]) - int(slices[2])
    elif slices and slices[3]:
        count = int(slices[3])
    if source.limit is not None:
        count = source.limit if count is None else min(count, source.limit)
    return count


def _export_size(config: Config) -> int:
    kind = config.export.dtype or config.model.dtype
    return 2 if kind == "float16" else DTYPE_BYTES[kind]


def _disk(case: Case, plan: Planned, steps: int, evaluated: int) -> dict[str, float]:
    config, mean = plan.config, case.lengths.completion
    adapter = _FLOAT * case.shape.adapter_parameters(config.lora)
    row = _ROW_BYTES + _TEXT_BYTES * mean
    drawn = row + (_ID_BYTES * case.lengths.sequence if config.records.tokens else 0.0)
    # Adapter and both of Adam's moments; `best` has an adapter alone, an export one beside.
    state = 3 * adapter
    return {
        "checkpoints": config.checkpoint.keep * state + adapter,
        "rollouts": steps * config.rollout.size * drawn + 2 * evaluated * row,
        "records": steps * _METRICS_BYTES,
        "export": case.shape.parameters * _export_size(config) + adapter,
    }
