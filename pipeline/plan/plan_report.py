"""The plan report: the figures of `launch.plan --json`, which `plan.txt` shows as text.

Figures are GiB, seconds, tokens per second, dollars and bytes. They are estimates, but for those
whose `source` is "compiler". In the text estimates are marked with `~`, figures of the TPU compiler
with `=`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from pipeline.data.models.model_shape import LOADING_COPIES
from pipeline.plan.cost_model.hardware import has_own_topology, topology_of
from pipeline.plan.cost_model.memory import PARTS
from pipeline.plan.forecast import DOWNLOAD_BYTES_PER_S, Forecast
from pipeline.plan.search.fitting import (
    PlacementChoice,
    PlanCase,
    SizedPlan,
    is_memory_known,
    shortage,
)
from pipeline.plan.search.placements import PLACEMENT_KEYS, settings_to_set
from pipeline.plan.search.suggestions import Change, settings_text
from pipeline.plan.topology import GIB
from pipeline.plan.verify import CompilerCheck, Verified
from pipeline.tables import table

Figures = dict[str, Any]
"""A JSON object."""

_COMPILER = {"source": "compiler"}
_SETTINGS = (
    *("slots", "segment_steps", "prefill_tokens", "micro_batch_tokens", "remat"),
    "per_layer_embeddings",
)
"""Settings of [plan] that the planner chooses besides the placement."""


@dataclass(frozen=True)
class Planned:
    """The result of planning."""

    case: PlanCase
    choice: PlacementChoice
    forecast: Forecast
    changes: Sequence[Change] = ()
    verified: Verified | None = None

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
    """All figures of a plan, and the lines that `plan.txt` makes of them."""
    figures = {
        "name": found.case.config.run.name,
        "topology": _topology(found),
        "lengths": _lengths(found),
        "plan": _chosen(found),
        "memory": {
            phase: {
                "parts_gib": {name: parts[name] / GIB for name in PARTS},
                "gib": parts.total() / GIB,
            }
            for phase, parts in found.plan.memory.items()
        },
        "step": _step(found),
        "compared": [_placement(one, found) for one in found.choice.compared],
        "verified": _verified(found),
        "budget": _budget(found) if found.plan.fits else None,
        "changes": [_change(one, found) for one in found.changes],
    }
    text = _TEXT.get_template("plan.txt").render(
        **figures,
        loading_copies=LOADING_COPIES,
        parts=[name.replace("kv_", "KV ") for name in PARTS],
        nothing_helps=not (found.plan.fits or found.changes or found.verified),
    )
    return figures, text.splitlines()


# --- figures


def _topology(found: Planned) -> Figures:
    topology, chip = found.case.topology, found.case.topology.chip
    return {
        "name": topology.name,
        "chip": chip.name,
        "chips": topology.chips,
        "hosts": topology.hosts,
        "hbm_gib": chip.hbm_gib,
    }


def _lengths(found: Planned) -> Figures:
    rollout = found.case.config.rollout
    limits = {"max_prompt": rollout.max_prompt_tokens, "max_completion": rollout.max_new_tokens}
    return asdict(found.case.lengths) | limits


def _chosen(found: Planned) -> Figures:
    case, plan = found.case, found.plan
    shape, config = case.shape, plan.config
    host = shape.host_bytes(config.model.dtype) if config.plan.embeddings_in_host else 0
    return {
        "name": plan.name,
        "configured": plan.configured,
        "planned_sizes": list(case.config.plan.planned_sizes),
        "fits": plan.fits,
        "short": None if plan.fits else _short(found),
        "reserve_gib": case.topology.chip.hbm_gib - case.limit_bytes / GIB,
        "limit_gib": case.limit_bytes / GIB,
        **_sizes(plan),
        "host_gib_per_chip": host / GIB,
        "auto": _is_of_the_run(found),
        "set": settings_to_set(case.config, config, _SETTINGS) if plan.fits else {},
    }


def _is_of_the_run(found: Planned) -> bool:
    """Whether a run takes this plan by itself: its own chips, and no compiler."""
    case, config = found.case, found.case.config
    return (
        config.plan.placement == "auto"
        and is_memory_known(config)
        and has_own_topology(config, case.topology)
        and case.topology.chip.name == topology_of(config, None).chip.name
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
    limit, hbm_gib = found.case.compiled_limit_bytes / GIB, found.case.topology.chip.hbm_gib
    return "; ".join(
        f"{name} takes {_size(_gib(one), hbm_gib)} GiB of the {limit:.2f} that may be used"
        for name, one in found.programs.items()
        if not one.report.fits
    )


def _gib(program: CompilerCheck) -> float | None:
    size = program.report.hbm_bytes
    return None if size is None else size / GIB


def _step(found: Planned) -> Figures:
    step, rollout = found.plan.step, found.case.config.rollout
    compiled = {one.phase for one in found.programs.values() if one.report.seconds > 0}
    return asdict(step) | {
        "seconds": {
            phase: {
                **(_COMPILER if phase in compiled else {}),
                "expected": time.expected,
                "regime": time.regime,
            }
            for phase, time in step.seconds.items()
        },
        "total_s": step.total.expected,
        "dynamic_sampling": rollout.dynamic_sampling,
        "prompts": rollout.prompts_per_step,
        "most_prompts": rollout.max_prompts_per_step or rollout.prompts_per_step,
        "tokens_per_s": step.tokens_per_s,
    }


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


def _verified(found: Planned) -> Figures:
    verified = found.verified
    if verified is None:
        return {"by_compiler": False}
    return {
        "by_compiler": True,
        **_COMPILER,
        "programs": {
            name: {
                "phase": one.phase,
                **asdict(one.report),
                "gib": _gib(one),
                "estimated": {"source": "estimated", "seconds": one.estimated_s},
            }
            for name, one in verified.programs.items()
        },
        "searched": list(verified.searched),
    }


def _budget(found: Planned) -> Figures:
    return asdict(found.forecast) | {
        "steps_given": found.case.config.budget.steps,
        "chip_hour_usd": found.case.topology.chip.chip_hour_usd,
        "download_bytes_per_s": DOWNLOAD_BYTES_PER_S,
    }


def _change(one: Change, found: Planned) -> Figures:
    return {
        "change": one.text,
        "settings": dict(one.settings),
        "tokens_per_s": one.plan.step.tokens_per_s,
        "gain": one.gain(found.estimated) if found.plan.fits else None,
        "gib": one.plan.peak_bytes / GIB,
        "limit_gib": one.case.limit_bytes / GIB,
    }


# --- text


def _size(gib: float | None, hbm_gib: float) -> str:
    """A program's compiled size, which may be larger than the memory and not reported."""
    return f">{hbm_gib:.2f}" if gib is None else f"={gib:.2f}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.2f} h"


def _verdict(row: Figures, *, fits: bool) -> str:
    """The last cell of a compared placement, in a plan that fits or does not."""
    if row["chosen"] and fits:
        return "chosen"
    if not row["fits"]:
        return f"does not fit: {row['short']}"
    if row["chosen"]:
        return "does not fit"  # by the compiler
    return f"~{row['gain']:+.0%}" if fits else "fits"


def _table(text: str) -> str:
    """Aligns lines of cells that are separated by bars."""
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    return "".join(f"{line}\n" for line in table(rows))


_TEXT = Environment(
    loader=PackageLoader("pipeline.plan", ""),
    autoescape=select_autoescape(default=False),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEXT.filters |= {
    "f": format,
    "table": _table,
    "duration": _duration,
    "settings": settings_text,
    "size": _size,
    "verdict": _verdict,
}
