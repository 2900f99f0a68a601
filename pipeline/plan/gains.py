"""What would have to change to gain most: the same plan made again with one thing relaxed.

Sizes that are fixed stay so, whatever is relaxed: that they are given is a thing of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from configs.schema import Config, Table
from pipeline.plan.search import Case, Planned, in_its_place

_LINKS = "twice the links between chips"
_TWICE = {
    "twice the memory": ("hbm_gib",),
    "twice the memory's bandwidth": ("bytes_per_s",),
    "twice the arithmetic": ("bf16_flops", "int8_flops"),
    _LINKS: ("link_bytes_per_s",),
}
_SIZES = ("rollout_rows", "micro_batch_tokens", "slot_buckets")
"""Settings without which a run plans its sizes by itself."""
_LEAST = 0.01


@dataclass(frozen=True)
class Gain:
    """What one change would bring.

    Attributes:
        change: in words, or as a setting.
        share: by which trained tokens a second would rise.
        is_setting: whether the user can simply set it.
    """

    change: str
    share: float
    is_setting: bool


def gains(case: Case, plan: Planned) -> list[Gain]:
    """Changes that would bring a percent or more, the largest first; hardware and settings."""
    found = []
    for change, other, is_setting in [*_hardware(case), *_settings(case)]:
        again = in_its_place(other, plan)
        if again.fits:
            share = again.step.tokens_per_s / plan.step.tokens_per_s - 1
            if share >= _LEAST:
                found.append(Gain(change, share, is_setting))
    return sorted(found, key=lambda gain: -gain.share)


def _hardware(case: Case) -> Iterator[tuple[str, Case, bool]]:
    topology = case.topology
    for change, names in _TWICE.items():
        if change == _LINKS and not topology.is_linked:
            continue
        twice = {name: 2 * getattr(topology.chip, name) for name in names}
        chip = replace(topology.chip, **twice)
        yield change, replace(case, topology=replace(topology, chip=chip)), False


def _settings(case: Case) -> Iterator[tuple[str, Case, bool]]:
    config = case.config
    if config.plan.platform != "gpu":  # there a run needs them
        given = [key for key in _SIZES if getattr(config.plan, key) is not None]
        change = ", ".join(
            ["plan.fixed = false"] * config.plan.fixed + [f"no plan.{key}" for key in given]
        )
        if given:
            free = {"fixed": False, **dict.fromkeys(_SIZES)}
            yield _with(case, change, plan=free)
    if config.plan.kv_cache == "model":
        yield _with(case, 'plan.kv_cache = "int8"', plan={"kv_cache": "int8"})
    if config.plan.rollout_weights == "shared" and config.model.quantization == "none":
        capped = {"importance_cap": config.learner.importance_cap or 2.0}
        merged = {"rollout_weights": "merged"}
        needs = " with learner.importance_cap" if not config.learner.importance_cap else ""
        change = f'plan.rollout_weights = "merged"{needs}'
        yield _with(case, change, plan=merged, learner=capped)
    if config.learner.kl_coef > 0:
        free = {"kl_coef": 0.0, "kl": "k3", "kl_top_k": 128, "top_k_dtype": "float32"}
        yield _with(case, "learner.kl_coef = 0", learner=free)
    if config.rollout.truncates:
        whole = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        yield _with(case, "no rollout.top_k, top_p, min_p", rollout=whole)
    more = 2 * config.rollout.prompts_per_step
    change = f"rollout.prompts_per_step = {more}"
    yield _with(case, change, rollout={"prompts_per_step": more})


def _with(case: Case, change: str, **tables: dict[str, Any]) -> tuple[str, Case, bool]:
    changed = {name: _changed(case.config, name, update) for name, update in tables.items()}
    return change, replace(case, config=case.config.model_copy(update=changed)), True


def _changed(config: Config, name: str, update: dict[str, Any]) -> Table:
    table: Table = getattr(config, name)
    return table.model_copy(update=update)
