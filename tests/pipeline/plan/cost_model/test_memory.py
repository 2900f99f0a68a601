"""The analytic memory model: by hand, and against the caches; the programs that are counted."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from pipeline.compute.decode.programs import DecodePrograms
from pipeline.compute.learner.programs import LearnerPrograms
from pipeline.compute.model.architecture import architecture
from pipeline.data.models.find_shape import shape_of
from pipeline.data.models.hf_config import FULL, SLIDING, read_model_shape
from pipeline.plan.cost_model.memory import memory_beside, memory_during
from pipeline.plan.cost_model.program_memory import ProcessArrays, program_memory
from pipeline.plan.cost_model.programs import built_programs
from tests import tiny
from tests.pipeline.plan import presets

GIB = 2**30


def preset(name="gemma3_1b", **settings):
    overrides = [(key.replace("__", "."), str(value)) for key, value in settings.items()]
    return presets.preset(name, *overrides)


SHAPE = read_model_shape(
    {
        "model_type": "gemma3_text",
        "num_hidden_layers": 26,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 512,
        "vocab_size": 262_144,
    }
)
"""Fields of gemma3-1b."""
BASE = 2 * 999_885_952
ADAPTER = 4 * 25_133_056


def test_caches_by_hand():
    parts = program_memory(preset(), SHAPE, "segment 512")
    # 64 slots a chip; 22 local layers of 512 positions and 4 global ones of 1,024; a key and a
    # value of 256 numbers of two bytes.
    assert parts["kv_local"] == 64 * 22 * 512 * 2 * 256 * 2
    assert parts["kv_global"] == 64 * 4 * 1024 * 2 * 256 * 2
    assert (parts["base"], parts["adapter"]) == (BASE, ADAPTER)


@pytest.mark.parametrize("kv_cache", ["model", "int8"])
@pytest.mark.parametrize("changes", [{}, tiny.GEMMA2])
def test_cache_bytes_equal_those_of_the_sampler(kv_cache, changes):
    hf = tiny.hf_config(**changes)
    config, shape = preset(plan__kv_cache=kv_cache), read_model_shape(hf)
    parts = program_memory(config, shape, "empty")
    row = tiny.bytes_per_row(
        architecture(hf, dtype=jnp.dtype("bfloat16")),
        max_tokens=config.rollout.max_tokens,
        eight_bits=kv_cache == "int8",
    )
    assert parts["kv_local"] + parts["kv_global"] == 64 * row


def test_the_gradient_by_hand():
    parts = program_memory(preset(), SHAPE, "gradient 8")
    # The accumulated gradient and the one to add.
    assert (parts["base"], parts["adapter"], parts["optimizer"]) == (BASE, ADAPTER, 2 * ADAPTER)
    # The inputs of 26 layers and three more arrays, each of 2,048 positions x 1,152 numbers; one
    # layer's arrays: three of the feed-forward width, two of the model's and two of all heads'; two
    # of scores, 4 heads x 512 queries x 2,048 keys in float32; minus what fits fast memory.
    inputs = 29 * 2048 * 1152 * 2
    layer = 2048 * (3 * 6912 + 2 * 1152 + 2 * 4 * 256) * 2
    scores = 2 * 4 * 512 * 2048 * 4
    assert parts["activations"] == inputs + layer + scores - 112 * 2**20


def test_memory_beside_a_program_by_hand():
    config = preset()
    learner = memory_beside(config, SHAPE, "gradient 8")
    assert learner == {"optimizer": 2 * ADAPTER, "adapter": ADAPTER, "base": 0}
    reading = memory_beside(config, SHAPE, "prefill 320")
    slots = program_memory(config, SHAPE, "empty")
    prompts = program_memory(config, SHAPE, "prefill 320")
    assert reading["kv_local"] == slots["kv_local"] + prompts["kv_local"]
    assert memory_beside(config, SHAPE, "segment 512")["kv_global"] == prompts["kv_global"]
    kept = preset(learner__kl_coef=0.1, lora__start="/an/adapter")
    teacher = preset(learner__teacher="/a/teacher", learner__distill_coef=0.5)
    for further in (kept, teacher):
        assert memory_beside(further, SHAPE, "gradient 8")["adapter"] == 2 * ADAPTER
    split = {"placement": "split", "samplers": 4, "learner_devices": 4, "slots": 64}
    apart = preset(**{f"plan__{key}": value for key, value in split.items()})
    assert memory_beside(apart, SHAPE, "segment 64")["optimizer"] == 0
    assert memory_beside(apart, SHAPE, "gradient 8")["kv_local"] == 0


@pytest.mark.parametrize("kind", ["merged", "int8"])
def test_the_weight_copy_counts_in_both_phases(kind):
    config = preset(plan__rollout_weights=kind, learner__importance_cap=2.0)
    layers = 26 * 2 * SHAPE.layer_parameters(0)
    drawing = memory_during(config, SHAPE, "segment 512")
    learning = memory_during(config, SHAPE, "gradient 8")
    merged = kind == "merged"
    copy = SHAPE.base_bytes("bfloat16", quantization="none" if merged else kind)
    assert drawing["base"] == copy + layers
    assert (learning["base"] == BASE + layers) == merged
    assert BASE < learning["base"] <= BASE + layers
    # If merged: the learner's adapter and the zero one for the reference.
    assert drawing["adapter"] == 2 * ADAPTER


def test_layers_of_gemma4_that_share_keys_and_values_have_no_cache():
    shape = shape_of(preset("gemma4_e2b"))
    arrays = ProcessArrays.of(preset("gemma4_e2b"), shape, "segment 512")
    # 12 local and 3 global layers of 15, one kv head, keys and values of 2 bytes.
    parts = arrays.caches(1, 1024)
    assert parts == {"kv_local": 12 * 512 * 2 * 256 * 2, "kv_global": 3 * 1024 * 2 * 512 * 2}
    # All 28 local and 7 global layers read one of these rings.
    assert arrays.caches_read(1024) == 28 * 512 * 2 * 256 * 2 + 7 * 1024 * 2 * 512 * 2
    # The per-layer embeddings are sharded over the eight chips.
    table = 2 * shape.per_layer_embedding_parameters
    assert arrays.base == 2 * shape.parameters - table + table // 8
    host = preset("gemma4_e2b", plan__per_layer_embeddings="host")
    assert ProcessArrays.of(host, shape, "segment 512").base == 2 * shape.parameters - table
    # Rows of 35 x 256 numbers are padded to 72 x 128.
    assert shape.host_bytes("bfloat16") == 262_144 * 72 * 128 * 2


def test_a_prefill_takes_no_weights_of_layers_that_share_keys_and_values():
    config, shape = preset("gemma4_e2b"), shape_of(preset("gemma4_e2b"))
    reading = program_memory(config, shape, "prefill 320")
    beside = memory_beside(config, shape, "prefill 320")
    sampling = program_memory(config, shape, "segment 512")
    shared = range(15, 35)
    assert beside["base"] == 2 * sum(map(shape.layer_parameters, shared))
    assert reading["base"] == sampling["base"] - beside["base"]
    pairs = sum(matrix.lora for layer in shared for matrix in shape.matrices(layer))
    assert reading["adapter"] == sampling["adapter"] - 4 * config.lora.rank * pairs
    # The learner's adapter is there, too.
    assert beside["adapter"] == sampling["adapter"] + 4 * config.lora.rank * pairs
    last = preset("gemma4_e2b", lora__targets="layers/3./mlp/.*")
    assert program_memory(last, shape, "prefill 320")["adapter"] == 0


@pytest.mark.parametrize(
    ("program", "gib"), [("segment 128", 7.09), ("reference_top_k 2", 3.55), ("gradient 2", 8.76)]
)
def test_gemma4_e4b_with_tp_is_near_the_compiled_programs(program, gib):
    mesh = {"plan__tp": 4, "plan__segment_steps": 16, "plan__micro_batch_tokens": 4096}
    config = preset("gemma4_e4b", plan__remat="none", **mesh)
    found = program_memory(config, shape_of(config), program).total()
    assert found / GIB == pytest.approx(gib, rel=0.07)


# --- programs


ROW = 42
WARM: dict[str, Any] = {
    "run": {"phases": ("sft", "grpo")},
    "sft": {"train": {"path": "train.jsonl"}, "steps": 3},
    "learner": {"kl": "topk", "kl_coef": 0.1, "kl_top_k": 4},
    "plan": {"slot_buckets": None, "prompt_buckets": (7,), "micro_batch_tokens": 2 * ROW},
}
FEW: dict[str, Any] = {"plan": {"slot_buckets": (1,)}}


@pytest.mark.parametrize(
    ("tables", "layers"),
    [(WARM, (SLIDING, FULL)), (FEW, (SLIDING,)), (FEW, (FULL,))],
    ids=["rings of two kinds and a warm start", "windows only", "no windows"],
)
def test_a_plan_counts_the_compiled_programs(
    tables: dict[str, Any], layers: tuple[str, ...]
) -> None:
    config = tiny.make_config(**tables)
    hf: dict[str, Any] = {"layer_types": list(layers), "num_hidden_layers": len(layers)}
    policy = tiny.make_policy(**hf)
    sampler = DecodePrograms(policy, config, tiny.VOCABULARY).programs
    learner = LearnerPrograms(policy, config, tiny.VOCABULARY).programs
    found = built_programs(config, read_model_shape(tiny.hf_config(**hf)))
    assert sorted(found) == sorted([*sampler, *learner])
