"""The plan report: each section with its figures, for `launch.plan --json`, and its lines of text.

Figures are GiB, seconds, tokens per second, dollars and bytes. Each group of figures names its
`source`, which holds for nested groups without one of their own; the `range` of a time has its own.
In the text estimates are marked with `~`, figures of the TPU compiler with `=`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.data.models.model_shape import LOADING_COPIES
from pipeline.plan.cost_model.hardware import Chip, has_own_topology, topology_of
from pipeline.plan.cost_model.memory import PARTS
from pipeline.plan.cost_model.roofline import Seconds
from pipeline.plan.forecast import DOWNLOAD_BYTES_PER_S, SCENARIOS, Forecast
from pipeline.plan.lengths import Lengths
from pipeline.plan.search.fitting import PlacementChoice, PlanCase, SizedPlan, shortage
from pipeline.plan.search.placements import PLACEMENT_KEYS, settings_to_set
from pipeline.plan.search.suggestions import Change, settings_text
from pipeline.plan.topology import GIB
from pipeline.plan.verify import Verified

Figures = dict[str, Any]
"""A JSON object."""

ESTIMATED, COMPILER = "estimated", "compiler"
"""Values of `source`."""
SOURCES = {
    ESTIMATED: "by the planner's model; times have a range until they are measured",
    COMPILER: "by the TPU compiler, whose times are a model, too",
}
_MARK = {ESTIMATED: "~", COMPILER: "="}
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


def plan_report(found: Planned) -> tuple[Figures, list[str]]:
    """All figures of a plan, and all lines, with a blank line between sections.

    Each section returns its figures and adds its lines.
    """
    figures, lines = Figures(), list[str]()
    for section in (_head, _chosen, _memory, _step, _compared, _verified, _budget, _changes):
        own = list[str]()
        figures |= section(found, own)
        lines += ["", *own] if own and lines else own
    return figures, lines


def _head(found: Planned, lines: list[str]) -> Figures:
    case, topology, chip = found.case, found.case.topology, found.case.topology.chip
    rollout, lengths = case.config.rollout, case.lengths
    plan_only = topology.why_not_trained(found.plan.config.plan)
    figures = {
        "name": case.config.run.name,
        "sources": SOURCES,
        "topology": {
            "name": topology.name,
            "chip": chip.name,
            "chips": topology.chips,
            "hosts": topology.hosts,
            "hbm_gib": chip.hbm_gib,
            "speeds": chip.speeds,
            "published_speeds": chip.published.speeds,
            "plan_only": plan_only,
        },
        "lengths": {
            "source": ESTIMATED,
            **asdict(lengths),
            "max_prompt": rollout.max_prompt_tokens,
            "max_completion": rollout.max_new_tokens,
        },
    }
    hosts = f", {topology.hosts} hosts" if topology.hosts > 1 else ""
    lines.append(
        f"plan of {case.config.run.name} for {topology.name}: {topology.chips} x {chip.name} of "
        f"{chip.hbm_gib:.2f} GiB{hosts}"
    )
    if plan_only:
        lines.append(f"plan only: {plan_only}")
    lines.append(_MARKS if chip.measured else f"{_MARKS}; nothing is measured")
    if chip.measured:
        lines.append(
            f"speeds of a chip as measured on this host at {chip.measured}: {_speeds(chip)}; "
            f"published: {_speeds(chip.published)}"
        )
    lines.append(
        f"assumed: prompts of ~{lengths.prompt:.0f} tokens (at most {rollout.max_prompt_tokens}), "
        f"completions of ~{lengths.completion:.0f} (at most {rollout.max_new_tokens})"
    )
    return figures


def _speeds(chip: Chip) -> str:
    return (
        f"{chip.bytes_per_s / 1e9:,.0f} GB/s, {chip.bf16_flops / 1e12:,.0f} TFLOP/s, "
        f"in 8 bits {chip.int8_flops / 1e12:,.0f} TOP/s"
    )


# --- the chosen plan


def _chosen(found: Planned, lines: list[str]) -> Figures:
    case, plan = found.case, found.plan
    planned, config, sizes = case.config.plan.planned_sizes, plan.config, _sizes(plan)
    short = None if plan.fits else _short(found)
    host = case.shape.host_bytes(config.model.dtype) if config.plan.embeddings_in_host else 0
    settings = settings_to_set(case.config, config, _SETTINGS) if plan.fits else {}
    is_auto = _is_of_the_run(found)
    figures = {
        "name": plan.name,
        "configured": plan.configured,
        "planned_sizes": list(planned),
        "fits": plan.fits,
        "short": short,
        "reserve_gib": (case.topology.chip.hbm_gib * GIB - case.limit_bytes) / GIB,
        "limit_gib": case.limit_bytes / GIB,
        **sizes,
        "host_gib_per_chip": host / GIB,
        "auto": is_auto,
        "set": settings,
    }
    which = "sizes" if len(planned) != 1 else f"plan.{planned[0]}"
    lines.append(f"chosen: {plan.name}; {which} {'planned' if planned else 'as given'}")
    if short is not None:
        lines.append(f"  DOES NOT FIT: {short}")
    lines.append(
        f"  slots {sizes['slots']} ({sizes['slots_per_shard']} per shard), segments of "
        f"{sizes['segment_steps']}, prefill {sizes['prefill_tokens']}"
    )
    lines.append(
        f"  micro-batches of {sizes['micro_batch_tokens']} tokens ({sizes['rows_per_shard']} x "
        f"{sizes['row_tokens']} per shard), remat {sizes['remat']}"
    )
    if host:
        lines.append(
            f"  per-layer embeddings in host memory: {host / GIB:.2f} GiB for each chip, and "
            f"{LOADING_COPIES} times as much again while they are loaded"
        )
    if is_auto and plan.fits:
        lines.append(f'  a run with plan.placement = "auto" has: {settings_text(settings)}')
    elif settings:
        lines.append(f"  settings for it: {settings_text(settings)}")
    return {"plan": figures}


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
        f"{name} takes {_compiled_size(found, one.report.hbm_bytes)} GiB of the {limit:.2f} that "
        "may be used"
        for name, one in found.verified.programs.items()
        if not one.report.fits
    )


def _compiled_size(found: Planned, size: int | None) -> str:
    """Text of a program's compiled size; None: larger than the memory, by an unknown amount."""
    if size is None:
        return f">{found.case.topology.chip.hbm_gib:.2f}"
    return f"={size / GIB:.2f}"


# --- memory and time


def _memory(found: Planned, lines: list[str]) -> Figures:
    case, memory = found.case, found.plan.memory
    figures = {
        phase: {
            "source": ESTIMATED,
            "parts_gib": {name: parts[name] / GIB for name in PARTS},
            "gib": parts.total() / GIB,
        }
        for phase, parts in memory.items()
    }
    unit, size = ("GiB", GIB) if found.plan.peak_bytes >= GIB else ("MiB", GIB // 1024)
    limit, reserve = case.limit_bytes, case.topology.chip.hbm_gib * GIB - case.limit_bytes
    rows = [["", *(name.replace("kv_", "KV ") for name in PARTS), "total"]]
    for phase, parts in memory.items():
        amounts = [*(parts[name] for name in PARTS), parts.total()]
        rows.append([phase, *(f"~{amount / size:.2f}" for amount in amounts)])
    lines.append(
        f"{unit} per chip; a plan may use {limit / size:,.2f}, with {reserve / size:,.2f} in "
        "reserve"
    )
    lines += table(rows)
    return {"memory": figures}


def _ranged(seconds: Seconds, *, source: str = ESTIMATED) -> Figures:
    """A time with its range; the range is always estimated."""
    return _around((seconds.low, seconds.expected, seconds.high), source=source)


def _around(by_scenario: Sequence[float], *, source: str = ESTIMATED) -> Figures:
    """The expected value with its range, from values in the order of `SCENARIOS`.

    With a time budget a slower scenario may end earlier, when the time left is too short for a
    step.
    """
    ends = {"source": ESTIMATED, "low": min(by_scenario), "high": max(by_scenario)}
    return {"source": source, "expected": by_scenario[SCENARIOS.index("expected")], "range": ends}


def _marked(ranged: Figures, show: Callable[[float], str]) -> tuple[str, str, str]:
    """Texts of the expected value and of the low and high ends."""
    ends = ranged["range"]
    expected = f"{_MARK[ranged['source']]}{show(ranged['expected'])}"
    return expected, f"~{show(ends['low'])}", f"~{show(ends['high'])}"


def _with_range(ranged: Figures, show: Callable[[float], str], unit: str = "") -> str:
    """Text of a value with its range, if the range is not empty."""
    expected, low, high = _marked(ranged, show)
    ends = ranged["range"]
    return f"{expected}{unit}" + (f" ({low} to {high})" if ends["low"] < ends["high"] else "")


def _step(found: Planned, lines: list[str]) -> Figures:
    step, rollout = found.plan.step, found.case.config.rollout
    programs = {} if found.verified is None else found.verified.programs
    compiled = {one.phase for one in programs.values() if one.report.seconds > 0}
    seconds = {
        phase: {
            **_ranged(time, source=COMPILER if phase in compiled else ESTIMATED),
            "regime": time.regime,
        }
        for phase, time in step.seconds.items()
    }
    prompts, total = rollout.prompts_per_step, _ranged(step.total)
    most = rollout.max_prompts_per_step or prompts
    figures = {
        "source": ESTIMATED,
        **asdict(step),
        "seconds": seconds,
        "total_s": total,
        "dynamic_sampling": rollout.dynamic_sampling,
        "prompts": prompts,
        "most_prompts": most,
        "tokens_per_s": step.tokens_per_s,
    }
    if not found.plan.fits:
        return {"step": figures}  # a plan that does not fit has no step
    rows = [["seconds of a step", "expected", "from", "to", "bound by"]]
    rows += [
        [phase, *_marked(time, "{:.2f}".format), _REGIMES[time["regime"]]]
        for phase, time in seconds.items()
    ]
    rows.append(["total", *_marked(total, "{:.2f}".format), ""])
    lines += table(rows)
    lines.append(
        f"~{step.tokens_per_s:,.0f} trained tokens per second; ~{step.slots_useful:.0%} of the "
        f"slots' decode steps generate a token, ~{step.padding:.0%} of the learner's positions "
        "are padding"
    )
    if most > prompts:
        lines.append(
            f'dynamic sampling ("{rollout.dynamic_sampling}"): the number of groups without signal '
            f"is unknown; the expected time assumes {prompts} prompts per step, the high end "
            f"{most}, the maximum (rollout.max_prompts_per_step)"
        )
    return {"step": figures}


# --- the other placements


def _compared(found: Planned, lines: list[str]) -> Figures:
    speeds = ("sampling", "learning", "step")
    rows = [["placements compared", "slots", "tokens", "remat", "GiB", *speeds, "tokens/s", ""]]
    figures = []
    for one in found.choice.compared:
        row = _placement(one, found)
        figures.append(row)
        name = one.name
        if one.config.plan.embeddings_in_host:
            name += ", embeddings in host memory"
        times = [""] * 4
        if found.plan.fits if row["chosen"] else one.fits:
            times = [f"~{row[f'{key}_s']:.2f}" for key in speeds]
            times.append(f"~{row['tokens_per_s']:,.0f}")
        sizes = [str(row[key]) for key in ("slots_per_shard", "micro_batch_tokens", "remat")]
        rows.append([name, *sizes, f"~{row['gib']:.2f}", *times, _verdict(row, found)])
    lines += table(rows)
    lines.append(
        "slots per shard, tokens per micro-batch, seconds of a step; times of links between chips "
        "are not measured"
    )
    best = figures[0]
    if best["fits"] and not best["chosen"] and best["set"]:
        lines.append(f"settings for the fastest: {settings_text(best['set'])}")
    return {"compared": figures}


def _placement(one: SizedPlan, found: Planned) -> Figures:
    chosen = found.estimated
    return {
        "source": ESTIMATED,
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


def _verified(found: Planned, lines: list[str]) -> Figures:
    verified, why = found.verified, found.why_estimated
    if verified is None:
        lines += [] if why is None else [f"not verified: {why}"]
        return {"verified": {"by_compiler": False, "why_not": why}}
    programs = Figures()
    rows = [["program", "GiB in use", "ms", "of them modelled", "estimated ms", ""]]
    for name, one in verified.programs.items():
        report = one.report
        programs[name] = {
            "phase": one.phase,
            **asdict(report),
            "gib": None if report.hbm_bytes is None else report.hbm_bytes / GIB,
            "estimated": {"source": ESTIMATED, "seconds": one.estimated_s},
        }
        times = ["", ""]
        if report.seconds > 0:
            times = [f"={1e3 * seconds:.1f}" for seconds in (report.seconds, report.modelled_s)]
        cells = [_compiled_size(found, report.hbm_bytes), *times, f"~{1e3 * one.estimated_s:.1f}"]
        rows.append([name, *cells, "fits" if report.fits else "DOES NOT FIT"])
    figures = {
        "by_compiler": True,
        "source": COMPILER,
        "compilations": verified.compilations,
        "compile_s": verified.compile_s,
        "programs": programs,
        "searched": list(verified.searched),
    }
    lines.append(
        f"verified: {verified.compilations} programs compiled in {verified.compile_s:.0f} s, "
        "the others from the cache"
    )
    lines += table(rows)
    lines.append(_COMPILED_TIMES)
    lines += (f"searched: {line}" for line in verified.searched)
    return {"verified": figures}


# --- the budget


def _budget(found: Planned, lines: list[str]) -> Figures:
    if not found.plan.fits:
        lines.append("budget not estimated: the plan does not fit")
        return {"budget": None}
    forecast, outcomes = found.forecast, found.forecast.outcomes
    expected, slow = outcomes["expected"], outcomes["high"]
    price = found.case.topology.chip.chip_hour_usd
    first_step = {
        caches: {
            "seconds": _around([sum(parts[end].values()) for end in SCENARIOS]),
            "parts": {
                name: _around([parts[end][name] for end in SCENARIOS]) for name in parts["expected"]
            },
        }
        for caches, parts in forecast.first_step_s.items()
    }
    figures = {
        "source": ESTIMATED,
        **{key: value for key, value in asdict(forecast).items() if key != "first_step_s"},
        "steps_given": found.case.config.budget.steps,
        "enough": expected.enough,
        "enough_when_slow": slow.enough,
        "steps": _around([outcomes[end].steps for end in SCENARIOS]),
        "wall_s": _around([outcomes[end].wall_s for end in SCENARIOS]),
        "chip_hour_usd": price,
        "first_step": first_step,
        "download_bytes_per_s": DOWNLOAD_BYTES_PER_S,
        "compile_s": _ranged(forecast.compile_s),
        "sizing_s": _ranged(forecast.sizing_s),
    }
    lines += _steps(found, figures)
    lines.append(
        f"  GRPO: ~{forecast.grpo_steps:,} steps, ~{forecast.samples:,} rollouts, "
        f"~{forecast.tokens / 1e6:,.1f} M trained tokens"
    )
    spent = ", ".join(
        f"{name} ~{_duration(seconds)} (~{seconds / expected.wall_s:.1%})"
        for name, seconds in expected.spent_s.items()
        if seconds
    )
    lines.append(f"  {spent}")
    for caches, first in first_step.items():
        seconds = _with_range(first["seconds"], _duration)
        parts = ", ".join(
            f"{name} ~{_duration(part['expected'])}"
            for name, part in first["parts"].items()
            if part["expected"]
        )
        lines.append(f"  first optimizer step done with {caches} caches after {seconds}: {parts}")
    if forecast.download_gib:
        rate = f"{DOWNLOAD_BYTES_PER_S / 1e6:.0f} MB per second"
        lines.append(f"  download of ~{forecast.download_gib:.2f} GiB, assumed: {rate}")
    compiling = _with_range(figures["compile_s"], _duration)
    lines.append(f"  {forecast.programs} programs, {compiling} to compile all")
    if expected.spent_s["sizing"]:
        sizing = _with_range(figures["sizing_s"], _duration)
        lines.append(f"  timing planned, half and double sizes takes {sizing}, without compilation")
    read = ", ".join(f"{name} {count:,}" for name, count in forecast.evaluated.items())
    guessed = ", ".join(forecast.guessed)
    unknown = f"; {guessed}: assumed, the number of rows is unknown" if guessed else ""
    lines.append(f"  prompts of the evaluations: {read}{unknown}")
    if forecast.cost_usd is not None:
        lines.append(
            f"  ~{forecast.cost_usd:,.2f} dollars at {price:.2f} per chip-hour (plan.chip_hour_usd)"
        )
    disk = ", ".join(f"{name} ~{size:.2f}" for name, size in forecast.disk_gib.items())
    lines.append(f"  disk, GiB: {disk}")
    return {"budget": figures}


def _steps(found: Planned, figures: Figures) -> Iterator[str]:
    """The budget, the steps that it allows, and whether it is enough."""
    outcomes, given_s = found.forecast.outcomes, found.forecast.time_given_s
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


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.2f} h"


# --- changes


def _changes(found: Planned, lines: list[str]) -> Figures:
    """What would gain most, or what would make the plan fit."""
    fits, changes = found.plan.fits, found.changes
    figures = [
        {
            "source": ESTIMATED,
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
        lines.append("no setting that takes less memory makes it fit, nor do all of them together")
    if figures:
        title = "changes that gain most" if fits else "changes that make it fit"
        rows = [[f"{title}, each planned again", "tokens/s", "gain", "GiB", "of", "by"]]
        for one, row in zip(changes, figures, strict=True):
            gain = f"~{row['gain']:+.0%}" if fits else ""
            sizes = [f"~{row[key]:.2f}" for key in ("gib", "limit_gib")]
            by = "settings" if one.settings else "hardware"
            rows.append([one.text, f"~{row['tokens_per_s']:,.0f}", gain, *sizes, by])
        lines += table(rows)
    return {"changes": figures}


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Aligned columns; all but the first and the last are right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *middle, last = row
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True)]
        yield "  ".join([*cells, last]).rstrip()
