"""What is chosen, and why nothing else: by the estimates, so only they are tested here."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.load import presets
from pipeline.plan.memory import estimate
from pipeline.plan.options import ladder, larger, most_rows, most_slots
from pipeline.plan.search import (
    GAIN,
    RESERVE,
    Case,
    checked,
    choose,
    in_its_place,
    planned_sizes,
    shortage,
    with_plan,
)
from pipeline.plan.sizes import Sizes
from pipeline.plan.topology import GIB
from tests.pipeline.plan.presets import FREE, case, preset

MODELS = [name.split("/")[1].partition("_gsm8k")[0] for name in presets() if "gsm8k" in name]


def small_chip(config: Case, gib: float) -> Case:
    """The same on chips with less memory."""
    chip = replace(config.topology.chip, hbm_gib=gib)
    return replace(config, topology=replace(config.topology, chip=chip))


@given(most=st.integers(1, 3000), tile=st.sampled_from([1, 4]))
def test_a_ladder_rises_by_about_a_quarter(most: int, tile: int) -> None:
    found = ladder(most, tile=tile)
    assert found[-1] == most
    assert found == sorted(set(found))
    for small, large in pairwise(found[:-1]):
        assert large == larger(small, tile=tile)
        assert large <= 1.25 * small + tile
    assert ladder(0) == []


def test_no_more_slots_than_rollouts_and_no_more_rows_than_tokens() -> None:
    config = preset("gemma3_1b", *FREE)
    assert most_slots(config) == 64  # 512 rollouts on 8 chips
    assert most_rows(config, case(config).lengths) == 14
    odd = with_plan(config, {"placement": "split", "samplers": 7, "learner_devices": 1})
    assert most_slots(odd) == 80  # five of 32 prompts at most, 16 rollouts each


@pytest.mark.parametrize("model", MODELS)
def test_every_preset_has_a_plan(model: str) -> None:
    given_ = case(preset(model, *FREE))
    found = choose(given_)
    assert found.chosen.fits
    assert found.chosen.fullest.total <= (1 - RESERVE) * 15.75 * GIB
    assert {one.name for one in found.compared} > {"split, 7 + 1", "split, 4 + 4"}
    fitting = [one for one in found.compared if one.fits]
    speeds = [one.step.tokens_per_s for one in fitting]
    assert speeds == sorted(speeds, reverse=True)
    assert found.chosen.same_run
    assert found.best is next(one for one in found.compared if one.same_run)
    assert (
        max(one.step.tokens_per_s for one in fitting if one.same_run)
        <= (1 + GAIN) * found.chosen.step.tokens_per_s
    )
    for one in found.compared:
        assert checked(one.config) == one.config  # a run would take it


def test_replicated_wins_for_a_base_that_is_small() -> None:
    found = choose(case(preset("gemma3_1b", *FREE)))
    assert found.chosen.config.plan.placement == "colocated"
    assert found.chosen.config.plan.fsdp * found.chosen.config.plan.tp == 1


def test_fixed_sizes_are_taken_as_they_are_and_compared() -> None:
    config = preset("gemma3_1b", ("plan.rollout_rows", "64"))
    found = choose(case(config))
    assert found.chosen.configured
    assert found.chosen.config == config
    assert found.best.step.tokens_per_s > 1.2 * found.chosen.step.tokens_per_s


def test_given_sizes_are_bounds_where_they_are_planned() -> None:
    bounds = [("plan.fixed", "false"), ("plan.rollout_rows", "128")]
    found = choose(case(preset("gemma3_1b", *bounds)))
    for one in found.compared:
        plan = one.config.plan
        assert one.config.rollout_rows <= 128
        assert one.config.micro_batch_rows * one.config.row_tokens <= 16_384
        assert one.config.rollout_rows % plan.sampler_shards == 0


def test_bounds_that_leave_nothing_are_told() -> None:
    bounds = [("plan.fixed", "false"), ("plan.rollout_rows", "8")]
    config = with_plan(preset("gemma3_1b", *bounds), {"rollout_rows": 4})
    with pytest.raises(ValueError, match="leave no room for a slot on each of 8 devices"):
        choose(case(config))


def test_what_is_chosen_is_the_least_that_is_as_good() -> None:
    given_ = case(preset("gemma3_1b", *FREE))
    plan = choose(given_).chosen
    slots, tokens = plan.config.rollout_rows, plan.config.micro_batch_rows * 2048
    for update in ({"rollout_rows": slots - 64}, {"micro_batch_tokens": 2 * tokens}):
        other = given_.step(with_plan(plan.config, update))
        assert other.tokens_per_s < 1.02 * plan.step.tokens_per_s


def test_less_memory_means_fewer_slots_until_nothing_fits() -> None:
    given_ = case(preset("gemma3_4b", *FREE))
    rows = []
    for gib in (15.75, 12.0, 10.5):
        one = small_chip(given_, gib)
        sizes = planned_sizes(one)
        memory = estimate(with_plan(given_.config, vars(sizes)), given_.shape)
        assert max(phase.total for phase in memory.values()) <= one.limit_bytes
        rows.append(sizes.rollout_rows)
    assert rows == sorted(rows, reverse=True)
    assert rows[0] > rows[-1]
    with pytest.raises(ValueError, match=r"no sizes fit: .* takes ~.* GiB of the 2\.85"):
        planned_sizes(small_chip(given_, 3.0))
    assert not choose(small_chip(given_, 0.5)).chosen.fits


def test_a_run_plans_within_its_own_placement() -> None:
    config = preset("gemma3_4b", *FREE)
    sizes = planned_sizes(case(config))
    assert sizes.rollout_rows % 8 == 0
    assert sizes.micro_batch_tokens % 16_384 == 0
    assert Sizes.of(choose(case(config)).chosen.config) != sizes  # another placement is better


def test_what_was_learned_counts_in_place_of_the_reserve() -> None:
    given_ = case(preset("gemma3_4b", *FREE))
    free = planned_sizes(given_)
    low = planned_sizes(replace(given_, memory_ratio={"prefill": 1.5, "decode": 1.5}))
    assert low.rollout_rows < free.rollout_rows
    assert low.micro_batch_tokens == free.micro_batch_tokens


def test_what_is_configured_stays_so_however_often_it_is_planned_again() -> None:
    given_ = case(preset("gemma3_4b", *FREE))
    plan = next(one for one in choose(given_).compared if one.configured)
    for ratio in (1.3, 1.5):
        learned = replace(given_, memory_ratio=dict.fromkeys(plan.memory, ratio))
        again = in_its_place(learned, plan)
        assert again is not None
        assert again.configured
        for key in ("segment_steps", "prefill_tokens", "remat"):
            assert getattr(again.config.plan, key) == getattr(plan.config.plan, key)
        plan = again


def test_a_shortage_names_phase_and_part() -> None:
    given_ = small_chip(case(preset("gemma3_4b")), 8.0)
    told = shortage(given_, choose(given_).chosen)
    assert told.startswith("as configured (colocated, base on every device): prefill takes ~11.")
    assert "of the 7.60 that may be used, base ~7.23" in told
