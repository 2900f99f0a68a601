"""The roofline by hand, the compiled programs that it was fitted to, and monotonicity.

Figures are those of docs/benchmarks.md for a v5e: jax 0.10.2, libtpu 0.0.42.1. Decode steps are
without the flush, and a flush is with the host's check, which the compiler does not see.
"""

from __future__ import annotations

import pytest

from pipeline.data.batching import Packing
from pipeline.data.models.find_shape import shape_of
from pipeline.plan.cost_model.hardware import TOPOLOGIES
from pipeline.plan.cost_model.roofline import RooflineModel, Seconds, fixed_time
from tests.pipeline.plan.presets import preset

V5E = TOPOLOGIES["v5e-8"].chip
LONG = (("rollout.max_prompt_tokens", "256"), ("rollout.max_new_tokens", "1056"))
"""The rows of docs/benchmarks.md: 1,312 positions."""
MEAN = Packing(positions=428.1, tokens=405.4, learned=0.576, sequence=406.4)
"""Of the preset's packed rows without shared prompts, which the figures are of."""


def full(*, sequence: float = 1024.0, learned: float = 1.0) -> Packing:
    """Rows without padding, of sequences of equal length."""
    return Packing(positions=sequence, tokens=sequence, learned=learned, sequence=sequence)


def pace(model: str = "gemma3_1b", *overrides: tuple[str, str]) -> RooflineModel:
    config = preset(model, *LONG, *overrides)
    return RooflineModel(config, shape_of(config), V5E)


def test_the_low_end_of_a_decode_step_is_its_bytes() -> None:
    found = pace().decode_step(64)
    shape = pace().shape
    base = 2 * shape.parameters
    # 22 local layers hold 512 positions, 4 hold 1,312, all 32 more in a segment: 1,024 bytes each.
    cache = 1024 * (22 * 512 + 4 * 1312 + 26 * 32)
    assert found.low == pytest.approx((base + 64 * cache) / 819e9)
    assert found.regime == "bandwidth"


def test_the_low_end_of_a_prefill_is_its_arithmetic() -> None:
    found = pace().prefill(4096, seq=256)
    shape = pace().shape
    body = shape.parameters - shape.embedding_parameters
    adapter = shape.adapter_parameters(pace().config.lora)
    # Scores and values: 4 heads of 256, 2 operations each; half of 256 positions seen on average.
    attention = 26 * 4 * 4 * 256 * 128
    assert found.low == pytest.approx(4096 * (2 * (body + adapter) + attention) / 197e12)
    assert found.regime == "compute"


@pytest.mark.parametrize(
    ("slots", "ms"), [(8, 3.76), (64, 5.66), (128, 8.11), (256, 13.9), (512, 29.3)]
)
def test_a_decode_step_is_near_the_compilers_estimate(slots: int, ms: float) -> None:
    found = pace().decode_step(slots)
    assert 1e3 * found.expected == pytest.approx(ms, rel=0.13)
    assert 1e3 * found.low < ms < 1e3 * found.high


@pytest.mark.parametrize(
    ("settings", "slots", "ms"),
    [
        ([("plan.kv_cache", "int8")], 512, 21.5),
        ([("plan.rollout_weights", "merged"), ("learner.importance_cap", "2.0")], 64, 5.06),
        ([("plan.rollout_weights", "int8"), ("learner.importance_cap", "2.0")], 64, 16.4),
        ([("rollout.top_k", "64")], 128, 17.7),
    ],
)
def test_decode_steps_with_other_settings_are_near_the_compilers_estimate(
    settings: list[tuple[str, str]], slots: int, ms: float
) -> None:
    assert 1e3 * pace("gemma3_1b", *settings).decode_step(slots).expected == pytest.approx(
        ms, rel=0.2
    )


def test_a_4b_model_is_near_the_compilers_estimate() -> None:
    found = pace("gemma3_4b").decode_step(32)
    assert 1e3 * found.expected == pytest.approx(20.3, rel=0.1)
    assert 1e3 * found.low < 20.3 < 1e3 * found.high


@pytest.mark.parametrize(
    ("program", "ms", "within"),
    [
        ("prefill 320", 55.7, 0.1),  # 15 of 35 layers: the others have no keys and values
        ("segment 512", 330, 0.25),
        ("reference_top_k 8", 95.0, 0.15),
        ("gradient 8", 213, 0.1),
    ],
)
def test_gemma4_e2b_is_near_the_compiled_programs(program: str, ms: float, within: float) -> None:
    config = preset("gemma4_e2b", ("plan.remat", "none"))
    found = RooflineModel(config, shape_of(config), V5E).program(program, MEAN)
    assert 1e3 * found.expected == pytest.approx(ms, rel=within)
    assert 1e3 * found.low < ms < 1e3 * found.high


@pytest.mark.parametrize(("slots", "kv_cache", "ms"), [(512, "model", 7.2), (512, "int8", 39.3)])
def test_a_flush_is_near_the_compiled_program(slots: int, kv_cache: str, ms: float) -> None:
    found = pace("gemma3_1b", ("plan.kv_cache", kv_cache)).flush(slots)
    assert 1e3 * found.expected == pytest.approx(ms, rel=0.05)
    assert 1e3 * found.low < 0.3 * ms


def test_the_reference_top_k_is_near_the_compiled_program() -> None:
    found = pace().score(2048, MEAN)
    assert 1e6 * found.expected / 2048 == pytest.approx(22.6, rel=0.05)
    # One forward pass, with one pass over the vocabulary at learned positions.
    shape, config = pace().shape, pace().config
    body = shape.parameters - shape.embedding_parameters
    used = body + MEAN.learned * shape.embedding_parameters
    used += shape.adapter_parameters(config.lora)
    flops = 2048 * (2 * used + pace().attention_flops(MEAN.sequence))
    assert found.low == pytest.approx(flops / 197e12)


def test_without_the_top_k_a_forward_pass_remains() -> None:
    plain = pace("gemma3_1b", ("learner.kl", "k3")).score(2048, MEAN)
    top_k = pace().score(2048, MEAN)
    assert top_k.low == plain.low
    entries = MEAN.learned * 2048 * 262_144
    assert top_k.expected - plain.expected == pytest.approx(1.6e-11 * entries)


def test_a_gradient_is_near_the_compiled_program() -> None:
    us = 43.1
    found = pace("gemma3_1b", ("learner.kl_top_k", "128"), ("plan.remat", "none")).gradient(
        2048, MEAN
    )
    assert 1e6 * found.expected / 2048 == pytest.approx(us, rel=0.05)
    assert found.regime == "compute"
    assert 1e6 * found.low / 2048 < us < 1e6 * found.high / 2048


def test_programs_are_timed_by_their_name() -> None:
    one = pace("gemma3_1b", ("plan.slots", "256"))
    # 8 devices: 32 slots and a row of 2,048 on each; a prefill holds 16 prompts of 256.
    segment = one.decode_step(32) * 32 + one.flush(32)
    packing = full(sequence=700.0)
    assert one.program("segment 256", packing) == one.segment(32) == segment
    assert one.program("prefill 256", packing) == one.prefill(4096, seq=256)
    assert one.program("gradient 8", packing) == one.gradient(2048, packing)
    assert one.program("reference_top_k 8", packing) == one.score(2048, packing)


def test_sharded_weights_cost_link_time() -> None:
    whole = pace("gemma3_4b").decode_step(16)
    gathered = pace("gemma3_4b", ("plan.fsdp", "8")).decode_step(16)
    split = pace("gemma3_4b", ("plan.tp", "4")).decode_step(16)
    assert gathered.regime == "links"
    assert split.expected < whole.expected < gathered.expected


def test_ranges_add_up() -> None:
    total = Seconds(1, 2, 4, "compute") + Seconds(0.5, 3, 5, "bandwidth") * 2
    assert total == Seconds(2.0, 8, 14, "bandwidth")
    some = fixed_time(1.6, chip=V5E)
    assert (some.low, some.expected, some.high) == pytest.approx((1.0, 1.6, 2.56))


def test_embeddings_in_host_memory_take_longer_on_one_chip_and_no_links_on_several() -> None:
    chips, host = (
        pace("gemma4_e2b", ("plan.learner_devices", "1"), ("plan.per_layer_embeddings", place))
        for place in ("chips", "host")
    )
    # 64 rows of 72 x 128 numbers of 2 bytes, at 8 GB per second.
    copied = 64 * 72 * 128 * 2 / 8e9
    assert host.decode_step(64).expected - chips.decode_step(64).expected == pytest.approx(copied)
    assert host.decode_step(64).low == chips.decode_step(64).low
    eight = pace("gemma4_e2b", ("plan.per_layer_embeddings", "host"))
    assert eight.decode_step(64).expected == pytest.approx(host.decode_step(64).expected)
