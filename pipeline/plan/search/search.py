"""Chooses the sizes of a plan: for each placement the fastest that fits, and of these the best.

A plan is compared by trained tokens a second. Of what is as fast as the best to within a percent
the configuration's own settings and the smallest sizes win: more would only take memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from configs.errors import ConfigError
from configs.schema import Config
from pipeline.contracts.model_shape import ModelShape
from pipeline.contracts.sizes import Sizes, sized
from pipeline.contracts.speeds import Lengths
from pipeline.contracts.topology import GIB
from pipeline.plan.cost_model.hardware import Topology, devices_of
from pipeline.plan.cost_model.memory import RESIDENT, Memory, estimate
from pipeline.plan.cost_model.step import Step, step_of
from pipeline.plan.cost_model.timing import Pace
from pipeline.plan.search.candidates import PLACE, candidates, placed
from pipeline.plan.search.options import Option, row_options, slot_options

RESERVE = 0.05
"""Share of the memory that a plan leaves: as far as estimates may be too low."""
LEFT = 0.01
"""Likewise where the compiler has counted: for gaps between arrays that come and go."""
GAIN = 0.02
"""A plan that is not better by this share is not worth another setting."""
_NEAR = 0.01
_WITH_SIZES = ("segment_steps", "prefill_tokens", "remat")
"""Settings that are chosen with the sizes of another placement than the configuration's."""


@dataclass(frozen=True)
class Case:
    """What is planned.

    Attributes:
        config: as it was given.
        shape: the model.
        topology: the chips.
        lengths: that are expected.
        memory_ratio: what a phase was found to hold, as a multiple of what is estimated.
    """

    config: Config
    shape: ModelShape
    topology: Topology
    lengths: Lengths
    memory_ratio: Mapping[str, float] = field(default_factory=dict)

    @property
    def limit_bytes(self) -> int:
        """Of a chip that a plan may use, the reserve taken off."""
        return int((1 - RESERVE) * self.topology.chip.hbm_gib * GIB)

    @property
    def most_bytes(self) -> int:
        """Of a chip that a program may hold which the compiler has counted."""
        return int((1 - LEFT) * self.topology.chip.hbm_gib * GIB)

    def full(self, memory: Mapping[str, Memory]) -> float:
        """What phases hold at most, as a share of what each may: a plan fits up to 1.

        The reserve counts where nothing is known better.
        """
        return max(self._full(one) for phase, one in memory.items() if phase != "colocated")

    def _full(self, memory: Memory) -> float:
        ratio = self.memory_ratio.get(memory.phase)
        if ratio is None:
            return memory.total / self.limit_bytes
        return ratio * memory.total / self.most_bytes

    def pace(self, config: Config) -> Pace:
        """How fast the programs of a configuration are on these chips."""
        return Pace(config, self.shape, self.topology.chip)

    def step(self, config: Config) -> Step:
        """What a step takes with these sizes."""
        return step_of(config, self.shape, chip=self.topology.chip, lengths=self.lengths)


@dataclass(frozen=True)
class Planned:
    """A placement with the sizes that were chosen for it.

    Attributes:
        name: of the placement.
        configured: whether it is what the configuration says, sizes that it leaves open aside.
        config: with all sizes.
        step: what a step takes.
        memory: by phase, a chip's.
        fits: whether a chip has room for all of them.
        same_run: whether it learns the same as the configuration.
    """

    name: str
    configured: bool
    config: Config
    step: Step
    memory: Mapping[str, Memory]
    fits: bool
    same_run: bool = True

    @property
    def fullest(self) -> Memory:
        """The fullest moment of any chip."""
        phases = [memory for phase, memory in self.memory.items() if phase != "colocated"]
        return max(phases, key=lambda memory: memory.total)


@dataclass(frozen=True)
class Choice:
    """What was compared, and what was taken.

    Attributes:
        chosen: the plan.
        compared: all placements, the fastest that fits first, then those that do not, the least
            full first; `chosen` is one of them. Those that would be another run are only told.
    """

    chosen: Planned
    compared: tuple[Planned, ...]

    @property
    def best(self) -> Planned:
        """The fastest that fits, or else what comes closest to it, and is the same run."""
        return next(plan for plan in self.compared if plan.same_run)

    @property
    def others(self) -> tuple[Planned, ...]:
        """What could take the place of what was chosen, the fastest first."""
        same = (plan for plan in self.compared if plan.same_run and plan.fits)
        return tuple(plan for plan in same if plan is not self.chosen)


def choose(case: Case) -> Choice:
    """Plans each placement and takes one.

    What the configuration says is taken where its sizes are fixed, and where nothing else is better
    by `GAIN`; else the fastest that fits. Where nothing fits it is what comes closest to it.

    Raises:
        ValueError: if no placement on the topology suits the configuration's other settings.
    """

    def rank(plan: Planned) -> tuple[bool, float]:
        return not plan.fits, -plan.step.tokens_per_s if plan.fits else case.full(plan.memory)

    refused: list[str] = []
    ranked = sorted(_planned(case, refused), key=rank)
    configured = next((plan for plan in ranked if plan.configured), None)
    chosen = next((plan for plan in ranked if plan.same_run), None)
    if chosen is None:
        raise ValueError(_no_placement(case, refused))
    if configured is not None and (case.config.plan.fixed or _as_good(configured, chosen)):
        chosen = configured
    return Choice(chosen, tuple(ranked))


def planned_sizes(case: Case) -> Sizes:
    """The sizes that a run of this configuration takes, in its own placement.

    Raises:
        ValueError: if even the smallest do not fit, with what is short.
    """
    own = candidates(case.config, case.shape, case.topology)[0]
    assert own.configured, "a run's own placement is on its own topology"
    found = _as_configured(case, own.name)
    if not found.fits:
        raise ValueError(f"plan: no sizes fit: {shortage(case, found)}")
    return Sizes.of(found.config)


def in_its_place(case: Case, plan: Planned) -> Planned:
    """Another case planned in the placement of a plan.

    What was a choice is chosen again, and nothing else: all sizes, and where the configuration is
    not what was planned what goes with them, too; where it is and fixes its sizes, none.
    """
    if plan.configured:
        return _as_configured(case, plan.name)
    config = placed(case.config, {key: getattr(plan.config.plan, key) for key in PLACE})
    own = {key: getattr(plan.config.plan, key) for key in _WITH_SIZES}
    return measured(case, plan.name, _sizes_for(case, with_plan(config, own), free=True))


def shortage(case: Case, plan: Planned) -> str:
    """What is short where a plan does not fit, as estimated: what no size would make fit first."""
    full, limit = plan.fullest, f"GiB of the {case.limit_bytes / GIB:.2f} that may be used"
    base, resident = (sum(full.parts[part] for part in parts) for parts in (("base",), RESIDENT))
    if base > case.limit_bytes:
        copied = plan.config.plan.rollout_weights != "shared"
        what = "base and copy of it for rollouts alone take" if copied else "the base alone takes"
        return f"{plan.name}: {what} ~{base / GIB:.2f} {limit}"
    if resident > case.limit_bytes:
        what = f"base, adapter and optimizer alone take ~{resident / GIB:.2f} {limit}"
        return f"{plan.name}: {what}, in {full.phase}"
    largest = max(full.parts, key=lambda name: full.parts[name])
    return (
        f"{plan.name}: {full.phase} takes ~{full.total / GIB:.2f} {limit}, "
        f"{largest} ~{full.parts[largest] / GIB:.2f}"
    )


def with_plan(config: Config, update: Mapping[str, Any]) -> Config:
    """The configuration with other settings of its plan, unchecked."""
    return config.model_copy(update={"plan": config.plan.model_copy(update=dict(update))})


def checked(config: Config) -> Config:
    """The same configuration, once everything in it was checked.

    Raises:
        ValueError: if a size does not suit the rest.
    """
    return sized(config, Sizes.of(config))


def measured(case: Case, name: str, config: Config, *, configured: bool = False) -> Planned:
    """A configuration with sizes, with all that is known of it."""
    memory = estimate(config, case.shape)
    return Planned(name, configured, config, case.step(config), memory, case.full(memory) <= 1)


def _as_good(one: Planned, best: Planned) -> bool:
    return one.fits and one.step.tokens_per_s * (1 + GAIN) >= best.step.tokens_per_s


def _planned(case: Case, refused: list[str]) -> Iterator[Planned]:
    """Each placement with its sizes; adds to `refused` why a run could not have one."""
    own: Planned | None = None
    for candidate in candidates(case.config, case.shape, case.topology):
        if candidate.configured:
            own = _as_configured(case, f"as configured ({candidate.name})")
            yield replace(own, config=checked(own.config))
        config = _sizes_for(case, candidate.config, free=True)
        if own is not None and config.plan == own.config.plan:
            continue
        try:
            found = measured(case, candidate.name, checked(config))
        except ConfigError as error:
            refused.append(str(error))
            continue
        yield replace(found, same_run=candidate.same_run)


def _as_configured(case: Case, name: str) -> Planned:
    """What the configuration says, with planned sizes where it does not fix them."""
    fixed = case.config.plan.fixed
    config = case.config if fixed else _sizes_for(case, case.config, free=False)
    return measured(case, name, config, configured=True)


def _no_placement(case: Case, refused: Sequence[str]) -> str:
    """Why nothing is compared: only what draws a step ahead cannot be colocated."""
    topology, ahead = case.topology, case.config.rollout.ahead
    if refused:
        return f"{topology.name}: no placement on it suits the configuration: {refused[0]}"
    return (
        f'{topology.name}: rollout.ahead = "{ahead}" needs plan.placement = "split", and on '
        f"{topology.chips} chip(s) of {topology.hosts} host(s) there is none but the "
        f"configuration's own, which takes {devices_of(case.config)}; nearest valid: "
        'rollout.ahead = "off"'
    )


def _sizes_for(case: Case, config: Config, *, free: bool) -> Config:
    """The configuration with the best sizes within its bounds.

    What a sampler's phases hold does not depend on micro-batches, nor what a learner's hold on
    slots, so each is chosen by itself. Where nothing fits it is what comes closest to it.

    Args:
        case: what is planned.
        config: the placement; sizes in it are bounds, unless the plan is fixed.
        free: whether other settings may be chosen, too: segment, prefill, remat.
    """
    plan, bounded = config.plan, not case.config.plan.fixed
    slots = plan.slots if bounded else None
    tokens = plan.micro_batch_tokens if bounded else None
    for_slots = slot_options(config, case.pace(config), case.lengths, most=slots, free=free)
    for_rows = row_options(config, case.pace(config), case.lengths, most=tokens, free=free)
    small = with_plan(with_plan(config, for_slots[-1].update), for_rows[-1].update)
    sampler = _best(case, small, for_slots, ("prefill", "decode"))
    learner = _best(case, small, for_rows, ("score", "update"))
    return with_plan(with_plan(config, sampler), learner)


def _best(
    case: Case, config: Config, options: Sequence[Option], phases: Collection[str]
) -> Mapping[str, Any]:
    """The settings of the fastest option that fits, or of one as good that is preferred.

    Where none fits, of the one that takes the least memory; of these of the fastest.
    """

    def full(option: Option) -> float:
        memory = estimate(with_plan(config, option.update), case.shape)
        return case.full({phase: memory[phase] for phase in phases})

    by_speed = sorted(options, key=_seconds)
    fastest = next((one for one in by_speed if full(one) <= 1), None)
    if fastest is None:
        return min(by_speed, key=full).update
    good = [one for one in options if one.seconds <= (1 + _NEAR) * fastest.seconds]
    return next(one for one in sorted(good, key=_preference) if full(one) <= 1).update


def _seconds(option: Option) -> float:
    return option.seconds


def _preference(option: Option) -> tuple[int, int]:
    return option.changed, option.size
