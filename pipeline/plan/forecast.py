"""Forecast of a run under its budget: steps, tokens, seconds by activity, dollars, disk.

Counts everything that a run does: the download of the weights, start-up, compilation, measuring
of sizes, the SFT phase, steps, evaluations, checkpoints, the export. All figures are estimates.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

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
from pipeline.plan.cost_model.step import estimate_sampling, sft_step_s
from pipeline.plan.search.fitting import PlanCase, SizedPlan
from pipeline.plan.sizes import Sizes, sized
from pipeline.plan.topology import GIB

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
class Forecast:
    """Forecast of a run with cold caches: neither weights nor compiled programs are on the host.

    Attributes:
        steps: update steps, those of the SFT phase included.
        wall_s: seconds from start to end.
        enough: whether a time budget is enough for a GRPO step; true for a budget of steps.
        spent_s: seconds by activity.
        first_step_s: seconds up to the end of the first optimizer step.
        download_gib: weights to download from a hub; 0: they are in a folder.
        time_given_s: the budget in seconds; None: the budget is a number of steps.
        grpo_steps: GRPO steps.
        samples: rollouts of these steps.
        tokens: trained tokens of these steps.
        cost_usd: cost; None: the price is unknown.
        disk_gib: GiB by kind of file.
        evaluated: prompts of each evaluation set.
        guessed: evaluation sets whose number of rows is unknown.
    """

    steps: int
    wall_s: float
    enough: bool
    spent_s: Mapping[str, float]
    first_step_s: float
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
    rows = {name: _rows(source, config.data.train) for name, source in _tests(config).items()}
    counts = {name: ROWS if count is None else count for name, count in rows.items()}
    once = _activities_s(case, plan, counts)
    given_s = time_given_s(config)
    first_s = _first_step_s(config, once, timed=given_s is not None)
    grpo, spent = _spent(config, once, first_s=first_s, time_s=given_s)
    wall_s = sum(spent.values())
    chips = 1 if chip.platform == "cpu" else case.topology.chips
    price = chip.chip_hour_usd
    return Forecast(
        steps=_sft_steps(config) + grpo,
        wall_s=wall_s,
        enough=config.budget.steps is not None or grpo > 0,
        spent_s=spent,
        first_step_s=first_s,
        download_gib=_download_bytes(case) / GIB,
        time_given_s=given_s,
        grpo_steps=grpo,
        samples=grpo * config.rollout.size,
        tokens=grpo * plan.step.tokens,
        cost_usd=None if price is None else wall_s / 3600 * chips * price,
        disk_gib=_disk_gib(case, plan, grpo, sum(counts.values())),
        evaluated=counts,
        guessed=tuple(name for name, count in rows.items() if count is None),
    )


def _activities_s(case: PlanCase, plan: SizedPlan, rows: Mapping[str, int]) -> dict[str, float]:
    """Seconds of each activity of a run, once; `rows` are the prompts of each evaluation set."""
    config, shape, platform = plan.config, case.shape, case.topology.chip.platform
    model = case.roofline(config)
    base = shape.base_bytes(config.model.dtype, quantization=config.model.quantization)
    written = _merged_bytes(config, shape)
    state = 3 * _FLOAT * shape.adapter_parameters(config.lora)

    def answers_s(name: str) -> float:
        sampling = estimate_sampling(
            model, case.lengths, prompts=rows[name], samples=config.eval.samples
        )
        return (sampling["prefill"] + sampling["decode"]).expected

    export_s = written / _WRITE_BYTES_PER_S + written / _READ_BYTES_PER_S
    return {
        "download": _download_bytes(case) / DOWNLOAD_BYTES_PER_S,
        "start": _START_S[platform] + base / _READ_BYTES_PER_S,
        "compile": compile_s(compiled_programs(case, plan), shape, platform=platform),
        "sizing": sizing_s(case, plan),
        "sft_step": sft_step_s(model) if config.run.has_sft_phase else 0.0,
        "step": plan.step.total.expected,
        "checkpoint": _CHECKPOINT_FLOOR_S + state / _WRITE_BYTES_PER_S,
        "tests": sum(answers_s(name) for name in rows if name != "validation"),
        "validation": answers_s("validation") if "validation" in rows else 0.0,
        "export": _EXPORT_FLOOR_S + export_s,
    }


def _download_bytes(case: PlanCase) -> int:
    """Bytes of the weights at a hub."""
    if not case.config.model.path.startswith(HUB_PREFIXES):
        return 0
    return _PUBLISHED_BYTES * case.shape.parameters + unused_bytes(case.config)


def _first_step_s(config: Config, s: Mapping[str, float], *, timed: bool) -> float:
    """Seconds up to the end of the first optimizer step, from those of each activity.

    In a time budget the initial policy is exported, too.
    """
    names = ["download", "start", "compile", "sizing", "tests", "validation"]
    names += ["export"] if timed else []
    return sum(s[name] for name in [*names, "sft_step" if config.sft_steps else "step"])


def _sft_steps(config: Config) -> int:
    return min(config.sft_steps, config.budget.steps or config.sft_steps)


def _spent(
    config: Config, s: Mapping[str, float], *, first_s: float, time_s: float | None
) -> tuple[int, dict[str, float]]:
    """The GRPO steps of a run, and its seconds by activity, from those of each activity.

    `first_s` are those up to the end of the first optimizer step, `time_s` the time budget.
    """
    sft = _sft_steps(config)
    before = first_s - s["sft_step" if config.sft_steps else "step"] + sft * s["sft_step"]
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
    spent = {
        **{name: s[name] for name in ("download", "start", "compile", "sizing")},
        "SFT phase": sft * s["sft_step"],
        "steps": steps * s["step"],
        "validation": (1 + bool(steps)) * s["validation"],
        "tests": 2 * s["tests"],
        "checkpoints": steps * s["checkpoint"] / config.checkpoint.every_steps,
        "export": (1 if time_s is None else 2) * s["export"],
    }
    spent["validation"] += steps * each - spent["steps"] - spent["checkpoints"]
    return steps, spent


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


def sizing_s(case: PlanCase, plan: SizedPlan) -> float:
    """Seconds of measuring sizes at the start, without compilation; zero if all are given."""
    if not case.config.plan.planned_sizes:
        return 0.0
    return min(measuring_limit_s(plan.config), _STEPS_MEASURED * plan.step.total.expected)


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
