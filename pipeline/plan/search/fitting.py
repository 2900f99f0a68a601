"""Fits a run to its chips: for each placement the fastest sizes that fit, and the best placement.

Plans are compared by trained tokens per second. Among sizes within a percent of the best, the
configuration's own settings and the smallest sizes win: larger ones would only use more memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from configs.errors import ConfigError
from configs.resume import hardware_id
from configs.schema import Config
from pipeline.data.models.find_shape import shape_of
from pipeline.data.models.model_shape import ModelShape
from pipeline.plan.cost_model.hardware import (
    Topology,
    device_count,
    has_own_topology,
    topology_of,
)
from pipeline.plan.cost_model.memory import estimate_memory
from pipeline.plan.cost_model.program_memory import MemoryParts
from pipeline.plan.cost_model.roofline import RooflineModel
from pipeline.plan.cost_model.step import StepEstimate, estimate_step
from pipeline.plan.lengths import Lengths
from pipeline.plan.search.placements import (
    placed_as,
    placement_name,
    placements,
)
from pipeline.plan.search.size_options import SizeOption, row_options, slot_options
from pipeline.plan.sizes import Sizes, validated, with_plan
from pipeline.plan.topology import GIB

RESERVE = 0.05
"""Share of the memory left free for the error of the estimates."""
COMPILED_RESERVE = 0.01
"""Share of the memory left free where the compiler reports sizes, for fragmentation."""
_TIE = 0.01
"""Options whose seconds differ by at most this share count as equally fast."""
_PARTS_NAMED = 3
"""Parts of the memory that are named where it is not enough."""
_CHOSEN_WITH_SIZES = ("segment_steps", "prefill_tokens", "remat")
_CHOSEN_WITH_PLACEMENT = (*_CHOSEN_WITH_SIZES, "per_layer_embeddings")
"""Settings chosen together with a placement that is not the configuration's."""


def is_memory_known(config: Config) -> bool:
    """Whether the memory of the run's devices is known before they are opened."""
    plan = config.plan
    return plan.platform != "gpu" or plan.gpu is not None or plan.hbm_gib is not None


@dataclass(frozen=True)
class PlanCase:
    """The input of the planner.

    `memory_ratio` is the memory that the compiler reports as a multiple of the estimate, by phase.
    """

    config: Config
    shape: ModelShape
    topology: Topology
    memory_ratio: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(config: Config) -> PlanCase:
        """The case of a run on the configuration's own devices.

        Raises:
            FileNotFoundError: if the model's folder is missing.
            ValueError: if the memory of its devices is unknown.
        """
        if not is_memory_known(config):
            raise ValueError(
                'plan.platform = "gpu": the memory of the device is unknown until it is opened; '
                "set plan.gpu or plan.hbm_gib"
            )
        return PlanCase(config, shape_of(config), topology_of(config, None))

    @property
    def lengths(self) -> Lengths:
        """The expected lengths."""
        return Lengths.expected(self.config)

    @property
    def limit_bytes(self) -> int:
        """Bytes of a chip that a plan may use by estimate: all but `RESERVE`."""
        return int((1 - RESERVE) * self.topology.chip.hbm_gib * GIB)

    @property
    def compiled_limit_bytes(self) -> int:
        """Bytes of a chip that a plan may use by the compiler: all but `COMPILED_RESERVE`."""
        return int((1 - COMPILED_RESERVE) * self.topology.chip.hbm_gib * GIB)

    @property
    def may_use_host(self) -> bool:
        """Whether embeddings in host memory can save memory of the chips."""
        return self.shape.per_layer_input > 0 and self.config.plan.platform == "tpu"

    def memory_share(self, memory: Mapping[str, MemoryParts]) -> float:
        """Memory of the fullest phase as a share of its limit: a plan fits up to 1.

        The limit is `limit_bytes`, or `compiled_limit_bytes` for phases in `memory_ratio`.
        """
        return max(
            self.memory_ratio[phase] * parts.total() / self.compiled_limit_bytes
            if phase in self.memory_ratio
            else parts.total() / self.limit_bytes
            for phase, parts in memory.items()
        )

    def roofline(self, config: Config) -> RooflineModel:
        """Times of a configuration's programs on these chips."""
        return RooflineModel(config, self.shape, self.topology.chip)

    def step(self, config: Config) -> StepEstimate:
        """Times of a step of a configuration with sizes."""
        return estimate_step(self.roofline(config), self.lengths)


@dataclass(frozen=True)
class SizedPlan:
    """A placement with the sizes chosen for it, and their estimates.

    Attributes:
        name: of the placement.
        configured: whether the placement and all given settings are the configuration's.
        config: with all sizes.
        step: times of a step.
        memory: bytes of a chip by phase and part.
        fits: whether every phase fits.
    """

    name: str
    configured: bool
    config: Config
    step: StepEstimate
    memory: Mapping[str, MemoryParts]
    fits: bool

    @property
    def fullest(self) -> str:
        """The phase that uses the most memory."""
        return max(self.memory, key=lambda phase: self.memory[phase].total())

    @property
    def peak_bytes(self) -> int:
        """Bytes of a chip in that phase."""
        return self.memory[self.fullest].total()


@dataclass(frozen=True)
class PlacementChoice:
    """The chosen plan and all that were compared: those that fit by speed, the others by memory."""

    chosen: SizedPlan
    compared: tuple[SizedPlan, ...]


def choose_placement(case: PlanCase) -> PlacementChoice:
    """Plans every placement and chooses one.

    On as many chips as the configuration's own, its placement is chosen if it has one: a run keeps
    it. Otherwise the fastest that fits; if none fits, the closest to fitting. Without chips to
    search, `plan.placement = "auto"` is colocated, with the best of the other settings.

    Raises:
        ValueError: if no placement on the topology suits the configuration's other settings.
    """
    plans: list[SizedPlan] = []
    own: SizedPlan | None = None
    refused: list[ConfigError] = []
    for placed in placements(case.config, case.shape, case.topology):
        name = placement_name(placed, case.topology)
        if placed is case.config and placed.plan.placement != "auto":
            own = _as_configured(case, f"as configured ({name})")
            own = replace(own, config=validated(own.config))
            plans.append(own)
        config = _with_free_settings(case, placed)
        if own is None or config.plan != own.config.plan:
            try:
                plans.append(estimate_plan(case, name, validated(config)))
            except ConfigError as error:
                refused.append(error)
                continue
            if placed is case.config and own is None:
                own = plans[-1]
    if not plans:
        raise ValueError(_no_placement(case, refused))
    fitting = sorted(
        (one for one in plans if one.fits),
        key=lambda one: -one.step.tokens_per_s,
    )
    others = [one for one in plans if not one.fits]
    ranked = [*fitting, *sorted(others, key=lambda one: case.memory_share(one.memory))]
    keeps = has_own_topology(case.config, case.topology)
    chosen = own if keeps and own is not None else ranked[0]
    return PlacementChoice(chosen, tuple(ranked))


def with_chosen_placement(config: Config, saved: Config | None) -> Config:
    """The configuration of a run: `plan.placement = "auto"` becomes what the planner chooses.

    Args:
        config: as given.
        saved: the configuration of the run to resume, whose placement is kept on as many devices of
            the same kind; None: the run is new.

    Raises:
        FileNotFoundError: if the model's folder is missing.
        ValueError: if no placement suits the configuration's other settings.
    """
    if config.plan.placement != "auto":
        return config
    is_searched = config.plan.searches_placement
    placed = with_plan(config, {"placement": "colocated"})
    try:
        if saved is not None and _devices(saved) == _devices(config):
            chosen = saved
        else:
            chosen = choose_placement(PlanCase.of(config)).chosen.config
    except (FileNotFoundError, ValueError):
        if is_searched:
            raise
        # Unknown: the memory of a GPU, or the model's shape before its download.
        return validated(placed)
    if is_searched:
        placed = placed_as(config, chosen)
    given = config.plan.changed(*_CHOSEN_WITH_PLACEMENT)
    own = {key: getattr(chosen.plan, key) for key in _CHOSEN_WITH_PLACEMENT if key not in given}
    return validated(with_plan(placed, own))


def _devices(config: Config) -> tuple[str, int]:
    return config.plan.platform, device_count(config)


def planned_sizes(case: PlanCase) -> Sizes:
    """The sizes of a run in the configuration's own placement.

    Raises:
        ValueError: if even the smallest do not fit; names what takes too much memory.
    """
    found = _as_configured(case, placement_name(case.config, case.topology))
    if not found.fits:
        raise ValueError(f"plan: no sizes fit: {found.name}: {shortage(case, found)}")
    return Sizes.of(found.config)


def hardware_of(config: Config) -> str:
    """A short hash of the settings of devices and sizes; see `configs.base.HARDWARE`."""
    return hardware_id(config.model_dump(mode="json"))


def recorded_sizes(config: Config, recorded: Mapping[str, Any] | None) -> Sizes | None:
    """The sizes in a run's `plan.json`; None: there is none, or it is of other hardware."""
    if recorded is None or recorded["hardware"] != hardware_of(config):
        return None
    return Sizes(**recorded["sizes"])


def first_sizes(config: Config, recorded: Mapping[str, Any] | None) -> Sizes:
    """The sizes that a process starts with: those of its `plan.json`, else given, else planned.

    Raises:
        FileNotFoundError: if sizes have to be planned and the model's folder is missing.
        ValueError: if sizes have to be planned and none fit or the devices are unknown.
    """
    found = recorded_sizes(config, recorded)
    if found is not None:
        return found
    return planned_sizes(PlanCase.of(config)) if config.plan.planned_sizes else Sizes.of(config)


def plan_again(case: PlanCase, plan: SizedPlan) -> SizedPlan:
    """Plans another case in the placement of `plan`: chooses again what is not given."""
    if plan.configured:
        return _as_configured(case, plan.name)
    config = placed_as(case.config, plan.config)
    own = {key: getattr(plan.config.plan, key) for key in _CHOSEN_WITH_SIZES}
    return estimate_plan(case, plan.name, _with_free_settings(case, with_plan(config, own)))


def shortage(case: PlanCase, plan: SizedPlan) -> str:
    """Why a plan does not fit, by estimate: the fullest phase with its largest parts."""
    limit = f"{case.limit_bytes / GIB:.2f} that may be used"
    if case.may_use_host and not plan.config.plan.embeddings_in_host:
        limit += ' (plan.per_layer_embeddings = "host" needs less)'
    largest = plan.memory[plan.fullest].most_common(_PARTS_NAMED)
    parts = ", ".join(f"{name} ~{size / GIB:.2f}" for name, size in largest)
    return f"{plan.fullest} takes ~{plan.peak_bytes / GIB:.2f} GiB of the {limit}: {parts}"


def estimate_plan(
    case: PlanCase, name: str, config: Config, *, configured: bool = False
) -> SizedPlan:
    """A configuration with sizes, with its estimated step time and memory."""
    memory = estimate_memory(config, case.shape)
    fits = case.memory_share(memory) <= 1
    return SizedPlan(name, configured, config, case.step(config), memory, fits)


def _as_configured(case: PlanCase, name: str) -> SizedPlan:
    """The configured placement, with planned sizes where none are given."""
    config = _with_sizes(case, case.config, free=())
    return estimate_plan(case, name, config, configured=True)


def _no_placement(case: PlanCase, refused: Sequence[ConfigError]) -> str:
    """Why there is no placement to compare; only `rollout.ahead` excludes colocated ones."""
    topology, ahead = case.topology, case.config.rollout.ahead
    if refused:
        return f"{topology.name}: no placement on it suits the configuration: {refused[0]}"
    return (
        f'{topology.name}: rollout.ahead = "{ahead}" needs samplers with chips of their own, and '
        f'none fit beside a learner on its {topology.chips}; nearest valid: rollout.ahead = "off"'
    )


def _with_free_settings(case: PlanCase, config: Config) -> Config:
    """The configuration with the best sizes, segment, prefill and remat settings.

    Per-layer embeddings are on the chips if that fits, unless host memory makes it faster. With
    `plan.placement = "auto"` settings that the configuration changes from their defaults are kept.
    """
    is_auto = case.config.plan.placement == "auto"
    kept = case.config.plan.changed(*_CHOSEN_WITH_PLACEMENT) if is_auto else ()
    free = [key for key in _CHOSEN_WITH_PLACEMENT if key not in kept]
    if not case.may_use_host or "per_layer_embeddings" in kept:
        return _with_sizes(case, config, free=free)
    plans = []
    for place in ("chips", "host"):
        found = _with_sizes(case, with_plan(config, {"per_layer_embeddings": place}), free=free)
        plans.append(estimate_plan(case, place, found))

    def rank(plan: SizedPlan) -> tuple[bool, float]:
        fits = plan.fits
        return fits, plan.step.tokens_per_s if fits else -case.memory_share(plan.memory)

    return max(plans, key=rank).config


def _with_sizes(case: PlanCase, config: Config, *, free: Collection[str]) -> Config:
    """The placement with its given and the best other sizes; if none fit, the closest to it.

    Memory of the sampler's phases does not depend on micro-batches, nor that of the learner's on
    slots, so the two are chosen separately, and with them the `free` settings.
    """
    model = case.roofline(config)
    for_slots = slot_options(model, case.lengths, free=free)
    for_rows = row_options(model, case.lengths, free=free)
    smallest = with_plan(with_plan(config, for_slots[-1].update), for_rows[-1].update)
    sampler = _best_update(case, smallest, for_slots, ("prefill", "decode"))
    learner = _best_update(case, smallest, for_rows, ("score", "update"))
    return with_plan(with_plan(config, sampler), learner)


def _best_update(
    case: PlanCase, config: Config, options: Sequence[SizeOption], phases: Collection[str]
) -> Mapping[str, Any]:
    """The settings of the fastest option that fits, or of a preferred one that is equally fast.

    If none fits, the option that takes the least memory; of these the fastest.
    """

    def memory_share(option: SizeOption) -> float:
        return case.memory_share(
            estimate_memory(with_plan(config, option.update), case.shape, phases=phases)
        )

    by_speed = sorted(options, key=lambda one: one.seconds)
    fastest = next((one for one in by_speed if memory_share(one) <= 1), None)
    if fastest is None:
        return min(by_speed, key=memory_share).update
    good = [one for one in options if one.seconds <= (1 + _TIE) * fastest.seconds]
    good.sort(key=lambda one: (one.changed, one.size))
    return next(one for one in good if memory_share(one) <= 1).update
