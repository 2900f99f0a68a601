"""The plan report: the figures of `launch.plan --json`, and the lines of text that show them.

Figures are GiB, seconds, tokens per second, dollars and bytes. They are estimates, but for those
whose `source` is "compiler"; ranges are always estimated. In the text estimates are marked with
`~`, figures of the TPU compiler with `=`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.data.models.model_shape import LOADING_COPIES
from pipeline.plan.cost_model.hardware import Chip, has_own_topology, topology_of
from pipeline.plan.cost_model.memory import PARTS
from pipeline.plan.forecast import DOWNLOAD_BYTES_PER_S, SCENARIOS, Forecast
from pipeline.plan.lengths import Lengths
from pipeline.plan.search.fitting import PlacementChoice, PlanCase, SizedPlan, shortage
from pipeline.plan.search.placements import PLACEMENT_KEYS, settings_to_set
from pipeline.plan.search.suggestions import Change, settings_text
from pipeline.plan.topology import GIB
from pipeline.plan.verify import CompilerCheck, Verified
from pipeline.tables import table

Figures = dict[str, Any]
"""A JSON object."""

_COMPILER = {"source": "compiler"}
_MARKS = "~ estimated; = by the TPU compiler, whose times are a model, too"
_REGIMES = {
    "compute": "arithmetic",
    "bandwidth": "memory bandwidth",
    "links": "links between chips",
    "latency": "latency of small steps",
}
"""Text of each `Regime`."""
_COMPILED_TIMES = (
    "ms: by the compiler's estimate or its schedule, at least the memory traffic at the peak "
    "bandwidth; modelled: what it has no estimate of, by its schedule and its traffic"
)
_SETTINGS = (
    *("slots", "segment_steps", "prefill_tokens", "micro_batch_tokens", "remat"),
    "per_layer_embeddings",
)
"""Settings of [plan] that the planner chooses besides the placement."""


@dataclass(frozen=True)
class Planned:
    """The result of planning.

    Attributes:
        case: the planner's input.
        choice: the placements compared.
        forecast: the run under its budget with the plan.
        changes: changes that would raise the speed, or make the plan fit; see `suggestions`.
        verified: the compiler's verification; None: not verified.
        why_estimated: why a requested verification did not happen.
    """

    case: PlanCase
    choice: PlacementChoice
    forecast: Forecast
    changes: Sequence[Change] = ()
    verified: Verified | None = None
    why_estimated: str | None = None

    @property
    def plan(self) -> SizedPlan:
        """The chosen plan, after verification if there was one."""
        return self.choice.chosen if self.verified is None else self.verified.plan

    @property
    def estimated(self) -> SizedPlan:
        """The same placement with the sizes chosen by estimates."""
        return next(one for one in self.choice.compared if one.name == self.plan.name)

    @property
    def programs(self) -> Mapping[str, CompilerCheck]:
        """The compiled programs by name; empty: not verified."""
        return {} if self.verified is None else self.verified.programs


def plan_report(found: Planned) -> tuple[Figures, list[str]]:
    """All figures of a plan, and all lines, with a blank line between sections.

    Each section adds its figures and yields its lines.
    """
    figures, lines = Figures(), list[str]()
    for section in (_head, _chosen, _memory, _step, _compared, _verified, _budget, _changes):
        own = list(section(found, figures))
        lines += ["", *own] if own and lines else own
    return figures, lines


def _head(found: Planned, figures: Figures) -> Iterator[str]:
    topology, chip, name = found.case.topology, found.case.topology.chip, found.case.config.run.name
    rollout, lengths = found.case.config.rollout, found.case.lengths
    plan_only = topology.why_not_trained(found.plan.config.plan)
    figures["name"] = name
    figures["topology"] = {
        "name": topology.name,
        "chip": chip.name,
        "chips": topology.chips,
        "hosts": topology.hosts,
        "hbm_gib": chip.hbm_gib,
        "speeds": chip.speeds,
        "published_speeds": chip.published.speeds,
        "plan_only": plan_only,
    }
    limits = {"max_prompt": rollout.max_prompt_tokens, "max_completion": rollout.max_new_tokens}
    figures["lengths"] = asdict(lengths) | limits
    hosts = f", {topology.hosts} hosts" if topology.hosts > 1 else ""
    yield (
        f"plan of {name} for {topology.name}: {topology.chips} x {chip.name} of "
        f"{chip.hbm_gib:.2f} GiB{hosts}"
    )
    if plan_only:
        yield f"plan only: {plan_only}"
    yield _MARKS if chip.measured else f"{_MARKS}; nothing is measured"
    if chip.measured:
        yield (
            f"speeds of a chip as measured on this host at {chip.measured}: {_speeds(chip)}; "
            f"published: {_speeds(chip.published)}"
        )
    yield (
        f"assumed: prompts of ~{lengths.prompt:.0f} tokens (at most {rollout.max_prompt_tokens}), "
        f"completions of ~{lengths.completion:.0f} (at most {rollout.max_new_tokens})"
    )


def _speeds(chip: Chip) -> str:
    return (
        f"{chip.bytes_per_s / 1e9:,.0f} GB/s, {chip.bf16_flops / 1e12:,.0f} TFLOP/s, "
        f"in 8 bits {chip.int8_flops / 1e12:,.0f} TOP/s"
    )


# --- the chosen plan


def _chosen(found: Planned, figures: Figures) -> Iterator[str]:
    case, plan = found.case, found.plan
    planned, config, sizes = case.config.plan.planned_sizes, plan.config, _sizes(plan)
    host = case.shape.host_bytes(config.model.dtype) if config.plan.embeddings_in_host else 0
    settings = settings_to_set(case.config, config, _SETTINGS) if plan.fits else {}
    figures["plan"] = own = {
        "name": plan.name,
        "configured": plan.configured,
        "planned_sizes": list(planned),
        "fits": plan.fits,
        "short": None if plan.fits else _short(found),
        "reserve_gib": (case.topology.chip.hbm_gib * GIB - case.limit_bytes) / GIB,
        "limit_gib": case.limit_bytes / GIB,
        **sizes,
        "host_gib_per_chip": host / GIB,
        "auto": _is_of_the_run(found),
        "set": settings,
    }
    which = "sizes" if len(planned) != 1 else f"plan.{planned[0]}"
    yield f"chosen: {plan.name}; {which} {'planned' if planned else 'as given'}"
    if not plan.fits:
        yield f"  DOES NOT FIT: {own['short']}"
    yield (
        f"  slots {sizes['slots']} ({sizes['slots_per_shard']} per shard), segments of "
        f"{sizes['segment_steps']}, prefill {sizes['prefill_tokens']}"
    )
    yield (
        f"  micro-batches of {sizes['micro_batch_tokens']} tokens ({sizes['rows_per_shard']} x "
        f"{sizes['row_tokens']} per shard), remat {sizes['remat']}"
    )
    if host:
        yield (
            f"  per-layer embeddings in host memory: {host / GIB:.2f} GiB for each chip, and "
            f"{LOADING_COPIES} times as much again while they are loaded"
        )
    if own["auto"] and plan.fits:
        yield f'  a run with plan.placement = "auto" has: {settings_text(settings)}'
    elif settings:
        yield f"  settings for it: {settings_text(settings)}"


def _is_of_the_run(found: Planned) -> bool:
    """Whether a run takes this plan by itself: its own chips and lengths, and no compiler."""
    case, config = found.case, found.case.config
    return (
        config.plan.searches_placement
        and has_own_topology(config, case.topology)
        and case.topology.chip.name == topology_of(config, None).chip.name
        and case.lengths == Lengths.expected(config)
        and found.plan.config.plan == found.estimated.config.plan
    )


def _sizes(plan: SizedPlan) -> Figures:
    config = plan.config
    return {
        **{key: getattr(config.plan, key) for key in (*PLACEMENT_KEYS, *_SETTINGS)},
        "slots_per_shard": config.slots // config.plan.sampler_shards,
        "rows_per_shard": config.micro_batch_rows // config.plan.learner_shards,
        "row_tokens": config.row_tokens,
    }


def _short(found: Planned) -> str:
    """Why the plan does not fit."""
    if found.verified is None:
        return shortage(found.case, found.plan)
    limit = found.case.compiled_limit_bytes / GIB
    return "; ".join(
        f"{name} takes {_compiled_size(found, one)} GiB of the {limit:.2f} that may be used"
        for name, one in found.programs.items()
        if not one.report.fits
    )


def _compiled_size(found: Planned, program: CompilerCheck) -> str:
    """Text of a program's compiled size, which may be larger than the memory and not reported."""
    size = program.report.hbm_bytes
    return f">{found.case.topology.chip.hbm_gib:.2f}" if size is None else f"={size / GIB:.2f}"


# --- memory and time


def _memory(found: Planned, figures: Figures) -> Iterator[str]:
    case = found.case
    figures["memory"] = {
        phase: {
            "parts_gib": {name: parts[name] / GIB for name in PARTS},
            "gib": parts.total() / GIB,
        }
        for phase, parts in found.plan.memory.items()
    }
    unit, size = ("GiB", 1) if found.plan.peak_bytes >= GIB else ("MiB", 1024)
    limit, reserve = case.limit_bytes / GIB, case.topology.chip.hbm_gib - case.limit_bytes / GIB
    rows = [["", *(name.replace("kv_", "KV ") for name in PARTS), "total"]]
    for phase, own in figures["memory"].items():
        amounts = (*own["parts_gib"].values(), own["gib"])
        rows.append([phase, *(f"~{amount * size:.2f}" for amount in amounts)])
    yield (
        f"{unit} per chip; a plan may use {limit * size:,.2f}, with {reserve * size:,.2f} in "
        "reserve"
    )
    yield from table(rows)


def _ranged(by_scenario: Sequence[float]) -> Figures:
    """The expected value with its range, from values in the order of `SCENARIOS`.

    With a time budget a slower scenario may end earlier, when the time left is too short for a
    step.
    """
    ends = {"low": min(by_scenario), "high": max(by_scenario)}
    return {"expected": by_scenario[SCENARIOS.index("expected")], "range": ends}


def _marked(ranged: Figures, show: Callable[[float], str]) -> tuple[str, str, str]:
    """Texts of the expected value and of the low and high ends."""
    low, high = (f"~{show(end)}" for end in ranged["range"].values())
    return f"{'=' if 'source' in ranged else '~'}{show(ranged['expected'])}", low, high


def _with_range(ranged: Figures, show: Callable[[float], str], unit: str = "") -> str:
    """Text of a value with its range, if the range is not empty."""
    expected, low, high = _marked(ranged, show)
    ends = ranged["range"]
    return f"{expected}{unit}" + (f" ({low} to {high})" if ends["low"] < ends["high"] else "")


def _step(found: Planned, figures: Figures) -> Iterator[str]:
    step, rollout = found.plan.step, found.case.config.rollout
    compiled = {one.phase for one in found.programs.values() if one.report.seconds > 0}
    seconds = {
        phase: {
            **(_COMPILER if phase in compiled else {}),
            **_ranged([time.low, time.expected, time.high]),
            "regime": time.regime,
        }
        for phase, time in step.seconds.items()
    }
    total = step.total
    prompts = rollout.prompts_per_step
    most = rollout.max_prompts_per_step or prompts
    figures["step"] = own = asdict(step) | {
        "seconds": seconds,
        "total_s": _ranged([total.low, total.expected, total.high]),
        "dynamic_sampling": rollout.dynamic_sampling,
        "prompts": prompts,
        "most_prompts": most,
        "tokens_per_s": step.tokens_per_s,
    }
    if not found.plan.fits:
        return  # a plan that does not fit has no step
    rows = [["seconds of a step", "expected", "from", "to", "bound by"]]
    for phase, time in seconds.items():
        rows.append([phase, *_marked(time, "{:.2f}".format), _REGIMES[time["regime"]]])
    yield from table([*rows, ["total", *_marked(own["total_s"], "{:.2f}".format), ""]])
    yield (
        f"~{step.tokens_per_s:,.0f} trained tokens per second; ~{step.slots_useful:.0%} of the "
        f"slots' decode steps generate a token, ~{step.padding:.0%} of the learner's positions "
        "are padding"
    )
    if most > prompts:
        yield (
            f'dynamic sampling ("{rollout.dynamic_sampling}"): the number of groups without signal '
            f"is unknown; the expected time assumes {prompts} prompts per step, the high end "
            f"{most}, the maximum (rollout.max_prompts_per_step)"
        )


# --- the other placements


def _compared(found: Planned, figures: Figures) -> Iterator[str]:
    speeds = ("sampling", "learning", "step")
    rows = [["placements compared", "slots", "tokens", "remat", "GiB", *speeds, "tokens/s", ""]]
    figures["compared"] = [_placement(one, found) for one in found.choice.compared]
    for row in figures["compared"]:
        in_host = row["per_layer_embeddings"] == "host"
        times = [""] * 4
        if found.plan.fits if row["chosen"] else row["fits"]:
            times = [f"~{row[f'{key}_s']:.2f}" for key in speeds]
            times.append(f"~{row['tokens_per_s']:,.0f}")
        name = row["name"] + (", embeddings in host memory" if in_host else "")
        sizes = [str(row[key]) for key in ("slots_per_shard", "micro_batch_tokens", "remat")]
        rows.append([name, *sizes, f"~{row['gib']:.2f}", *times, _verdict(row, found)])
    yield from table(rows)
    yield (
        "slots per shard, tokens per micro-batch, seconds of a step; times of links between chips "
        "are not measured"
    )
    best = figures["compared"][0]
    if best["fits"] and not best["chosen"] and best["set"]:
        yield f"settings for the fastest: {settings_text(best['set'])}"


def _placement(one: SizedPlan, found: Planned) -> Figures:
    chosen = found.estimated
    return {
        "name": one.name,
        "chosen": one is chosen,
        "fits": one.fits,
        "short": None if one.fits else shortage(found.case, one),
        **_sizes(one),
        "fullest": one.fullest,
        "gib": one.peak_bytes / GIB,
        "sampling_s": one.step.sampling.expected,
        "learning_s": one.step.learning.expected,
        "step_s": one.step.total.expected,
        "tokens_per_s": one.step.tokens_per_s,
        "gain": one.step.tokens_per_s / chosen.step.tokens_per_s - 1,
        "set": settings_to_set(found.case.config, one.config, _SETTINGS),
    }


def _verdict(row: Figures, found: Planned) -> str:
    """The last cell of a compared placement."""
    if row["chosen"] and found.plan.fits:
        return "chosen"
    if not row["fits"]:
        return f"does not fit: {row['short']}"
    if row["chosen"]:
        return "does not fit"  # by the compiler
    return f"~{row['gain']:+.0%}" if found.plan.fits else "fits"


def _verified(found: Planned, figures: Figures) -> Iterator[str]:
    verified, why = found.verified, found.why_estimated
    if verified is None:
        figures["verified"] = {"by_compiler": False, "why_not": why}
        if why is not None:
            yield f"not verified: {why}"
        return
    rows = [["program", "GiB in use", "ms", "of them modelled", "estimated ms", ""]]
    programs = Figures()
    for name, one in verified.programs.items():
        report, size = one.report, one.report.hbm_bytes
        programs[name] = asdict(report) | {
            "phase": one.phase,
            "gib": None if size is None else size / GIB,
            "estimated": {"source": "estimated", "seconds": one.estimated_s},
        }
        times = [f"={1e3 * s:.1f}" for s in (report.seconds, report.modelled_s) if report.seconds]
        cells = [_compiled_size(found, one), *(times or ["", ""]), f"~{1e3 * one.estimated_s:.1f}"]
        rows.append([name, *cells, "fits" if report.fits else "DOES NOT FIT"])
    figures["verified"] = {
        "by_compiler": True,
        **_COMPILER,
        "compilations": verified.compilations,
        "compile_s": verified.compile_s,
        "programs": programs,
        "searched": list(verified.searched),
    }
    yield (
        f"verified: {verified.compilations} programs compiled in {verified.compile_s:.0f} s, "
        "the others from the cache"
    )
    yield from table(rows)
    yield _COMPILED_TIMES
    yield from (f"searched: {line}" for line in verified.searched)


# --- the budget


def _budget(found: Planned, figures: Figures) -> Iterator[str]:
    figures["budget"] = None
    if not found.plan.fits:
        yield "budget not estimated: the plan does not fit"
        return
    forecast, outcomes = found.forecast, found.forecast.outcomes
    expected, price = outcomes["expected"], found.case.topology.chip.chip_hour_usd
    figures["budget"] = own = {
        **{key: value for key, value in asdict(forecast).items() if key != "first_step_s"},
        "steps_given": found.case.config.budget.steps,
        "enough": expected.enough,
        "enough_when_slow": outcomes["high"].enough,
        "steps": _ranged([outcomes[end].steps for end in SCENARIOS]),
        "wall_s": _ranged([outcomes[end].wall_s for end in SCENARIOS]),
        "chip_hour_usd": price,
        "first_step": {
            caches: {
                "seconds": _ranged([sum(parts[end].values()) for end in SCENARIOS]),
                "parts": {
                    name: _ranged([parts[end][name] for end in SCENARIOS])
                    for name in parts["expected"]
                },
            }
            for caches, parts in forecast.first_step_s.items()
        },
        "download_bytes_per_s": DOWNLOAD_BYTES_PER_S,
    }
    yield from _steps(found, own)
    yield "  " + ", ".join(
        f"{name} ~{_duration(seconds)} (~{seconds / expected.wall_s:.1%})"
        for name, seconds in expected.spent_s.items()
        if seconds
    )
    for caches, first in own["first_step"].items():
        parts = ", ".join(
            f"{name} ~{_duration(part['expected'])}"
            for name, part in first["parts"].items()
            if part["expected"]
        )
        seconds = _with_range(first["seconds"], _duration)
        yield f"  first optimizer step done with {caches} caches after {seconds}: {parts}"
    yield from _resources(forecast, price)


def _steps(found: Planned, figures: Figures) -> Iterator[str]:
    """The budget, the steps that it allows, and whether it is enough."""
    forecast, outcomes = found.forecast, found.forecast.outcomes
    given_s = forecast.time_given_s
    given = f"{figures['steps_given']} steps" if given_s is None else _duration(given_s)
    enough, slow = outcomes["expected"].enough, outcomes["high"]
    if not enough:
        least = _duration(outcomes["expected"].wall_s)
        yield f"budget {given}: TOO SMALL for a step; everything besides steps takes ~{least}"
    steps = _with_range(figures["steps"], "{:,}".format, " steps")
    yield f"budget {given}: {steps} in {_with_range(figures['wall_s'], _duration)}"
    if enough and not slow.enough and given_s is not None:
        more = ", more than the budget" if slow.wall_s > given_s else ""
        yield (
            "  at the high end of the ranges no step fits: everything besides steps takes "
            f"~{_duration(slow.wall_s)}{more}"
        )
    yield (
        f"  GRPO: ~{forecast.grpo_steps:,} steps, ~{forecast.samples:,} rollouts, "
        f"~{forecast.tokens / 1e6:,.1f} M trained tokens"
    )


def _resources(forecast: Forecast, price: float | None) -> Iterator[str]:
    """What else the run takes, and what the forecast assumes."""
    if forecast.download_gib:
        rate = f"{DOWNLOAD_BYTES_PER_S / 1e6:.0f} MB per second"
        yield f"  download of ~{forecast.download_gib:.2f} GiB, assumed: {rate}"
    read = ", ".join(f"{name} {count:,}" for name, count in forecast.evaluated.items())
    guessed = ", ".join(forecast.guessed)
    unknown = f"; {guessed}: assumed, the number of rows is unknown" if guessed else ""
    yield f"  prompts of the evaluations: {read}{unknown}"
    if forecast.cost_usd is not None:
        yield (
            f"  ~{forecast.cost_usd:,.2f} dollars at {price:.2f} per chip-hour (plan.chip_hour_usd)"
        )
    disk = ", ".join(f"{name} ~{size:.2f}" for name, size in forecast.disk_gib.items())
    yield f"  disk, GiB: {disk}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.2f} h"


# --- changes


def _changes(found: Planned, figures: Figures) -> Iterator[str]:
    """What would gain most, or what would make the plan fit."""
    fits, changes = found.plan.fits, found.changes
    figures["changes"] = [
        {
            "change": one.text,
            "settings": dict(one.settings),
            "tokens_per_s": one.plan.step.tokens_per_s,
            "gain": one.gain(found.estimated) if fits else None,
            "gib": one.plan.peak_bytes / GIB,
            "limit_gib": one.case.limit_bytes / GIB,
        }
        for one in changes
    ]
    by_settings = any(one.settings.keys() - {"plan.hbm_gib"} for one in changes)
    if not (fits or by_settings or found.verified is not None):
        yield "no setting that takes less memory makes it fit, nor do all of them together"
    if not changes:
        return
    title = "changes that gain most" if fits else "changes that make it fit"
    rows = [[f"{title}, each planned again", "tokens/s", "gain", "GiB", "of", "by"]]
    for row in figures["changes"]:
        gain = f"~{row['gain']:+.0%}" if fits else ""
        sizes = [f"~{row[key]:.2f}" for key in ("gib", "limit_gib")]
        by = "settings" if row["settings"] else "hardware"
        rows.append([row["change"], f"~{row['tokens_per_s']:,.0f}", gain, *sizes, by])
    yield from table(rows)
