"""Changes to suggest for a plan: what would raise its speed most, and what would make it fit.

Each change is planned again in the same placement. Settings are validated as a run would validate
them, so no suggestion is refused later.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from configs.schema import Config
from configs.toml_text import show_value
from pipeline.contracts.speeds import Lengths
from pipeline.contracts.topology import GIB
from pipeline.plan.cost_model.hardware import TOPOLOGIES, Topology, topology_of
from pipeline.plan.search.fitting import RESERVE, PlanCase, SizedPlan, choose_placement, plan_again

Settings = Mapping[str, Any]
"""Values by dotted key; None removes the setting."""

_LINKS = "twice the links between chips"
_TWICE = {
    "twice the memory": ("hbm_gib",),
    "twice the memory's bandwidth": ("bytes_per_s",),
    "twice the arithmetic": ("bf16_flops", "int8_flops"),
    _LINKS: ("link_bytes_per_s",),
}
_FREE_SIZES = {
    "plan.fixed": False,
    "plan.slots": None,
    "plan.micro_batch_tokens": None,
    "plan.slot_buckets": None,
}
"""Settings with which a run plans its sizes itself."""
_CAPPED = {"learner.importance_cap": 2}
_NO_TOP_K = {"learner.kl_top_k": 128, "learner.top_k_dtype": "float32"}
_MIN_GAIN = 0.01
_HALVINGS = 3
"""How many times a number is halved."""
_MAX_MORE_CHIPS = 8
"""Topologies of up to this multiple of the chips are tried."""


@dataclass(frozen=True)
class Gain:
    """The effect of one change on the speed.

    Attributes:
        change: the change, in words or as settings.
        share: relative increase of trained tokens per second.
        settings: settings that make the change; empty: it needs other hardware.
    """

    change: str
    share: float
    settings: Settings

    @property
    def is_setting(self) -> bool:
        """Whether the user can make the change by settings alone."""
        return bool(self.settings)


@dataclass(frozen=True)
class Remedy:
    """A change with which the plan fits.

    Attributes:
        change: the change, as settings or in words.
        settings: settings that make the change; empty: it needs other hardware.
        gib: memory of the fullest phase with the change.
        limit_gib: memory that the plan may use.
    """

    change: str
    settings: Settings
    gib: float
    limit_gib: float


def gains(case: PlanCase, plan: SizedPlan) -> list[Gain]:
    """Changes of hardware and settings that gain a percent or more, the largest first.

    Fixed sizes stay fixed under every change; planning them is a change of its own.
    """
    found = []
    for change, other, settings in [*_more_hardware(case), *_faster_settings(case)]:
        again = plan_again(other, plan)
        if again.fits:
            share = again.step.tokens_per_s / plan.step.tokens_per_s - 1
            if share >= _MIN_GAIN:
                found.append(Gain(change, share, settings))
    return sorted(found, key=lambda gain: -gain.share)


def remedies(case: PlanCase, plan: SizedPlan) -> list[Remedy]:
    """Changes with which a plan that does not fit does: settings first, then memory and chips.

    Settings are combined only where no single one is enough.
    """
    series = list(_memory_settings(case))
    found = [one for changes in series if (one := _first_fit(case, plan, changes)) is not None]
    if not found:
        combined = _combined(case, plan, [changes[-1] for changes in series if changes])
        found = [] if combined is None else [combined]
    by_settings = [
        _remedy(settings_text(one.settings), one.settings, one.case, one.plan) for one in found
    ]
    return [*by_settings, *_memory(case, plan), *_topologies(case)]


def new_settings(config: Config, settings: Settings) -> dict[str, Any]:
    """The settings that differ from the configuration's."""
    tree = config.model_dump()
    found = {key: tree[key.partition(".")[0]][key.partition(".")[2]] for key in settings}
    return {key: value for key, value in settings.items() if value != found[key]}


def with_settings(case: PlanCase, settings: Settings) -> PlanCase | None:
    """The case with these settings; None: a run would refuse them.

    Expected lengths keep their share of the longest.
    """
    tree = case.config.model_dump()
    for key, value in settings.items():
        table, _, name = key.partition(".")
        tree[table][name] = value
    try:
        config = Config.model_validate(tree)
    except ValidationError:
        return None
    old, new = case.config.rollout, config.rollout
    prompt, completion = case.lengths.prompt, case.lengths.completion
    prompt *= new.max_prompt_tokens / old.max_prompt_tokens
    completion *= new.max_new_tokens / old.max_new_tokens
    return replace(case, config=config, lengths=Lengths(prompt, completion))


def settings_text(settings: Settings) -> str:
    """Settings as text, such as `no plan.slots, plan.remat = "dots"`."""
    return ", ".join(
        f"no {key}" if value is None else f"{key} = {show_value(value)}"
        for key, value in settings.items()
    )


def _more_hardware(case: PlanCase) -> Iterator[tuple[str, PlanCase, Settings]]:
    topology = case.topology
    for change, names in _TWICE.items():
        if change == _LINKS and not topology.is_linked:
            continue
        twice = {name: 2 * getattr(topology.chip, name) for name in names}
        chip = replace(topology.chip, **twice)
        yield change, replace(case, topology=replace(topology, chip=chip)), {}


def _faster_settings(case: PlanCase) -> Iterator[tuple[str, PlanCase, Settings]]:
    """Changes by settings that a run would accept."""
    for settings in _gain_settings(case.config):
        other, new = with_settings(case, settings), new_settings(case.config, settings)
        if other is not None and new:
            yield settings_text(new), other, new


def _gain_settings(config: Config) -> Iterator[Settings]:
    """Each change with all settings that it requires."""
    plan, learner, rollout = config.plan, config.learner, config.rollout
    if plan.platform != "gpu":  # on a GPU a run requires sizes
        yield _FREE_SIZES
    yield {"plan.kv_cache": "int8"}
    if plan.rollout_weights == "shared":
        rounds = config.model.dtype != "float32" and not learner.importance_cap
        yield {"plan.rollout_weights": "merged"} | (_CAPPED if rounds else {})
    top_k = {} if learner.teacher is not None else _NO_TOP_K
    yield {"learner.kl_coef": 0, "learner.kl": "k3", **top_k}
    yield {"rollout.top_k": 0, "rollout.top_p": 1, "rollout.min_p": 0}
    more = {"rollout.prompts_per_step": 2 * rollout.prompts_per_step}
    if rollout.max_prompts_per_step is not None:
        more["rollout.max_prompts_per_step"] = 2 * rollout.max_prompts_per_step
    yield more


@dataclass(frozen=True)
class _Trial:
    """Settings and the plan with them."""

    settings: Settings
    case: PlanCase
    plan: SizedPlan

    @property
    def memory_share(self) -> float:
        return self.case.memory_share(self.plan.memory)


def _memory_settings(case: PlanCase) -> Iterator[Sequence[Settings]]:
    """Series of changes that take less memory; within a series the smallest change first."""
    config, plan, rollout = case.config, case.config.plan, case.config.rollout
    free: list[Settings] = [_FREE_SIZES] if plan.platform != "gpu" else []
    for settings in [*free, {"plan.rollout_weights": "shared"}, {"plan.kv_cache": "int8"}]:
        yield [settings]
    if config.model.quantization != "nf4":
        yield [{"model.quantization": kind} for kind in ("int8", "nf4")]
    parts = [n for n in (2, 4, 8) if n > plan.fsdp and case.shape.vocab % (n * plan.tp) == 0]
    yield [{"plan.fsdp": n} for n in parts]
    kinds = ["dots", "full"] + ["offload"] * (plan.platform != "cpu")
    after = kinds.index(plan.remat) + 1 if plan.remat in kinds else 0
    yield [{"plan.remat": kind} for kind in kinds[after:]]
    yield _halves("lora.rank", config.lora.rank)
    yield [_row_settings(config, rollout.max_tokens)] if plan.row_tokens is not None else []
    yield [
        {key: value, **_row_settings(config, rollout.max_prompt_tokens + value)}
        for one in _halves("rollout.max_new_tokens", rollout.max_new_tokens)
        for key, value in one.items()
    ]


def _row_settings(config: Config, row: int) -> Settings:
    """Rows of `row` positions, as many of them in a micro-batch as before."""
    plan = config.plan
    found = {"plan.row_tokens": None if plan.row_tokens is None else row}
    if plan.micro_batch_tokens is not None:
        found["plan.micro_batch_tokens"] = plan.micro_batch_tokens // config.row_tokens * row
    return found


def _halves(key: str, value: int) -> list[Settings]:
    return [{key: value // 2**times} for times in range(1, _HALVINGS + 1) if value >> times]


def _first_fit(case: PlanCase, plan: SizedPlan, changes: Sequence[Settings]) -> _Trial | None:
    """The first of the changes with which the plan fits."""
    tried = (_try(case, plan, settings) for settings in changes)
    return next((one for one in tried if one is not None and one.plan.fits), None)


def _combined(case: PlanCase, plan: SizedPlan, changes: Sequence[Settings]) -> _Trial | None:
    """Changes with which the plan fits together, added by effect; None: all are not enough."""
    best: _Trial | None = None
    left = list(changes)
    while left and (best is None or not best.plan.fits):
        so_far = {} if best is None else best.settings
        tried = [(_try(case, plan, {**more, **so_far}), more) for more in left]
        valid = [(one, more) for one, more in tried if one is not None]
        share = case.memory_share(plan.memory) if best is None else best.memory_share
        one, more = min(valid, key=lambda pair: pair[0].memory_share, default=(None, None))
        if one is None or one.memory_share >= share:
            return None
        best = one
        left = [other for other in left if other is not more]
    return best


def _try(case: PlanCase, plan: SizedPlan, settings: Settings) -> _Trial | None:
    """Plans again with settings; None: they change nothing, or a run would refuse them."""
    new, other = new_settings(case.config, settings), with_settings(case, settings)
    if not new or other is None:
        return None
    return _Trial(new, other, plan_again(other, plan))


def _memory(case: PlanCase, plan: SizedPlan) -> Iterator[Remedy]:
    """The memory per chip with which the unchanged plan fits."""
    topology = case.topology
    needed = math.ceil(100 * plan.fullest.total / GIB / (1 - RESERVE)) / 100
    more = replace(case, topology=_with_memory(topology, needed))
    again = plan_again(more, plan)
    if not again.fits:
        return
    unbounded = with_settings(case, {"plan.hbm_gib": None})
    assert unbounded is not None, "plan.hbm_gib is optional"
    if needed <= topology_of(unbounded.config, topology.name).chip.hbm_gib:
        settings = {"plan.hbm_gib": needed}
        yield _remedy(settings_text(settings), settings, more, again)
    else:
        yield _remedy(f"chips of {needed:.2f} GiB", {}, more, again)


def _with_memory(topology: Topology, gib: float) -> Topology:
    return replace(topology, chip=replace(topology.chip, hbm_gib=gib))


def _topologies(case: PlanCase) -> Iterator[Remedy]:
    """The smallest sufficient topology of each kind: more chips of the same, as many of another."""
    own = case.topology
    kinds = {name: re.split(r"[-x]\d+$", name)[0] for name in TOPOLOGIES}
    found = set[str]()
    for name, topology in TOPOLOGIES.items():
        same = topology.chip.name == TOPOLOGIES.get(own.name, own).chip.name
        fewer = topology.chips <= own.chips if same else topology.chips < own.chips
        more = topology.chips > _MAX_MORE_CHIPS * own.chips
        other_platform = topology.chip.platform != own.chip.platform
        if other_platform or fewer or more or kinds[name] in found:
            continue
        other = replace(case, topology=topology_of(case.config, name))
        try:
            best = choose_placement(other).best
        except ValueError:
            continue  # no placement on it suits the configuration
        if best.fits:
            found.add(kinds[name])
            note = f"{best.name}{'; plan only' if topology.why_not_trained else ''}"
            yield _remedy(f"--topology {name} ({note})", {}, other, best)


def _remedy(change: str, settings: Settings, case: PlanCase, plan: SizedPlan) -> Remedy:
    return Remedy(change, settings, plan.fullest.total / GIB, case.limit_bytes / GIB)
