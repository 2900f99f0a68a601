"""The plan report as JSON: content of `launch.plan --json` and of the text in `plan_lines`.

Each group of figures names its `source`, which holds for nested groups without one of their own;
the `range` of a time has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.plan.cost_model.hardware import has_own_topology, topology_of
from pipeline.plan.cost_model.memory import PARTS
from pipeline.plan.cost_model.roofline import Seconds
from pipeline.plan.forecast import DOWNLOAD_BYTES_PER_S, SCENARIOS, Forecast
from pipeline.plan.lengths import Lengths
from pipeline.plan.search.fitting import PlacementChoice, PlanCase, SizedPlan, shortage
from pipeline.plan.search.placements import PLACEMENT_KEYS, placed_as
from pipeline.plan.search.suggestions import Change
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

REGIMES = {
    "compute": "arithmetic",
    "bandwidth": "memory bandwidth",
    "links": "links between chips",
    "latency": "latency of small steps",
}
"""Text of each `Regime`."""

_SIZES = (
    *("slots", "segment_steps", "prefill_tokens", "micro_batch_tokens", "remat"),
    "per_layer_embeddings",
)


@dataclass(frozen=True)
class PlanReport:
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


def plan_figures(found: PlanReport) -> Figures:
    """All figures of a plan: GiB, seconds, tokens per second, dollars, bytes."""
    case, rollout = found.case, found.case.config.rollout
    topology = case.topology
    return {
        "name": case.config.run.name,
        "sources": SOURCES,
        "topology": {
            "name": topology.name,
            "chip": topology.chip.name,
            "chips": topology.chips,
            "hosts": topology.hosts,
            "hbm_gib": topology.chip.hbm_gib,
            "speeds": topology.chip.speeds,
            "published_speeds": topology.chip.published.speeds,
            "plan_only": topology.why_not_trained(found.plan.config.plan),
        },
        "lengths": {
            "source": ESTIMATED,
            **asdict(case.lengths),
            "max_prompt": rollout.max_prompt_tokens,
            "max_completion": rollout.max_new_tokens,
        },
        "verified": _verified(found),
        "plan": _plan(found),
        "memory": {
            phase: {
                "source": ESTIMATED,
                "parts_gib": {name: memory[name] / GIB for name in PARTS},
                "gib": memory.total() / GIB,
            }
            for phase, memory in found.plan.memory.items()
        },
        "step": _step(found),
        "compared": [_compared(one, found) for one in found.choice.compared],
        "budget": _budget(found) if found.plan.fits else None,
        "changes": [_change(one, found) for one in found.changes],
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
                **asdict(one.report),
                "gib": _gib(one.report.hbm_bytes),
                "estimated": {"source": ESTIMATED, "seconds": one.estimated_s},
            }
            for name, one in verified.programs.items()
        },
        "searched": list(verified.searched),
    }


def _plan(found: PlanReport) -> Figures:
    case, plan = found.case, found.plan
    return {
        "name": plan.name,
        "configured": plan.configured,
        "planned_sizes": list(case.config.plan.planned_sizes),
        "fits": plan.fits,
        "short": None if plan.fits else _short(found),
        "reserve_gib": (case.topology.chip.hbm_gib * GIB - case.limit_bytes) / GIB,
        "limit_gib": case.limit_bytes / GIB,
        **_sizes(plan),
        "host_gib_per_chip": _host_gib(case, plan),
        "auto": _is_of_the_run(found),
        "set": _settings_to_set(case, plan) if plan.fits else {},
    }


def _is_of_the_run(found: PlanReport) -> bool:
    """Whether a run takes this plan by itself: its own chips and lengths, and no compiler."""
    case, config = found.case, found.case.config
    return (
        config.plan.searches_placement
        and has_own_topology(config, case.topology)
        and case.topology.chip.name == topology_of(config, None).chip.name
        and case.lengths == Lengths.expected(config)
        and found.plan.config.plan == found.estimated.config.plan
    )


def _settings(plan: SizedPlan) -> Figures:
    return {key: getattr(plan.config.plan, key) for key in (*PLACEMENT_KEYS, *_SIZES)}


def _sizes(plan: SizedPlan) -> Figures:
    config = plan.config
    return {
        **_settings(plan),
        "slots_per_shard": config.slots // config.plan.sampler_shards,
        "rows_per_shard": config.micro_batch_rows // config.plan.learner_shards,
        "row_tokens": config.row_tokens,
    }


def _host_gib(case: PlanCase, plan: SizedPlan) -> float:
    """Host memory of the per-layer embeddings, for each chip."""
    config = plan.config
    kept = case.shape.host_bytes(config.model.dtype) if config.plan.embeddings_in_host else 0
    return kept / GIB


def _settings_to_set(case: PlanCase, plan: SizedPlan) -> Figures:
    """Settings by dotted key that turn the configuration into this plan.

    Sizes that a run plans itself are left out; given ones are adapted to the placement.
    """
    given, values = case.config, _settings(plan)
    placed = placed_as(given, plan.config)
    values |= {key: getattr(placed.plan, key) for key in ("slots", "micro_batch_tokens")}
    changed = {
        f"plan.{key}": value for key, value in values.items() if value != getattr(given.plan, key)
    }
    if placed.rollout.ahead != given.rollout.ahead:
        changed["rollout.ahead"] = placed.rollout.ahead
        changed["learner.importance_cap"] = placed.learner.importance_cap
    return changed


def _short(found: PlanReport) -> str:
    if found.verified is None:
        return shortage(found.case, found.plan)
    limit, there = found.case.compiled_limit_bytes / GIB, found.case.topology.chip.hbm_gib
    return "; ".join(
        f"{name} takes {compiled_size(_gib(one.report.hbm_bytes), there)} GiB of the {limit:.2f} "
        "that may be used"
        for name, one in found.verified.programs.items()
        if not one.report.fits
    )


def compiled_size(gib: float | None, there: float) -> str:
    """Text of a program's compiled size; None: larger than the memory, by an unknown amount."""
    return f">{there:.2f}" if gib is None else f"={gib:.2f}"


def _gib(size: int | None) -> float | None:
    return None if size is None else size / GIB


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


def _step(found: PlanReport) -> Figures:
    step, rollout = found.plan.step, found.case.config.rollout
    programs = {} if found.verified is None else found.verified.programs
    compiled = {one.phase for one in programs.values() if one.report.seconds > 0}
    return {
        "source": ESTIMATED,
        **asdict(step),
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
        "tokens_per_s": step.tokens_per_s,
    }


def _compared(one: SizedPlan, found: PlanReport) -> Figures:
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
        "set": _settings_to_set(found.case, one),
    }


def _budget(found: PlanReport) -> Figures:
    forecast, outcomes = found.forecast, found.forecast.outcomes
    return {
        "source": ESTIMATED,
        **{key: value for key, value in asdict(forecast).items() if key != "first_step_s"},
        "steps_given": found.case.config.budget.steps,
        "enough": outcomes["expected"].enough,
        "enough_when_slow": outcomes["high"].enough,
        "steps": _around([outcomes[scenario].steps for scenario in SCENARIOS]),
        "wall_s": _around([outcomes[scenario].wall_s for scenario in SCENARIOS]),
        "chip_hour_usd": found.case.topology.chip.chip_hour_usd,
        "first_step": {
            caches: {
                "seconds": _around([sum(parts[one].values()) for one in SCENARIOS]),
                "parts": {
                    name: _around([parts[one][name] for one in SCENARIOS])
                    for name in parts["expected"]
                },
            }
            for caches, parts in forecast.first_step_s.items()
        },
        "download_bytes_per_s": DOWNLOAD_BYTES_PER_S,
        "compile_s": _ranged(forecast.compile_s),
        "sizing_s": _ranged(forecast.sizing_s),
    }


def _change(one: Change, found: PlanReport) -> Figures:
    return {
        "source": ESTIMATED,
        "change": one.text,
        "settings": dict(one.settings),
        "tokens_per_s": one.plan.step.tokens_per_s,
        "gain": one.gain(found.estimated) if found.plan.fits else None,
        "gib": one.plan.peak_bytes / GIB,
        "limit_gib": one.case.limit_bytes / GIB,
    }
