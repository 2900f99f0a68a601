"""The roofline by hand, the compiled programs that it was fitted to, and sharding.

Figures are the TPU compiler's for a v5e: jax 0.10.2, libtpu 0.0.42.1. Decode steps are
without the flush, and a flush is with the host's check, which the compiler does not see.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.data.batching import Packing
from pipeline.data.models.find_shape import shape_of
from pipeline.plan.cost_model.hardware import TOPOLOGIES
from pipeline.plan.cost_model.roofline import RooflineModel, Seconds
from tests.pipeline.plan.presets import preset

V5E = TOPOLOGIES["v5e-8"].chip
LONG = {"rollout.max_prompt_tokens": "256", "rollout.max_new_tokens": "1056"}
"""Sequences of 1,312 positions."""
CAPPED = {"learner.importance_cap": "2.0"}
MEAN = Packing(positions=428.1, tokens=405.4, learned=0.576, sequence=406.4)
"""Of the preset's packed rows without shared prompts, which the figures are of."""


def pace(model: str = "gemma3_1b", **settings: str) -> RooflineModel:
    """Times of a preset with long rows, and with settings of [plan]."""
    return model_of(model, LONG | {f"plan.{key}": value for key, value in settings.items()})


def model_of(model: str, settings: dict[str, str]) -> RooflineModel:
    config = preset(model, *settings.items())
    return RooflineModel(config, shape_of(config), V5E)


def test_the_least_time_is_that_of_the_bytes_or_the_arithmetic() -> None:
    one = pace()
    shape, adapter = one.shape, one.shape.adapter_parameters(one.config.lora)
    # 22 local layers hold 512 positions, 4 hold 1,312, all 32 more in a segment: 1,024 bytes each.
    cache = 1024 * (22 * 512 + 4 * 1312 + 26 * 32)
    decode = one.decode_step(64)
    assert decode.low == pytest.approx((2 * shape.parameters + 64 * cache) / 819e9)
    assert decode.regime == "bandwidth"
    # Scores and values: 4 heads of 256, 2 operations each; half of 256 positions seen on average.
    body, attention = shape.parameters - shape.embedding_parameters, 26 * 4 * 4 * 256 * 128
    prefill = one.prefill(4096, seq=256)
    assert prefill.low == pytest.approx(4096 * (2 * (body + adapter) + attention) / 197e12)
    assert prefill.regime == "compute"
    # One forward pass, with one pass over the vocabulary at learned positions.
    used = body + MEAN.learned * shape.embedding_parameters + adapter
    flops = 2048 * (2 * used + one.attention_flops(MEAN.sequence))
    score = one.score(2048, MEAN)
    assert score.low == pytest.approx(flops / 197e12)
    plain = model_of("gemma3_1b", LONG | {"learner.kl": "k3"}).score(2048, MEAN)
    assert plain.low == score.low
    top_k_s = 1.6e-11 * MEAN.learned * 2048 * 262_144
    assert score.expected - plain.expected == pytest.approx(top_k_s)


def decode(slots: int) -> Callable[[RooflineModel], Seconds]:
    return lambda one: one.decode_step(slots)


def flush(one: RooflineModel) -> Seconds:
    return one.flush(512)


def program(name: str) -> Callable[[RooflineModel], Seconds]:
    return lambda one: one.program(name, MEAN)


E2B = {"plan.remat": "none"}
TOP_128 = {"learner.kl_top_k": "128", "plan.remat": "none"}
COMPILED: list[tuple[str, dict[str, str], Callable[[RooflineModel], Seconds], float, float]] = [
    # model, settings, program, milliseconds, relative error
    ("gemma3_1b", LONG, decode(8), 3.76, 0.13),
    ("gemma3_1b", LONG, decode(512), 29.3, 0.13),
    ("gemma3_1b", LONG | {"plan.kv_cache": "int8"}, decode(512), 21.5, 0.2),
    ("gemma3_1b", LONG | CAPPED | {"plan.rollout_weights": "merged"}, decode(64), 5.06, 0.2),
    ("gemma3_1b", LONG | CAPPED | {"plan.rollout_weights": "int8"}, decode(64), 16.4, 0.2),
    ("gemma3_1b", LONG | {"rollout.top_k": "64"}, decode(128), 17.7, 0.2),
    ("gemma3_4b", LONG, decode(32), 20.3, 0.1),
    ("gemma3_1b", LONG, flush, 7.2, 0.05),
    ("gemma3_1b", LONG | {"plan.kv_cache": "int8"}, flush, 39.3, 0.05),
    ("gemma3_1b", LONG, program("reference_top_k 8"), 2.048 * 22.6, 0.05),
    ("gemma3_1b", LONG | TOP_128, program("gradient 8"), 2.048 * 43.1, 0.05),
    ("gemma4_e2b", E2B, program("prefill 320"), 55.7, 0.1),  # 15 of 35 layers: the others have
    ("gemma4_e2b", E2B, program("segment 512"), 330, 0.25),  # no keys and values
    ("gemma4_e2b", E2B, program("reference_top_k 8"), 95.0, 0.15),
    ("gemma4_e2b", E2B, program("gradient 8"), 213, 0.1),
]


@pytest.mark.parametrize(("model", "settings", "timed", "ms", "within"), COMPILED)
def test_estimates_are_near_the_compiled_programs(
    model: str,
    settings: dict[str, str],
    timed: Callable[[RooflineModel], Seconds],
    ms: float,
    within: float,
) -> None:
    found = timed(model_of(model, settings))
    assert 1e3 * found.expected == pytest.approx(ms, rel=within)
    assert 1e3 * found.low < ms


def test_sharded_weights_cost_link_time() -> None:
    whole, gathered, split = (
        pace("gemma3_4b", **mesh).decode_step(16) for mesh in ({}, {"fsdp": "8"}, {"tp": "4"})
    )
    assert gathered.regime == "links"
    assert split.expected < whole.expected < gathered.expected


def test_embeddings_in_host_memory_take_longer_on_one_chip_and_no_links_on_several() -> None:
    chips, host, eight = (
        pace("gemma4_e2b", learner_devices=devices, per_layer_embeddings=place).decode_step(64)
        for devices, place in (("1", "chips"), ("1", "host"), ("8", "host"))
    )
    # 64 rows of 72 x 128 numbers of 2 bytes, at 8 GB per second.
    assert host.expected - chips.expected == pytest.approx(64 * 72 * 128 * 2 / 8e9)
    assert host.low == chips.low
    assert eight.expected == pytest.approx(host.expected)
