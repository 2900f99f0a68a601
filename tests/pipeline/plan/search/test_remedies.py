"""What would make a plan fit: everything that is told does, and is what a run would take."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from configs.toml_text import show_value
from pipeline.plan.search.remedies import remedies
from pipeline.plan.search.search import choose
from tests.pipeline.plan.presets import FREE, case, preset

FOUR = "gemma3_4b"
CASES = [
    ("v5e-1", (*FREE, ("plan.hbm_gib", "6"))),
    ("v5e-8", (("plan.slots", "4096"), ("rollout.prompts_per_step", "256"))),
    ("v5e-8", (("plan.slots", "4096"), ("plan.hbm_gib", "5"))),
    ("v5e-8", (("plan.rollout_weights", "merged"), ("learner.importance_cap", "2"))),
    ("v5e-8", (("plan.remat", "none"), ("plan.micro_batch_tokens", "131072"))),
]


@pytest.mark.parametrize(("topology", "overrides"), CASES)
def test_everything_that_is_told_makes_it_fit(
    topology: str, overrides: tuple[tuple[str, str], ...]
) -> None:
    given = case(preset(FOUR, *overrides), topology)
    plan = choose(given).chosen
    assert not plan.fits
    found = remedies(given, plan)
    assert any(one.settings for one in found)
    for one in found:
        assert one.gib <= one.limit_gib
        texts = {key: show_value(value) for key, value in one.settings.items()}
        taken = (*overrides, *texts.items())
        named = re.match(r"--topology (\S+)", one.change)
        again = case(preset(FOUR, *taken), named[1] if named else topology)
        if chips := re.match(r"chips of ([\d.]+) GiB", one.change):
            chip = replace(again.topology.chip, hbm_gib=float(chips[1]))
            again = replace(again, topology=replace(again.topology, chip=chip))
        choice = choose(again)
        assert (choice.best if named else choice.chosen).fits, one.change


def test_one_change_is_told_alone_several_only_where_none_is_enough() -> None:
    few = case(preset(FOUR, *FREE, ("plan.hbm_gib", "9")), "v5e-1")
    changes = [one.change for one in remedies(few, choose(few).chosen) if one.settings]
    assert changes[:2] == ['model.quantization = "int8"', "lora.rank = 16"]
    tight = (("plan.slots", "4096"), ("plan.hbm_gib", "5"))
    fixed = case(preset(FOUR, *tight))
    (together,) = [one for one in remedies(fixed, choose(fixed).chosen) if one.settings]
    assert together.settings["plan.fixed"] is False
    assert together.settings["model.quantization"] == "nf4"
