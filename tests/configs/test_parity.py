"""Bounds of the difference between sampler and learner."""

from __future__ import annotations

from pathlib import Path

from configs.parity import ParityBounds
from tests.fakes import make_config


def test_default_bounds_depend_on_the_dtype_of_the_base(tmp_path: Path):
    exact = make_config(tmp_path).parity_bounds
    assert exact == ParityBounds(probe=1e-4, mean_stop=1e-4, p999=1e-3)
    rounded = make_config(tmp_path, model={"dtype": "bfloat16"}).parity_bounds
    assert rounded == ParityBounds(probe=0.75, mean_stop=0.05, p999=0.5)
    integers = make_config(tmp_path, model={"quantization": "int8_matmul"})
    assert integers.parity_bounds == rounded
    for kind, dtype, bounds in (
        ("merged", "float32", exact),
        ("merged", "bfloat16", rounded),
        ("int8", "float32", ParityBounds(probe=1.0, mean_stop=0.05, p999=0.5)),
        ("int8_matmul", "bfloat16", ParityBounds(probe=1.25, mean_stop=0.1, p999=1.25)),
    ):
        own = make_config(
            tmp_path,
            model={"dtype": dtype},
            plan={"rollout_weights": kind},
            learner={"importance_cap": 2.0},
        )
        assert own.parity_bounds == bounds, (kind, dtype)
        assert own.alarm_rule("disagreement").threshold == bounds.p999


def test_configured_bounds_replace_the_defaults(tmp_path: Path):
    parity, alarms = {"probe": 0.1, "mean_stop": 0.2}, {"disagreement": {"above": 0.3}}
    config = make_config(tmp_path, parity=parity, alarms=alarms)
    assert (config.parity_bounds.probe, config.parity_bounds.mean_stop) == (0.1, 0.2)
    assert config.alarm_rule("disagreement").threshold == 0.3
