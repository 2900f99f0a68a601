"""How long sizes may be measured at the start of a run, and how long that is expected to take."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from configs.schema import Config
from pipeline.contracts.sizes import Sizes, sized
from pipeline.inputs.dataset.batching import batch_shape
from pipeline.plan.cost_model.compile_time import compile_s
from pipeline.plan.cost_model.programs import built_programs
from pipeline.plan.cost_model.timing import Seconds, fixed
from pipeline.plan.ladder import Ladder
from pipeline.plan.search.candidates import PLACE, placed
from pipeline.plan.search.search import Case, Planned, with_plan

SHARE = 0.02
"""Default of `plan.calibration_share`."""
_OF_STEPS_S = 3600.0
"""A budget of steps has no seconds: the share is of an hour."""
SEGMENTS, PREFILLS, FILLS, MICRO_BATCHES = 6, 7, 6, 4
"""How often a program runs when it is measured, the first time of each among them."""


def share_s(config: Config, *, now_s: float | None = None) -> float:
    """Seconds in which sizes may be measured.

    Args:
        config: gives the budget and the share.
        now_s: seconds since 1970, from which on a budget with a date is left; None: now.
    """
    share, budget = config.plan.calibration_share, config.budget
    whole_s = _OF_STEPS_S if budget.time_s is None else budget.time_s
    if budget.until_s is not None:
        whole_s = max(0.0, budget.until_s - (time.time() if now_s is None else now_s))
    return (SHARE if share is None else share) * whole_s


def calibration_s(case: Case, plan: Planned) -> Seconds:
    """Seconds in which a run with this plan measures sizes; none where it does not.

    Expected is the share of the budget, or less where there are no more sizes, or more where the
    largest take longer, which are measured in any case. At least, where speeds were kept by an
    earlier run, the micro-batches in force are measured. At most a size that is begun within the
    share ends after it.
    """
    config, chip = plan.config, case.topology.chip
    share = share_s(config)
    if config.plan.fixed or not share or config.plan.platform == "gpu":
        return fixed(0.0, chip=chip)
    given = placed(case.config, {key: getattr(config.plan, key) for key in PLACE}).plan
    bounds = {key: getattr(given, key) for key in ("slots", "micro_batch_tokens")}
    ladder = Ladder.of(replace(case, config=with_plan(config, bounds)), Sizes.of(config))
    slots, rows = list(_sizes(config, ladder, "slots")), list(_sizes(config, ladder, "rows"))
    drawn = [_sampler_s(case, one) for one in slots]
    learned = [_learner_s(case, one) for one in rows]
    compiled = list(_compiled_s(case, [config, *slots, *rows]))[1:]
    each = [run + built for run, built in zip([*drawn, *learned], compiled, strict=True)]
    largest, whole = drawn[0] + learned[0], sum(each, fixed(0.0, chip=chip))
    late = share + max(one.high for one in each)
    expected = max(largest.expected, min(share, whole.expected))
    return Seconds(
        low=min(_learner_s(case, config).low, expected),
        expected=expected,
        high=max(largest.high, min(late, whole.high)),
        regime=whole.regime,
    )


def _sizes(config: Config, ladder: Ladder, what: str) -> Iterator[Config]:
    """Configurations with the sizes of one of the ladders, the other size being the plan's."""
    own = Sizes.of(config)
    for size in getattr(ladder, what):
        changed = (
            replace(own, slots=size)
            if what == "slots"
            else replace(own, micro_batch_tokens=size * config.row_tokens)
        )
        yield sized(config, changed)


def _sampler_s(case: Case, config: Config) -> Seconds:
    """Measuring a sampler's programs, as `pipeline.compute.decode.timing` does."""
    pace, plan = case.pace(config), config.plan
    total = fixed(0.0, chip=case.topology.chip)
    for bucket in config.prompt_buckets:
        total += pace.prefill(config.prefill_rows(bucket) * bucket, seq=bucket) * PREFILLS
        total += pace.settle(config.slots // plan.sampler_shards) * FILLS
    for size in plan.slot_ladder:
        slots = size // plan.sampler_shards
        once = pace.decode_step(slots) * config.segment_steps + pace.settle(slots)
        total += once * SEGMENTS
    return total


def _learner_s(case: Case, config: Config) -> Seconds:
    """Measuring a learner's micro-batches, as `pipeline.compute.learner.timing` does."""
    pace, settings, seq = case.pace(config), config.learner, case.lengths.sequence
    others = int(settings.kl_coef > 0) + int(settings.teacher is not None)
    total = fixed(0.0, chip=case.topology.chip)
    for rows in batch_shape(config, pad=0).sizes:
        positions = rows * config.row_tokens // config.plan.learner_shards
        once = pace.gradient(positions, seq=seq) + pace.score(positions, seq=seq) * others
        total += once * MICRO_BATCHES
    return total


def _compiled_s(case: Case, configs: Sequence[Config]) -> Iterator[Seconds]:
    """Compiling for one configuration after the other what was not compiled before."""
    known: set[tuple[str, int]] = set()
    for config in configs:
        named = {_key(config, name): name for name in built_programs(config, case.shape)}
        new = [name for key, name in named.items() if key not in known]
        known |= named.keys()
        yield compile_s(new, case.shape, chip=case.topology.chip)


def _key(config: Config, name: str) -> tuple[str, int]:
    """The program's name, and what beside that it depends on of the sizes."""
    kind, _, size = name.partition(" ")
    if kind in {"empty", "fill"}:
        return name, config.slots
    return name, config.prefill_rows(int(size)) if kind == "prefill" else 0
