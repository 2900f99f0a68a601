"""The sizes that a run begins with."""

from __future__ import annotations

import pytest

from configs.load import load_config
from pipeline.plan.sizes import Sizes
from pipeline.plan.start import starting_sizes, with_sizes
from tests.pipeline.plan.presets import FREE, PROJECT, preset


def test_fixed_sizes_are_those_that_were_given() -> None:
    config = preset("gemma3_1b")
    assert starting_sizes(config) == Sizes(512, 16_384)
    assert with_sizes(config) is config


@pytest.mark.parametrize("model", ["gemma3_1b", "gemma3_4b"])
def test_others_are_planned_and_the_configuration_keeps_the_rest(model: str) -> None:
    config = preset(model, *FREE)
    found = with_sizes(config)
    assert Sizes.of(found) == starting_sizes(config)
    assert (config.plan.rollout_rows, config.plan.micro_batch_tokens) == (None, None)
    plan = found.plan.model_copy(update={"rollout_rows": None, "micro_batch_tokens": None})
    assert config.model_copy(update={"plan": plan}) == config


def test_the_demo_can_be_planned() -> None:
    demo = load_config(PROJECT / "configs/demo.toml", FREE)
    demo = demo.model_copy(
        update={
            "model": demo.model.model_copy(
                update={"path": str(PROJECT / "launch/demo/tiny_gemma3")}
            )
        }
    )
    sizes = starting_sizes(demo)
    assert sizes.rollout_rows <= demo.rollout.size
    assert sizes.rollout_rows % 2 == 0
    assert sizes.micro_batch_tokens % 384 == 0


def test_a_gpus_memory_is_not_known() -> None:
    with pytest.raises(ValueError, match=r"plan\.fixed = false: .* nearest valid: true, with"):
        starting_sizes(preset("gemma3_1b", *FREE, ("plan.platform", "gpu")))
