"""A plan as figures: the one object that `--json` writes and that the lines are made of.

Each group of figures says in `source` whose they are; it holds for all in it but for groups in it
that have one of their own, as the `range` of a time has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.contracts.topology import GIB
from pipeline.plan.cost_model.memory import PARTS, PhaseMemory
from pipeline.plan.cost_model.roofline import Seconds
from pipeline.plan.cost_model.step import PHASES
from pipeline.plan.forecast import SCENARIOS, Forecast
from pipeline.plan.search.fitting import PlacementChoice, PlanCase, SizedPlan, shortage
from pipeline.plan.search.placements import PLACEMENT_KEYS, with_placement
from pipeline.plan.search.suggestions import Gain, Remedy
from pipeline.plan.verify import CompilerCheck, Verified

Figures = dict[str, Any]
"""JSON."""

ESTIMATED, COMPILER = "estimated", "compiler"
"""Values of `source`."""
SOURCES = {
    ESTIMATED: "by the planner's own model; times have a range until they are measured",
    COMPILER: "by the TPU compiler, whose seconds are a model of its own",
}

REGIMES = {
    "compute": "arithmetic",
    "bandwidth": "memory bandwidth",
    "links": "links between chips",
    "latency": "many small steps",
}
"""Regimes in words."""

_SIZES = ("slots", "segment_steps", "prefill_tokens", "micro_batch_tokens", "remat")


@dataclass(frozen=True)
class PlanReport:
    """Everything that was found.

    Attributes:
        case: what was planned.
        choice: placements compared.
        forecast: what becomes of the budget with the plan.
        gains: what would have to change to gain most; nothing where it does not fit.
        remedies: what would have to change for it to fit; nothing where it does.
        verified: what the compiler says; None: it was not asked.
        why_estimated: why it was not, where somebody wanted it.
    """

    case: PlanCase
    choice: PlacementChoice
    forecast: Forecast
    gains: Sequence[Gain]
    remedies: Sequence[Remedy] = ()
    verified: Verified | None = None
    why_estimated: str | None = None

    @property
    def plan(self) -> SizedPlan:
        """The plan, verified if it was."""
        return self.choice.chosen if self.verified is None else self.verified.plan


def plan_figures(found: PlanReport) -> Figures:
    """All figures of a plan: GiB, seconds, tokens a second, dollars, bytes."""
    case = found.case
    return {
        "name": case.config.run.name,
        "sources": SOURCES,
        "topology": _topology(case),
        "lengths": {
            "source": ESTIMATED,
            "prompt": case.lengths.prompt,
            "completion": case.lengths.completion,
            "max_prompt": case.config.rollout.max_prompt_tokens,
            "max_completion": case.config.rollout.max_new_tokens,
        },
        "verified": _verified(found),
        "plan": _plan(found),
        "memory": _memory(found),
        "step": _step(found),
        "compared": [_compared(case, one, found) for one in found.choice.compared],
        "budget": _budget(found.case, found.forecast) if found.plan.fits else None,
        "gains": [_suggested(one) for one in found.gains],
        "remedies": [_suggested(one) for one in found.remedies],
    }


def _suggested(one: Gain | Remedy) -> Figures:
    return {"source": ESTIMATED, **asdict(one), "is_setting": bool(one.settings)}


def _topology(case: PlanCase) -> Figures:
    topology = case.topology
    return {
        "name": topology.name,
        "chip": topology.chip.name,
        "chips": topology.chips,
        "hosts": topology.hosts,
        "hbm_gib": topology.chip.hbm_gib,
        "plan_only": topology.why_not_trained,
    }


def _verified(found: PlanReport) -> Figures:
    verified = found.verified
    if verified is None:
        return {"by_compiler": False, "why_not": found.why_estimated}
    return {
        "by_compiler": True,
        "source": COMPILER,
        "compilations": verified.compilations,
        "compile_s": verified.compile_s,
        "programs": {
            name: {
                "phase": one.phase,
                "fits": one.fits,
                "gib": _gib(one.hbm_bytes),
                "seconds": one.report.seconds,
                "estimated": {"source": ESTIMATED, "seconds": one.estimated_s},
                "compile_s": one.report.compile_s,
                "cached": one.report.cached,
            }
            for name, one in verified.programs.items()
        },
        "searched": list(verified.searched),
        "larger": [
            {
                "what": one.what,
                "estimated": {"source": ESTIMATED, "gain": one.gain},
                "gib": _gib(one.hbm_bytes),
                "fits": one.fits,
            }
            for one in verified.larger
        ],
    }


def _plan(found: PlanReport) -> Figures:
    case, plan = found.case, found.plan
    config, given = plan.config, case.config.plan
    rollout, shape = config.rollout, case.shape
    slots = config.slots // config.plan.sampler_shards
    values = {key: getattr(config.plan, key) for key in (*PLACEMENT_KEYS, *_SIZES)}
    return {
        "name": plan.name,
        "configured": plan.configured,
        "fixed": given.fixed,
        "fits": plan.fits,
        "short": None if plan.fits else _short(found),
        "reserve_gib": (case.topology.chip.hbm_gib * GIB - case.limit_bytes) / GIB,
        "limit_gib": case.limit_bytes / GIB,
        **values,
        "slots_per_shard": slots,
        "rows_per_shard": config.micro_batch_rows // config.plan.learner_shards,
        "row_tokens": config.row_tokens,
        "layers": {"local": shape.local_layers, "global": shape.global_layers},
        "cache_positions": {
            "local": min(shape.window, rollout.max_tokens),
            "global": rollout.max_tokens,
        },
        "set": _to_set(case, plan) if plan.fits else {},
    }


def _short(found: PlanReport) -> str:
    if found.verified is None:
        return shortage(found.case, found.plan)
    most, there = found.case.compiled_limit_bytes / GIB, found.case.topology.chip.hbm_gib
    return "; ".join(
        f"{name} takes {compiled_size(_gib(one.hbm_bytes), there)} GiB of the {most:.2f} that a "
        "program may hold"
        for name, one in found.verified.programs.items()
        if not one.fits
    )


def compiled_size(gib: float | None, there: float) -> str:
    """What the compiler says that a program takes; None: only that it is more than there is."""
    return f">{there:.2f}" if gib is None else f"={gib:.2f}"


def _gib(size: int | None) -> float | None:
    return None if size is None else size / GIB


def _to_set(case: PlanCase, plan: SizedPlan) -> Figures:
    """Settings of [plan] by which the configuration becomes this plan.

    What a run plans by itself is left out; what bounds that is as it would be there.
    """
    given = case.config.plan
    values = {key: getattr(plan.config.plan, key) for key in (*PLACEMENT_KEYS, *_SIZES)}
    if not given.fixed:
        bounds = with_placement(case.config, {key: values[key] for key in PLACEMENT_KEYS}).plan
        values |= {key: getattr(bounds, key) for key in ("slots", "micro_batch_tokens")}
    return {key: value for key, value in values.items() if value != getattr(given, key)}


def _memory(found: PlanReport) -> Figures:
    programs = [] if found.verified is None else list(found.verified.programs.values())
    return {
        phase: _phase(memory, [one for one in programs if phase in {one.phase, "colocated"}])
        for phase, memory in found.plan.memory.items()
    }


def _phase(memory: PhaseMemory, programs: Sequence[CompilerCheck]) -> Figures:
    sizes = [one.hbm_bytes for one in programs]
    return {
        "source": ESTIMATED,
        "parts_gib": {name: memory.parts.get(name, 0) / GIB for name in PARTS},
        "gib": memory.total / GIB,
        "compiled": {"source": COMPILER, "gib": _gib(_largest(sizes))} if programs else None,
    }


def _largest(sizes: Sequence[int | None]) -> int | None:
    """None: there is none, or of one it is only known that it is too large."""
    known = [size for size in sizes if size is not None]
    return max(known) if known and len(known) == len(sizes) else None


def _ranged(seconds: Seconds, *, source: str = ESTIMATED) -> Figures:
    """A time; whoever says what is expected, its range is estimated."""
    return _around((seconds.low, seconds.expected, seconds.high), source=source)


def _around(by_scenario: Sequence[float], *, source: str = ESTIMATED) -> Figures:
    """What is expected, and how far it may be from that: the figures of `SCENARIOS` in their order.

    With a budget of time a slower pace may come to an earlier end: what is left is too little for
    another step.
    """
    ends = {"source": ESTIMATED, "low": min(by_scenario), "high": max(by_scenario)}
    return {"source": source, "expected": by_scenario[SCENARIOS.index("expected")], "range": ends}


def _step(found: PlanReport) -> Figures:
    step, rollout = found.plan.step, found.case.config.rollout
    programs = [] if found.verified is None else found.verified.programs.values()
    compiled = {one.phase for one in programs if one.report.seconds > 0}
    return {
        "source": ESTIMATED,
        "seconds": {
            phase: {
                **_ranged(seconds, source=COMPILER if phase in compiled else ESTIMATED),
                "regime": seconds.regime,
            }
            for phase, seconds in step.seconds.items()
        },
        "total_s": _ranged(step.total),
        "dynamic_sampling": rollout.dynamic_sampling,
        "prompts": rollout.prompts_per_step,
        "most_prompts": rollout.max_prompts_per_step or rollout.prompts_per_step,
        "rollouts": step.rollouts,
        "tokens": step.tokens,
        "tokens_per_s": step.tokens_per_s,
        "slots_useful": step.slots_useful,
        "knee_slots": step.knee,
        "padding": step.padding,
    }


def _compared(case: PlanCase, one: SizedPlan, found: PlanReport) -> Figures:
    config = one.config
    chosen = next(other for other in found.choice.compared if other.name == found.plan.name)
    full = one.fullest
    return {
        "source": ESTIMATED,
        "name": one.name,
        "chosen": one is chosen,
        "same_run": one.same_run,
        "slots_per_shard": config.slots // config.plan.sampler_shards,
        "micro_batch_tokens": config.plan.micro_batch_tokens,
        "remat": config.plan.remat,
        "fits": one.fits,
        "fullest": full.phase,
        "gib": full.total / GIB,
        "step_s": one.step.total.expected,
        "tokens_per_s": one.step.tokens_per_s,
        "gain": one.step.tokens_per_s / chosen.step.tokens_per_s - 1,
        "why": _why(case, one, chosen),
        "set": _to_set(case, one),
    }


def _why(case: PlanCase, one: SizedPlan, chosen: SizedPlan) -> str:
    """What speaks for or against it, beside what was chosen."""
    if not one.fits:
        return shortage(case, one).partition(": ")[2]
    if one is chosen:
        return "chosen"
    if one.step.ahead and not chosen.step.ahead:
        return "draws the next step's rollouts while it learns (rollout.ahead)"
    spent = {
        phase: one.step.seconds[phase].expected - chosen.step.seconds[phase].expected
        for phase in PHASES
    }
    total = one.step.total.expected - chosen.step.total.expected
    phase = max(spent, key=lambda name: spent[name] if total > 0 else -spent[name])
    if abs(total) < 1e-9:
        return "the same"
    word = "longer" if spent[phase] > 0 else "shorter"
    regime = one.step.seconds[phase].regime
    return f"{phase} ~{abs(spent[phase]):.2f} s {word}, bound by {REGIMES[regime]}"


def _budget(case: PlanCase, forecast: Forecast) -> Figures:
    outcomes = forecast.outcomes
    return {
        "source": ESTIMATED,
        "steps_given": case.config.budget.steps,
        "time_given_s": forecast.time_s,
        "enough": outcomes["expected"].enough,
        "enough_when_slow": outcomes["high"].enough,
        "steps": _around([outcomes[scenario].steps for scenario in SCENARIOS]),
        "wall_s": _around([outcomes[scenario].wall_s for scenario in SCENARIOS]),
        "outcomes": {scenario: asdict(outcomes[scenario]) for scenario in SCENARIOS},
        "grpo_steps": forecast.grpo_steps,
        "samples": forecast.samples,
        "tokens": forecast.tokens,
        "cost_usd": forecast.cost_usd,
        "chip_hour_usd": case.topology.chip.chip_hour_usd,
        "disk_gib": {name: size / GIB for name, size in forecast.disk_bytes.items()},
        "programs": forecast.programs,
        "compile_s": _ranged(forecast.compile),
        "calibration_s": _ranged(forecast.calibration),
        "calibration_share_s": forecast.share_s,
        "evaluated": dict(forecast.rows),
        "guessed": list(forecast.guessed),
    }
