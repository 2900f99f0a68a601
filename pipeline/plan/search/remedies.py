"""What would make a plan fit: each change tried by the planner, together where none does alone.

Nothing here says how fast the result is; the plan with the change does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from configs.schema import Config
from pipeline.contracts.topology import GIB
from pipeline.plan.cost_model.hardware import TOPOLOGIES, Topology, topology_of
from pipeline.plan.search.changes import Settings, changed, differing, words
from pipeline.plan.search.gains import FREE_SIZES
from pipeline.plan.search.search import RESERVE, Case, Planned, choose, in_its_place

_HALVES = 3
"""How often a number is halved."""
_MORE_CHIPS = 8
"""So many times the chips are tried."""


@dataclass(frozen=True)
class Remedy:
    """A change with which there is a plan that fits.

    Attributes:
        change: as settings, or in words.
        settings: by which the user can have it; none: it is other hardware.
        gib: what the fullest moment of a chip then takes.
        limit_gib: what it may take.
    """

    change: str
    settings: Settings
    gib: float
    limit_gib: float


@dataclass(frozen=True)
class _Try:
    """Settings, and the plan with them."""

    settings: Settings
    case: Case
    plan: Planned

    @property
    def full(self) -> float:
        return self.case.full(self.plan.memory)


def remedies(case: Case, plan: Planned) -> list[Remedy]:
    """Changes with which a plan fits that does not: settings first, then memory and chips."""
    ladders = list(_ladders(case))
    found = [one for ladder in ladders if (one := _first(case, plan, ladder)) is not None]
    if not found:
        together = _together(case, plan, [ladder[-1] for ladder in ladders if ladder])
        found = [] if together is None else [together]
    told = [_told(words(one.settings), one.settings, one.case, one.plan) for one in found]
    return [*told, *_memory(case, plan), *_topologies(case)]


def _ladders(case: Case) -> Iterator[Sequence[Settings]]:
    """Changes that take less memory, each as often as it can be made, the least first."""
    config, plan, rollout = case.config, case.config.plan, case.config.rollout
    given: list[Settings] = [FREE_SIZES] if plan.platform != "gpu" else []
    for settings in [*given, {"plan.rollout_weights": "shared"}, {"plan.kv_cache": "int8"}]:
        yield [settings]
    if config.model.quantization != "nf4":
        yield [{"model.quantization": kind} for kind in ("int8", "nf4")]
    parts = [n for n in (2, 4, 8) if n > plan.fsdp and case.shape.vocab % (n * plan.tp) == 0]
    yield [{"plan.fsdp": n} for n in parts]
    kinds = ["dots", "full"] + ["offload"] * (plan.platform != "cpu")
    after = kinds.index(plan.remat) + 1 if plan.remat in kinds else 0
    yield [{"plan.remat": kind} for kind in kinds[after:]]
    yield _halves("lora.rank", config.lora.rank)
    yield [_rows(config, rollout.max_tokens)] if plan.row_tokens is not None else []
    yield [
        {key: value, **_rows(config, rollout.max_prompt_tokens + value)}
        for one in _halves("rollout.max_new_tokens", rollout.max_new_tokens)
        for key, value in one.items()
    ]


def _rows(config: Config, row: int) -> Settings:
    """As many rows as before, each of so many positions."""
    plan = config.plan
    found = {"plan.row_tokens": None if plan.row_tokens is None else row}
    if plan.micro_batch_tokens is not None:
        found["plan.micro_batch_tokens"] = plan.micro_batch_tokens // config.row_tokens * row
    return found


def _halves(key: str, value: int) -> list[Settings]:
    return [{key: value // 2**times} for times in range(1, _HALVES + 1) if value >> times]


def _first(case: Case, plan: Planned, ladder: Sequence[Settings]) -> _Try | None:
    """The least of the changes with which it fits."""
    tried = (_try(case, plan, settings) for settings in ladder)
    return next((one for one in tried if one is not None and one.plan.fits), None)


def _together(case: Case, plan: Planned, changes: Sequence[Settings]) -> _Try | None:
    """Changes that make it fit only together, what brings most first; None: all do not."""
    best: _Try | None = None
    left = list(changes)
    while left and (best is None or not best.plan.fits):
        so_far = {} if best is None else best.settings
        tried = [(_try(case, plan, {**more, **so_far}), more) for more in left]
        made = [(one, more) for one, more in tried if one is not None]
        full = case.full(plan.memory) if best is None else best.full
        one, more = min(made, key=lambda pair: pair[0].full, default=(None, None))
        if one is None or one.full >= full:
            return None
        best = one
        left = [other for other in left if other is not more]
    return best


def _try(case: Case, plan: Planned, settings: Settings) -> _Try | None:
    """The plan made again with settings; None: they change nothing, or a run would refuse them."""
    new, other = differing(case.config, settings), changed(case, settings)
    if not new or other is None:
        return None
    return _Try(new, other, in_its_place(other, plan))


def _memory(case: Case, plan: Planned) -> Iterator[Remedy]:
    """The memory of a chip with which the plan fits as it is."""
    topology = case.topology
    needed = math.ceil(100 * plan.fullest.total / GIB / (1 - RESERVE)) / 100
    more = replace(case, topology=_holding(topology, needed))
    again = in_its_place(more, plan)
    if not again.fits:
        return
    unbound = changed(case, {"plan.hbm_gib": None})
    assert unbound is not None, "a bound may be left out"
    if needed <= topology_of(unbound.config, topology.name).chip.hbm_gib:
        settings = {"plan.hbm_gib": needed}
        yield _told(words(settings), settings, more, again)
    else:
        yield _told(f"chips of {needed:.2f} GiB", {}, more, again)


def _holding(topology: Topology, gib: float) -> Topology:
    return replace(topology, chip=replace(topology.chip, hbm_gib=gib))


def _topologies(case: Case) -> Iterator[Remedy]:
    """More chips of the kind, and as few of each other kind, the first that does."""
    own = case.topology
    kinds = {name: re.split(r"[-x]\d+$", name)[0] for name in TOPOLOGIES}
    found = set[str]()
    for name, topology in TOPOLOGIES.items():
        same = topology.chip.name == TOPOLOGIES.get(own.name, own).chip.name
        fewer = topology.chips <= own.chips if same else topology.chips < own.chips
        more = topology.chips > _MORE_CHIPS * own.chips
        other_platform = topology.chip.platform != own.chip.platform
        if other_platform or fewer or more or kinds[name] in found:
            continue
        other = replace(case, topology=topology_of(case.config, name))
        try:
            best = choose(other).best
        except ValueError:
            continue  # no placement on it suits the configuration
        if best.fits:
            found.add(kinds[name])
            only = f"{best.name}{'; plan only' if topology.why_not_trained else ''}"
            yield _told(f"--topology {name} ({only})", {}, other, best)


def _told(change: str, settings: Settings, case: Case, plan: Planned) -> Remedy:
    return Remedy(change, settings, plan.fullest.total / GIB, case.limit_bytes / GIB)
