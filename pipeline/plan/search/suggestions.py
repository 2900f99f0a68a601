"""Changes to suggest for a plan: what would raise its speed most, or what would make it fit.

Each change is planned again in the same placement. Settings are validated as a run would validate
them, so no suggestion is refused later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.errors import ConfigError
from configs.load import validated
from configs.schema import Config
from configs.toml_text import show_value
from pipeline.plan.search.fitting import PlanCase, SizedPlan, plan_again

Settings = Mapping[str, Any]
"""Values by dotted key; None removes the setting."""

_FREE_SIZES = dict.fromkeys(("plan.slots", "plan.micro_batch_tokens", "plan.slot_buckets"))
"""Without these settings a run plans its sizes itself."""
_CAPPED = {"learner.importance_cap": 2.0}
_NO_TOP_K = {"learner.kl_top_k": 64}
_CUT_OFFS = (0.9, 0.75)
"""Shares of the rollouts that must finish; while the longest ones finish, most slots are empty."""
_MIN_GAIN = 0.01
_HALVINGS = 3
"""How many times a number is halved."""


@dataclass(frozen=True)
class Change:
    """Settings to change, and the plan with them."""

    text: str
    settings: Settings
    case: PlanCase
    plan: SizedPlan

    @property
    def memory_share(self) -> float:
        """See `PlanCase.memory_share`."""
        return self.case.memory_share(self.plan.memory)

    def gain(self, plan: SizedPlan) -> float:
        """Relative increase of trained tokens per second over another plan."""
        return self.plan.step.tokens_per_s / plan.step.tokens_per_s - 1


def suggestions(case: PlanCase, plan: SizedPlan) -> list[Change]:
    """Settings of a plan that fits with a gain of a percent or more, else those that make it fit.

    Gains are in decreasing order; given sizes stay as they are under every change, and planning
    them is a change of its own. What makes a plan fit is the smallest sufficient change of each
    setting, or several settings together if no single one is enough.
    """
    if plan.fits:
        tried = _tried(case, plan, _speed_settings(case.config, plan))
        found = [one for one in tried if one.plan.fits and one.gain(plan) >= _MIN_GAIN]
        return sorted(found, key=lambda one: -one.gain(plan))
    series = list(_memory_settings(case))
    fitting = [
        next((one for one in _tried(case, plan, changes) if one.plan.fits), None)
        for changes in series
    ]
    found = [one for one in fitting if one is not None]
    if not found:
        found = _combined(case, plan, [changes[-1] for changes in series if changes])
    return found


def settings_text(settings: Settings) -> str:
    """Settings as text, such as `no plan.slots, plan.remat = "dots"`."""
    return ", ".join(
        f"no {key}" if value is None else f"{key} = {show_value(value)}"
        for key, value in settings.items()
    )


def _tried(case: PlanCase, plan: SizedPlan, tried: Iterable[Settings]) -> Iterator[Change]:
    """Changes by settings, without those that change nothing or that a run would refuse."""
    for settings in tried:
        tree, new = case.config.model_dump(), dict[str, Any]()
        for key, value in settings.items():
            table, _, name = key.partition(".")
            if tree[table][name] != value:
                tree[table][name] = new[key] = value
        try:
            other = replace(case, config=validated(tree))
        except ConfigError:
            continue
        if new:
            yield Change(settings_text(new), new, other, plan_again(other, plan))


def _speed_settings(config: Config, chosen: SizedPlan) -> Iterator[Settings]:
    """Each change with all settings that it requires."""
    plan, learner, rollout = config.plan, config.learner, config.rollout
    yield _FREE_SIZES
    yield {"plan.kv_cache": "int8"}
    if plan.rollout_weights == "shared":
        rounds = config.model.dtype != "float32" and not learner.importance_cap
        yield {"plan.rollout_weights": "merged"} | (_CAPPED if rounds else {})
    yield {"learner.share_prefix": not config.shares_prefix}
    older = {} if learner.importance_cap else _CAPPED
    if chosen.config.plan.placement == "split" and rollout.ahead == "off":
        yield {"rollout.ahead": "one"} | older
    top_k = {} if learner.teacher is not None else _NO_TOP_K
    yield {"learner.kl_coef": 0, "learner.kl": "k3", **top_k}
    yield {"rollout.top_k": 0, "rollout.top_p": 1, "rollout.min_p": 0}
    if rollout.partial == "off":
        for share in _CUT_OFFS:
            yield {"rollout.partial": "keep", "rollout.cut_off": share} | older
    more = {"rollout.prompts_per_step": 2 * rollout.prompts_per_step}
    if rollout.max_prompts_per_step is not None:
        more["rollout.max_prompts_per_step"] = 2 * rollout.max_prompts_per_step
    yield more


def _memory_settings(case: PlanCase) -> Iterator[Sequence[Settings]]:
    """Series of changes that take less memory; within a series the smallest change first."""
    config, plan, rollout = case.config, case.config.plan, case.config.rollout
    yield [_FREE_SIZES]
    yield [{"plan.rollout_weights": "shared"}]
    yield [{"plan.kv_cache": "int8"}]
    if case.may_use_host:
        yield [{"plan.per_layer_embeddings": "host"}]
    if config.model.quantization != "nf4":
        yield [{"model.quantization": kind} for kind in ("int8", "nf4")]
    parts = [n for n in (2, 4, 8) if n > plan.fsdp and case.shape.vocab % (n * plan.tp) == 0]
    yield [{"plan.fsdp": n} for n in parts]
    kinds = ["dots", "full"] + ["offload"] * (plan.platform != "cpu")
    after = kinds.index(plan.remat) + 1 if plan.remat in kinds else 0
    yield [{"plan.remat": kind} for kind in kinds[after:]]
    yield [{"lora.rank": rank} for rank in _halves(config.lora.rank)]
    # Shorter rows, and sizes that are whole with them.
    planned = _FREE_SIZES | {"plan.row_tokens": None}
    yield [planned]
    yield [{"rollout.max_new_tokens": n} | planned for n in _halves(rollout.max_new_tokens)]


def _halves(value: int) -> list[int]:
    return [value >> times for times in range(1, _HALVINGS + 1) if value >> times]


def _combined(case: PlanCase, plan: SizedPlan, changes: Sequence[Settings]) -> list[Change]:
    """Changes with which the plan fits together, added by effect; empty: all are not enough."""
    settings, share = dict[str, Any](), case.memory_share(plan.memory)
    while True:
        tried = _tried(case, plan, ({**more, **settings} for more in changes))
        best = min(tried, key=lambda one: one.memory_share, default=None)
        if best is None or best.memory_share >= share:
            return []
        if best.plan.fits:
            return [best]
        settings, share = dict(best.settings), best.memory_share
