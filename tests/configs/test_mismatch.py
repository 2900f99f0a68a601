"""Bounds of the difference between sampler and learner."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.mismatch import MismatchBounds
from tests.samples import make_config


@pytest.mark.parametrize(
    ("model", "plan", "bounds"),
    [
        ({}, {}, MismatchBounds(probe=1e-3, mean_stop=1e-4, p999=1e-3)),
        ({"dtype": "bfloat16"}, {}, MismatchBounds(probe=0.1, mean_stop=0.05, p999=1.5)),
        ({}, {"rollout_weights": "int8"}, MismatchBounds(probe=0.14, mean_stop=0.05, p999=1.5)),
        ({}, {"kv_cache": "int8"}, MismatchBounds(probe=0.2, mean_stop=0.1, p999=2.0)),
        (
            {"quantization": "int8_matmul"},
            {"kv_cache": "int8"},
            MismatchBounds(probe=0.75, mean_stop=0.2, p999=3.0),
        ),
    ],
)
def test_default_bounds_depend_on_the_number_format(
    tmp_path: Path, model: dict[str, str], plan: dict[str, str], bounds: MismatchBounds
):
    config = make_config(tmp_path, model=model, plan=plan, learner={"importance_cap": 2.0})
    assert config.mismatch_bounds == bounds
    assert config.alarm_rule("disagreement").threshold == bounds.p999


def test_configured_bounds_replace_the_defaults(tmp_path: Path):
    mismatch, alarms = {"probe": 0.1, "mean_stop": 0.2}, {"disagreement": {"above": 0.3}}
    config = make_config(tmp_path, mismatch=mismatch, alarms=alarms)
    assert (config.mismatch_bounds.probe, config.mismatch_bounds.mean_stop) == (0.1, 0.2)
    assert config.alarm_rule("disagreement").threshold == 0.3
