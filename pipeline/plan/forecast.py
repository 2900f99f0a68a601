"""Forecast of a run under its budget: steps, tokens, seconds by activity, dollars, disk.

Counts everything that a run does: the download of the weights, start-up, compilation, measuring
of sizes, the SFT phase, steps, evaluations, checkpoints, the export. All figures are estimates;
times have a range.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from configs.base import HUB_PREFIXES
from configs.schema import Config, Source
from configs.task import HeldOut
from pipeline.data.models.find_shape import unused_bytes
from pipeline.data.models.model_shape import DTYPE_BYTES, ModelShape
from pipeline.data.text_files import parser_of
from pipeline.deadline import SAFETY
from pipeline.plan.choose_sizes import (
    candidates,
    compares_sizes,
    measuring_limit_s,
    time_given_s,
)
from pipeline.plan.cost_model.programs import built_programs, compile_s
from pipeline.plan.cost_model.roofline import Seconds, fixed_time
from pipeline.plan.cost_model.step import estimate_sampling, sft_step_s
from pipeline.plan.search.fitting import PlanCase, SizedPlan
from pipeline.plan.sizes import Sizes, sized
from pipeline.plan.topology import GIB

Scenario = Literal["low", "expected", "high"]
"""An end of every time's range."""
SCENARIOS: tuple[Scenario, ...] = ("low", "expected", "high")
Times = Mapping[str, Seconds]
"""Times of a run's activities by name, each once."""

ROWS = 1000
"""Assumed number of rows of a dataset whose size is unknown."""

_START_S = {"cpu": 25.0, "gpu": 60.0, "tpu": 60.0}
"""Seconds of starting the cluster and the processes and of opening the devices."""
_READ_BYTES_PER_S, _WRITE_BYTES_PER_S = 0.5e9, 0.25e9
"""Rates of reading weights from disk and of writing a merged model."""
DOWNLOAD_BYTES_PER_S = 1e8
"""Assumed rate of downloading weights from a hub."""
_PUBLISHED_BYTES = 2
"""Bytes of a parameter in published weights."""
_EXPORT_FLOOR_S, _CHECKPOINT_FLOOR_S = 5.0, 0.5
_STEPS_MEASURED = 3
"""Measuring sizes takes about as long as this many steps, if there is time."""
_TEXT_BYTES, _ROW_BYTES, _ID_BYTES = 4.5, 420.0, 24.0
"""Bytes of a token's text, of a rollout's other fields, and of a token's id and log-prob as
JSON."""
_METRICS_BYTES = 2500.0
_FLOAT = 4


@dataclass(frozen=True)
class Outcome:
    """A run in one scenario.

    Attributes:
        steps: update steps, those of the SFT phase included.
        wall_s: seconds from start to end.
        enough: whether a time budget is enough for a GRPO step; true for a budget of steps.
        spent_s: seconds by activity.
    """

    steps: int
    wall_s: float
    enough: bool
    spent_s: Mapping[str, float]


@dataclass(frozen=True)
class Forecast:
    """Forecast of a run.

    Attributes:
        outcomes: the run in each scenario, with cold caches: neither weights nor compiled programs
            are on the host.
        first_step_s: seconds by activity up to the end of the first optimizer step, in each
            scenario.
        download_gib: weights to download from a hub; 0: they are in a folder.
        time_given_s: the budget in seconds; None: the budget is a number of steps.
        grpo_steps: expected GRPO steps.
        samples: rollouts of these steps.
        tokens: trained tokens of these steps.
        cost_usd: expected cost; None: the price is unknown.
        disk_gib: GiB by kind of file.
        evaluated: prompts of each evaluation set.
        guessed: evaluation sets whose number of rows is unknown.
    """

    outcomes: Mapping[Scenario, Outcome]
    first_step_s: Mapping[Scenario, Mapping[str, float]]
    download_gib: float
    time_given_s: float | None
    grpo_steps: int
    samples: int
    tokens: float
    cost_usd: float | None
    disk_gib: Mapping[str, float]
    evaluated: Mapping[str, int]
    guessed: tuple[str, ...]


def forecast(case: PlanCase, plan: SizedPlan) -> Forecast:
    """Forecasts a run of a plan."""
    config, chip = plan.config, case.topology.chip
    compiling = compile_s(compiled_programs(case, plan), case.shape, chip=chip)
    rows = {name: _rows(source, config.data.train) for name, source in _tests(config).items()}
    counts = {name: ROWS if count is None else count for name, count in rows.items()}
    times = _run_times(case, plan, counts, compiling=compiling)
    given_s = time_given_s(config)
    outcomes = {end: _outcome(config, _at(times, end), time_s=given_s) for end in SCENARIOS}
    expected = outcomes["expected"]
    grpo = max(0, expected.steps - config.sft_steps)
    hours, price = expected.wall_s / 3600, chip.chip_hour_usd
    chips = 1 if chip.platform == "cpu" else case.topology.chips
    return Forecast(
        outcomes=outcomes,
        first_step_s={
            end: _first_step_s(config, _at(times, end), timed=given_s is not None)
            for end in SCENARIOS
        },
        download_gib=_download_bytes(case) / GIB,
        time_given_s=given_s,
        grpo_steps=grpo,
        samples=grpo * config.rollout.size,
        tokens=grpo * plan.step.tokens,
        cost_usd=None if price is None else hours * chips * price,
        disk_gib=_disk_gib(case, plan, grpo, sum(counts.values())),
        evaluated=counts,
        guessed=tuple(name for name, count in rows.items() if count is None),
    )


def _run_times(
    case: PlanCase, plan: SizedPlan, rows: Mapping[str, int], *, compiling: Seconds
) -> Times:
    """Times of a run of a plan.

    Args:
        case: the planner's input.
        plan: the chosen plan.
        rows: prompts of each evaluation set.
        compiling: time of compiling all programs.
    """
    config, chip = plan.config, case.topology.chip
    model = case.roofline(config)
    base = case.shape.base_bytes(config.model.dtype, quantization=config.model.quantization)
    written = _merged_bytes(config, case.shape)
    state = 3 * _FLOAT * case.shape.adapter_parameters(config.lora)

    def answers(name: str) -> Seconds:
        sampling = estimate_sampling(
            model, case.lengths, prompts=rows[name], samples=config.eval.samples
        )
        return sampling["prefill"] + sampling["decode"]

    nothing = fixed_time(0.0, chip=chip)
    load_s = base / _READ_BYTES_PER_S
    export_s = written / _WRITE_BYTES_PER_S + written / _READ_BYTES_PER_S
    return {
        "download": fixed_time(_download_bytes(case) / DOWNLOAD_BYTES_PER_S, chip=chip),
        "start": fixed_time(_START_S[chip.platform] + load_s, chip=chip),
        "compile": compiling,
        "sizing": sizing_s(case, plan),
        "sft_step": sft_step_s(model) if config.run.has_sft_phase else nothing,
        "step": plan.step.total,
        "checkpoint": fixed_time(_CHECKPOINT_FLOOR_S + state / _WRITE_BYTES_PER_S, chip=chip),
        "tests": sum((answers(name) for name in rows if name != "validation"), nothing),
        "validation": answers("validation") if "validation" in rows else nothing,
        "export": fixed_time(_EXPORT_FLOOR_S + export_s, chip=chip),
    }


def _at(times: Times, scenario: Scenario) -> dict[str, float]:
    """Seconds by activity in a scenario."""
    return {name: getattr(time, scenario) for name, time in times.items()}


def _download_bytes(case: PlanCase) -> int:
    """Bytes of the weights at a hub."""
    if not case.config.model.path.startswith(HUB_PREFIXES):
        return 0
    return _PUBLISHED_BYTES * case.shape.parameters + unused_bytes(case.config)


def _first_step_s(config: Config, s: Mapping[str, float], *, timed: bool) -> dict[str, float]:
    """Seconds by activity up to the end of the first optimizer step.

    Args:
        config: of the run.
        s: seconds by activity, each once.
        timed: whether the budget is a time; then the initial policy is exported, too.
    """
    return {
        **{name: s[name] for name in ("download", "start", "compile", "sizing", "tests")},
        "validation": s["validation"] if config.validates else 0.0,
        "export": s["export"] if timed else 0.0,
        "step": s["sft_step"] if config.sft_steps else s["step"],
    }


def _outcome(config: Config, s: Mapping[str, float], *, time_s: float | None) -> Outcome:
    """The run, by the seconds of its activities and its time budget."""
    sft = min(config.sft_steps, config.budget.steps or config.sft_steps)
    first = _first_step_s(config, s, timed=time_s is not None)
    before = sum(first.values()) - first["step"] + sft * s["sft_step"]
    exports = 1 if time_s is None else 2
    end = s["tests"] + s["validation"] + s["export"]
    each = s["step"] + s["checkpoint"] / config.checkpoint.every_steps
    every, minutes = config.validation_steps, config.validation_minutes
    if every is not None:
        each += s["validation"] / every
    elif minutes is not None:
        # A share of the time, independent of the step time.
        each /= max(1e-3, 1 - s["validation"] / (60 * minutes + s["validation"]))
    if config.budget.steps is not None:
        steps = config.budget.steps - sft
    else:
        left = (time_s or 0.0) - before - SAFETY * (s["step"] + end)
        steps = max(0, math.floor(left / each))
    loop = steps * each
    spent = {
        "download": s["download"],
        "start": s["start"],
        "compile": s["compile"],
        "sizing": s["sizing"],
        "SFT phase": sft * s["sft_step"],
        "steps": steps * s["step"],
        "validation": (1 + bool(steps)) * s["validation"] if config.validates else 0.0,
        "tests": 2 * s["tests"],
        "checkpoints": steps * s["checkpoint"] / config.checkpoint.every_steps,
        "export": exports * s["export"],
    }
    spent["validation"] += loop - spent["steps"] - spent["checkpoints"]
    enough = config.budget.steps is not None or steps > 0
    return Outcome(sft + steps, sum(spent.values()), enough, spent)


def _tests(config: Config) -> dict[str, Source]:
    found: dict[str, Source] = {"test": config.data.test}
    found |= {source.name: source for source in config.eval.sets}
    if config.data.validation is not None:
        found["validation"] = config.data.validation
    return found


def _rows(source: Source, train: Source) -> int | None:
    """Number of rows of a local file; None: unknown without a download."""
    if isinstance(source, HeldOut) and source.share is not None:
        whole = _rows(train, train)
        held = source.limit if whole is None else round(source.share * whole)
        return held if source.limit is None or held is None else min(held, source.limit)
    count: int | None = None
    path = Path(source.title)
    parse = parser_of(source.title) if source.is_file and path.is_file() else None
    if parse is not None:
        with contextlib.suppress(
            ValueError
        ):  # a run and `launch.data` refuse the file with reasons
            count = len(parse(path, None)[0])
    slices = re.search(r"\[(-?)(\d*):(\d*)\]$", source.split or "")
    if slices and slices[2] and (slices[1] or slices[3]):
        count = int(slices[2]) if slices[1] else int(slices[3]) - int(slices[2])
    elif slices and slices[3]:
        count = int(slices[3])
    if source.limit is not None:
        count = source.limit if count is None else min(count, source.limit)
    return count


def _merged_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes of an exported model, with the other parts of a multimodal Hugging Face folder."""
    kind = config.export.dtype or config.model.dtype
    each = 2 if kind == "float16" else DTYPE_BYTES[kind]
    parts = 0 if "/flax/" in config.model.path.lower() else unused_bytes(config)
    return shape.parameters * each + parts


def _disk_gib(case: PlanCase, plan: SizedPlan, steps: int, evaluated: int) -> dict[str, float]:
    config, mean = plan.config, case.lengths.completion
    row = _ROW_BYTES + _TEXT_BYTES * mean
    stored = row + (_ID_BYTES * case.lengths.sequence if config.records.tokens else 0.0)
    adapter = _FLOAT * case.shape.adapter_parameters(config.lora)
    sizes = {
        # Each has the adapter and both of Adam's moments; `best` and the export hold an adapter.
        "checkpoints": config.checkpoint.keep * 3 * adapter + adapter,
        "rollouts": steps * config.rollout.size * stored + 2 * evaluated * row,
        "records": steps * _METRICS_BYTES,
        "export": _merged_bytes(config, case.shape) + adapter,
    }
    return {name: size / GIB for name, size in sizes.items()}


def sizing_s(case: PlanCase, plan: SizedPlan) -> Seconds:
    """Time of measuring sizes at the start of a run, without compilation; zero if all are given."""
    if not case.config.plan.planned_sizes:
        return fixed_time(0.0, chip=case.topology.chip)
    limit_s, once = measuring_limit_s(plan.config), plan.step.total * _STEPS_MEASURED
    low, expected, high = (min(limit_s, one) for one in (once.low, once.expected, once.high))
    return Seconds(low, expected, high, once.regime)


def compiled_programs(case: PlanCase, plan: SizedPlan) -> list[str]:
    """Names of the programs that a run compiles, those for sizes that it measures included."""
    own, sized_case = Sizes.of(plan.config), replace(case, config=plan.config)
    if not compares_sizes(case, plan):
        return list(built_programs(plan.config, case.shape))
    tried = [
        replace(own, **{name: size})
        for name in case.config.plan.planned_sizes
        for size in candidates(sized_case, own, name)
    ]
    named: dict[tuple[str, int], str] = {}
    for config in (plan.config, *(sized(plan.config, sizes) for sizes in tried)):
        named |= {_key(config, name): name for name in built_programs(config, case.shape)}
    return list(named.values())


def _key(config: Config, name: str) -> tuple[str, int]:
    """A program's name and the other sizes that it depends on."""
    kind, _, size = name.partition(" ")
    if kind in {"empty", "fill"}:
        return name, config.slots
    return name, config.prefill_rows(int(size)) if kind == "prefill" else 0
