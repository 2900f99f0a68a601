"""What would have to change to gain most: the same plan made again with one thing relaxed.

Sizes that are fixed stay so, whatever is relaxed: that they are given is a thing of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from configs.schema import Config
from pipeline.plan.search.changes import Settings, changed, differing, words
from pipeline.plan.search.search import Case, Planned, in_its_place

_LINKS = "twice the links between chips"
_TWICE = {
    "twice the memory": ("hbm_gib",),
    "twice the memory's bandwidth": ("bytes_per_s",),
    "twice the arithmetic": ("bf16_flops", "int8_flops"),
    _LINKS: ("link_bytes_per_s",),
}
FREE_SIZES = {
    "plan.fixed": False,
    "plan.slots": None,
    "plan.micro_batch_tokens": None,
    "plan.slot_buckets": None,
}
"""With these a run plans its sizes by itself."""
_CAPPED = {"learner.importance_cap": 2}
_NO_TOP_K = {"learner.kl_top_k": 128, "learner.top_k_dtype": "float32"}
_LEAST = 0.01


@dataclass(frozen=True)
class Gain:
    """What one change would bring.

    Attributes:
        change: in words, or as settings.
        share: by which trained tokens a second would rise.
        settings: by which the user can have it; none: it is other hardware.
    """

    change: str
    share: float
    settings: Settings

    @property
    def is_setting(self) -> bool:
        """Whether the user can simply set it."""
        return bool(self.settings)


def gains(case: Case, plan: Planned) -> list[Gain]:
    """Changes that would bring a percent or more, the largest first; hardware and settings."""
    found = []
    for change, other, settings in [*_hardware(case), *_set(case)]:
        again = in_its_place(other, plan)
        if again.fits:
            share = again.step.tokens_per_s / plan.step.tokens_per_s - 1
            if share >= _LEAST:
                found.append(Gain(change, share, settings))
    return sorted(found, key=lambda gain: -gain.share)


def _hardware(case: Case) -> Iterator[tuple[str, Case, Settings]]:
    topology = case.topology
    for change, names in _TWICE.items():
        if change == _LINKS and not topology.is_linked:
            continue
        twice = {name: 2 * getattr(topology.chip, name) for name in names}
        chip = replace(topology.chip, **twice)
        yield change, replace(case, topology=replace(topology, chip=chip)), {}


def _set(case: Case) -> Iterator[tuple[str, Case, Settings]]:
    """Each change by settings that a run would take."""
    for settings in _settings(case.config):
        other, new = changed(case, settings), differing(case.config, settings)
        if other is not None and new:
            yield words(new), other, new


def _settings(config: Config) -> Iterator[Settings]:
    """Everything that each change needs."""
    plan, learner, rollout = config.plan, config.learner, config.rollout
    if plan.platform != "gpu":  # there a run needs them
        yield FREE_SIZES
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
