"""The choice of placement and sizes by estimates, and the first sizes of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import load_config
from configs.schema import Config
from pipeline.plan.choose_sizes import plan_file
from pipeline.plan.search.fitting import (
    RESERVE,
    PlanCase,
    choose_placement,
    first_sizes,
    planned_sizes,
    with_chosen_placement,
)
from pipeline.plan.search.size_options import max_useful_rows, max_useful_slots
from pipeline.plan.sizes import Sizes, sized, validated, with_plan
from pipeline.plan.topology import GIB
from tests.pipeline.plan.presets import FREE, PROJECT, case, choice, preset

FOUR_B = PROJECT / "configs/gemma3_4b_gsm8k_v5e8.toml"


def test_no_more_slots_than_rollouts_and_no_more_rows_than_tokens() -> None:
    config = preset("gemma3_1b", *FREE)
    assert max_useful_slots(config) == 64  # 512 rollouts on 8 chips
    assert max_useful_rows(config, case(config).lengths) == 9  # see test_workload
    odd = with_plan(config, {"placement": "split", "samplers": 7, "learner_devices": 1})
    assert max_useful_slots(odd) == 80  # five samplers with 32 prompts at most, 16 rollouts each


def test_the_best_plan_that_fits_is_chosen() -> None:
    found = choice("gemma2_2b", *FREE)
    assert found.chosen.fits
    assert found.chosen.peak_bytes <= (1 - RESERVE) * 15.75 * GIB
    assert {one.name for one in found.compared} > {"split, 7 + 1", "split, 4 + 4"}
    fitting = [one for one in found.compared if one.fits]
    speeds = [one.step.tokens_per_s for one in fitting]
    assert speeds == sorted(speeds, reverse=True)
    assert found.chosen.configured or found.chosen is fitting[0]
    for one in found.compared:
        assert validated(one.config) == one.config  # a run accepts it


CUT = (("rollout.cut_off", "0.9"), ("rollout.partial", "keep"), ("learner.importance_cap", "2"))
FEW = (("rollout.group_size", "8"), ("rollout.prompts_per_step", "4"))
"""Of a sampler's 8 rollouts none can be truncated; of the 32 of a single sampler some can."""


def test_placements_that_a_run_refuses_are_left_out() -> None:
    compared = choice("gemma3_1b", *FREE, *FEW, *CUT).compared
    assert {one.config.plan.placement for one in compared} == {"colocated"}


SPLIT = (("plan.placement", "split"), ("plan.learner_devices", "4"), ("rollout.ahead", "one"))
TWO = (*FREE, *FEW, *CUT, ("rollout.prompts_per_step", "2"), ("plan.sampler_devices", "4"))


@pytest.mark.parametrize(
    ("topology", "overrides", "message"),
    [
        ("v5e-4", TWO, r"^v5e-4: no placement .*: rollout.cut_off = 0.9: would truncate none "),
        (
            "v5e-1",
            (("learner.importance_cap", "3"),),
            r"rollout.ahead = \"one\" needs .* on its 1;",
        ),
    ],
)
def test_the_reason_is_reported_if_there_is_no_placement(
    topology: str, overrides: tuple[tuple[str, str], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        choose_placement(case(preset("gemma3_1b", *SPLIT, *overrides), topology))


def test_on_several_hosts_each_process_is_on_one() -> None:
    found = choice("gemma3_1b", *FREE, topology="v5e-16")
    assert found.chosen is found.compared[0]
    names = {one.name for one in found.compared}
    assert {"split, 2 x 4 + 8", "colocated on 8 of 16, base on every device"} < names
    for one in found.compared:
        assert max(one.config.plan.learner_devices, one.config.plan.devices_per_sampler) <= 8
    split = [("plan.placement", "split"), ("plan.samplers", "2"), ("plan.sampler_devices", "4")]
    chosen = choice("gemma3_1b", *FREE, *split).chosen
    assert chosen.fits
    assert chosen.name.removeprefix("as configured (").startswith("split, 2 x 4 + 8")


def demo(folder: Path, *overrides: tuple[str, str]) -> Config:
    return load_config(PROJECT / "configs/demo.toml", [("run.dir", str(folder)), *overrides])


def test_first_sizes_that_are_not_given_are_planned_within_the_placement(tmp_path: Path) -> None:
    config = preset("gemma3_4b", *FREE)
    sizes = planned_sizes(case(config))
    assert sizes.slots % 8 == sizes.micro_batch_tokens % 16_384 == 0
    assert Sizes.of(choice("gemma3_4b", *FREE).chosen.config) == sizes
    assert first_sizes(demo(tmp_path), None) == Sizes(192, 6144)
    free = demo(tmp_path, *FREE)
    found = first_sizes(free, None)
    assert found == planned_sizes(PlanCase.of(free)) == Sizes.of(sized(free, found))
    assert found.slots % 2 == found.micro_batch_tokens % (2 * 192) == 0
    one = demo(tmp_path, *FREE[:2], ("plan.micro_batch_tokens", "384"))
    assert first_sizes(one, None) == Sizes(found.slots, 384)
    # A resume on the same hardware has those of plan.json.
    for given_ in ((), FREE):
        saved = plan_file(demo(tmp_path, *given_), Sizes(8, 384))
        assert first_sizes(demo(tmp_path, *given_), saved) == Sizes(8, 384)
        other = demo(tmp_path, *given_, ("plan.learner_devices", "1"))
        assert first_sizes(other, saved) == first_sizes(other, None) != Sizes(8, 384)


def test_per_layer_embeddings_are_in_host_memory_only_if_that_is_faster() -> None:
    for model, place in (("gemma4_e2b", "chips"), ("gemma4_e4b", "host")):
        chosen = choice(model, *FREE, topology="v5e-1").chosen
        assert chosen.fits
        assert chosen.config.plan.per_layer_embeddings == place
    own = {"plan.learner_devices": "1", "plan.slots": "1", "plan.micro_batch_tokens": "2048"}
    with pytest.raises(ValueError, match=r'\(plan.per_layer_embeddings = "host" needs less\)'):
        planned_sizes(case(preset("gemma4_e4b", *own.items()), "v5e-1"))
    host = preset("gemma4_e4b", *own.items(), ("plan.per_layer_embeddings", "host"))
    assert planned_sizes(case(host, "v5e-1")) == Sizes(1, 2048)


@pytest.mark.parametrize("name", ["configs/demo.toml", "configs/gemma3_1b_gsm8k_v5e8.toml"])
def test_a_run_takes_what_the_planner_prints_as_chosen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(PROJECT)  # the path of the demo's model is relative to it
    config = load_config(name)
    chosen = choose_placement(case(config)).chosen
    run = with_chosen_placement(config, None)
    assert run.plan.placement != "auto"
    assert choose_placement(case(run)).chosen.config == chosen.config
    assert planned_sizes(case(run)) == Sizes.of(chosen.config)
    assert with_chosen_placement(config, run) == run


def four_b(**plan: str) -> Config:
    return load_config(FOUR_B, [(f"plan.{key}", value) for key, value in plan.items()])


def test_a_resume_keeps_the_placement_on_as_many_devices() -> None:
    other = four_b(placement="colocated", tp="2")
    assert with_chosen_placement(four_b(), other) == other
    assert with_chosen_placement(four_b(learner_devices="4"), other).plan.learner_devices == 4
    assert with_chosen_placement(four_b(remat="dots"), other).plan.remat == "dots"


def test_auto_on_a_cpu_is_colocated_with_what_the_plan_prints(tmp_path: Path) -> None:
    none = [(f"plan.{key}", "none") for key in ("samplers", "sampler_devices")]
    auto = (("plan.placement", "auto"), *none)
    config = demo(tmp_path, *auto)
    run = with_chosen_placement(config, None)
    chosen = choose_placement(PlanCase.of(config)).chosen.config
    assert (run.plan.placement, run.plan.learner_devices) == ("colocated", 2)
    assert run.plan.remat == chosen.plan.remat == "none"
    slower = with_plan(run, {"remat": "dots"})
    assert with_chosen_placement(config, slower).plan.remat == "dots"
    # The shape of a model of the hub may be unknown before the download.
    unknown = with_chosen_placement(demo(tmp_path, *auto, ("model.path", "hf://me/tuned")), None)
    assert unknown.plan == with_plan(config, {"placement": "colocated"}).plan
