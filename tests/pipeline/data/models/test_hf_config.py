"""Published configurations: defaults, normalized RoPE settings, all problems at once."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import transformers

from pipeline.data.models.find_shape import PUBLISHED
from pipeline.data.models.hf_config import (
    FULL,
    SLIDING,
    is_multimodal,
    read_model_shape,
    tensor_shapes,
    text_config,
)
from tests import tiny

CONFIGS = Path(__file__).parents[3] / "slow" / "configs"
GEMMA3_4B: dict[str, Any] = json.loads((CONFIGS / "gemma3_4b.json").read_text())
"""As published with google/gemma-3-4b-it."""
GEMMA4_E2B: dict[str, Any] = json.loads((CONFIGS / "gemma4_e2b.json").read_text())
"""As published with google/gemma-4-E2B-it, without settings of the towers."""


def read(**changes: Any) -> dict[str, Any]:
    return text_config(tiny.hf_config(**changes))


def gemma4(**changes: Any) -> dict[str, Any]:
    return text_config(GEMMA4_E2B | {"text_config": GEMMA4_E2B["text_config"] | changes})


def test_omitted_settings_of_gemma_3_4b_get_defaults():
    found = text_config(GEMMA3_4B)
    sizes = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert [found[key] for key in sizes] == [262_208, 2560, 8, 4, 256]
    assert (found["sliding_window"], found["query_pre_attn_scalar"]) == (1024, 256)
    assert (found["rope_theta"], found["rope_local_base_freq"]) == (1e6, 1e4)
    assert found["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert found["layer_types"].count(FULL) == 5
    # A text-only folder has these settings, and none of the vision tower.
    assert (found["model_type"], found["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert (found["eos_token_id"], found["torch_dtype"]) == ([1, 106], "bfloat16")
    assert not {"vision_config", "boi_token_index", "text_config"} & found.keys()
    assert is_multimodal(GEMMA3_4B)


def test_a_gemma_2_may_have_no_soft_cap_and_ropes_of_transformers_5():
    rope = {"rope_type": "default", "rope_theta": 5e4}
    caps = {"final_logit_softcapping": None}
    found = text_config({"model_type": "gemma2", "rope_parameters": rope} | caps)
    assert (found["rope_theta"], found["rope_scaling"]) == (5e4, None)
    assert (found["final_logit_softcapping"], found["attn_logit_softcapping"]) == (None, 50.0)
    assert found["layer_types"][:4] == [SLIDING, FULL, SLIDING, FULL]


def test_gemma_4_e2b_is_the_one_that_is_known_without_a_download():
    assert is_multimodal(GEMMA4_E2B)
    shape = read_model_shape(GEMMA4_E2B)
    assert shape == read_model_shape(PUBLISHED["gemma-4-e2b"])
    assert [shape.kv_source(n) for n in (3, 14, 15, 19, 33, 34)] == [3, 14, 13, 14, 13, 14]
    assert (shape.head_dim_of(4), shape.hidden_of(15)) == (512, 12_288)
    sizes = [prod(size) for _, size in tensor_shapes(shape)]
    assert sum(sizes) == shape.parameters


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "gemma4_text"])
def test_defaults_are_those_of_transformers(kind: str):
    theirs = transformers.AutoConfig.for_model(kind).to_dict()
    ours = text_config({"model_type": kind})
    assert text_config(theirs) == ours | text_config(theirs)
    same = ours.keys() & theirs.keys() - {"architectures", "rope_parameters"}
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
    assert read_model_shape(theirs) == read_model_shape({"model_type": kind})


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gemma3", "gemma4_text", "gemma4"])
def test_every_key_of_transformers_is_read_or_ignored_and_others_are_refused(name: str):
    theirs = transformers.AutoConfig.for_model(name).to_dict()
    theirs = theirs.get("text_config", theirs)
    invalid = dict.fromkeys(theirs, "x") | {"model_type": theirs["model_type"], "layer_scale": 2}
    with pytest.raises(ValueError, match=r"layer_scale = 2 is unknown; remove it") as raised:
        text_config(invalid)
    assert str(raised.value).count("is unknown") == 1


def per_layer_config(**changes: Any) -> dict[str, Any]:
    """Gemma 4 settings as transformers 5.15 writes them: without `global_head_dim`."""
    text = {k: v for k, v in GEMMA4_E2B["text_config"].items() if k != "global_head_dim"}
    layers = {f"{n:02}": {"head_dim": 512} for n in range(4, 35, 5)}
    return GEMMA4_E2B | {"text_config": text | {"per_layer_config": layers} | changes}


def test_the_layers_of_transformers_5_15_have_their_own_settings():
    assert read_model_shape(per_layer_config()) == read_model_shape(GEMMA4_E2B)
    other = {str(n): {"head_dim": 128} for n in range(4, 35, 5)}
    assert read_model_shape(per_layer_config(per_layer_config=other)).global_head_dim == 128
    assert read_model_shape(per_layer_config(per_layer_config={})).global_head_dim == 256
    assert "per_layer_config" not in text_config(per_layer_config())
    with pytest.raises(ValueError, match="global_head_dim is 128, and 512 in per_layer_config"):
        text_config(per_layer_config(global_head_dim=128))


LINEAR = {"rope_type": "linear", "factor": 8.0}


def five(**full: Any) -> dict[str, Any]:
    """RoPE settings in the format of transformers 5."""
    return {
        "rope_theta": None,
        "rope_local_base_freq": None,
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    }


@pytest.mark.parametrize("scaling", [None, LINEAR, {"type": "linear", "factor": 8.0}])
def test_formats_of_transformers_4_and_5_are_equivalent(scaling: dict[str, Any] | None):
    four = read(rope_theta=7e5, rope_local_base_freq=2e4, rope_scaling=scaling)
    assert four == read(**five(rope_theta=7e5, **(scaling or {"rope_type": "default"})))
    assert four["rope_scaling"] == (LINEAR if scaling else None)


QUANTIZED = {"quantization_config": {"quant_method": "fp8"}}
LINEAR_FLAT = {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}
CONTRADICTORY = five(rope_type="default", rope_theta=1e4) | {"rope_theta": 1e6}
YARN = {"rope_type": "yarn", "factor": 2.0}
GLOBAL_YARN = GEMMA4_E2B["text_config"]["rope_parameters"] | {FULL: YARN}


@pytest.mark.parametrize(
    ("reader", "changes", "line"),
    [
        (read, {"model_type": "gemma5"}, "model_type is 'gemma5'; supported are 'gemma3_text', '"),
        (read, {"model_type": "gemma3"}, "model_type is 'gemma3', but there is no text_config"),
        (read, {"num_key_value_heads": 3}, "num_attention_heads is not a multiple of num_key_val"),
        (read, {"hidden_activation": "silu"}, "hidden_activation is 'silu', only 'gelu_pytorch_t"),
        (read, {"final_logit_softcapping": -1}, "final_logit_softcapping is -1, neither null nor"),
        (read, {"layer_types": [FULL] * 6}, "layer_types names 6 layers, num_hidden_layers is 7"),
        (read, {"rope_scaling": YARN}, "rope_type is 'yarn', supported:"),
        (read, {"head_dim": 7}, "head_dim is 7, but must be even: RoPE rotates pairs"),
        (read, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which transfor"),
        (read, LINEAR_FLAT, "rope_parameters has 'factor'; a Gemma 3 or 4 has only full_attentio"),
        (read, CONTRADICTORY, "rope_theta is 1000000.0 in the top level and 10000.0 in rope_para"),
        (read, QUANTIZED, "('fp8'), which is not supported; set model.path to"),
        (gemma4, {"enable_moe_block": True}, "a mixture of experts (26B-A4B) is not supported ye"),
        (gemma4, {"attention_k_eq_v": True}, "one projection for keys and values (31B) is not su"),
        (gemma4, {"num_global_key_value_heads": 4}, "num_global_key_value_heads is 4; other head"),
        (gemma4, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all', o"),
        (gemma4, {"layer_types": [FULL, *34 * [SLIDING]]}, "layer_types ends with sliding_attenti"),
        (gemma4, {"num_kv_shared_layers": 31}, "num_kv_shared_layers is 31: the other layers lac"),
        (gemma4, {"rope_parameters": GLOBAL_YARN}, "rope_type is 'yarn', supported: 'proportional"),
    ],
)
def test_unsupported_settings_are_refused(reader: Any, changes: dict[str, Any], line: str):
    with pytest.raises(ValueError, match=r"^config\.json: .") as raised:
        reader(**changes)
    assert line in str(raised.value)


def test_all_problems_are_reported_at_once():
    with pytest.raises(ValueError, match=r"rope_type.*; rms_norm_eps.*; attention_bias"):
        read(rms_norm_eps=1e-5, attention_bias=True, rope_scaling={"rope_type": "yarn"})
