"""Configurations as published: defaults filled in, one spelling, and everything wrong at once."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.model_files.hf_config import FULL, SLIDING, is_multimodal, text_config
from tests import tiny

# As published with google/gemma-3-4b-it, without the vision tower's settings.
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
# As published with google/gemma-3-12b-it.
GEMMA3_12B = GEMMA3_4B | {
    "text_config": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
}


def read(**changes: Any) -> dict[str, Any]:
    return text_config(tiny.hf_config(**changes))


def test_the_text_part_of_gemma_3_4b_has_the_defaults_that_it_leaves_out():
    found = text_config(GEMMA3_4B)
    sizes = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert [found[key] for key in sizes] == [262_208, 2560, 8, 4, 256]
    assert (found["sliding_window"], found["query_pre_attn_scalar"]) == (1024, 256)
    assert (found["rope_theta"], found["rope_local_base_freq"]) == (1e6, 1e4)
    assert found["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert found["layer_types"].count(FULL) == 5
    # What a folder of the text model alone says, and nothing of the vision tower.
    assert (found["model_type"], found["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert (found["eos_token_id"], found["torch_dtype"]) == ([1, 106], "bfloat16")
    assert not {"vision_config", "boi_token_index", "text_config"} & found.keys()
    assert is_multimodal(GEMMA3_4B)


def test_gemma_3_12b_is_read():
    found = text_config(GEMMA3_12B)
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    assert [found[key] for key in sizes] == [3840, 48, 16, 8]


def test_gemma_2_has_its_own_defaults():
    found = text_config({"model_type": "gemma2"})
    caps = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
    assert [found[key] for key in caps] == [50.0, 30.0, 256]
    assert (found["vocab_size"], found["sliding_window"]) == (256_000, 4096)
    assert found["layer_types"][:4] == [SLIDING, FULL, SLIDING, FULL]
    assert (found["rope_theta"], found["rope_scaling"]) == (1e4, None)
    assert found["architectures"] == ["Gemma2ForCausalLM"]
    five = {"model_type": "gemma2", "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
    assert text_config(five)["rope_theta"] == 5e4
    assert (
        text_config({"model_type": "gemma2", "final_logit_softcapping": None})[
            "final_logit_softcapping"
        ]
        is None
    )


def five(**full: Any) -> dict[str, Any]:
    """RoPE as transformers 5 spells it."""
    return {
        "rope_theta": None,
        "rope_local_base_freq": None,
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    }


@pytest.mark.parametrize(
    "scaling",
    [None, {"rope_type": "linear", "factor": 8.0}, {"type": "linear", "factor": 8.0}],
)
def test_transformers_4_and_5_spell_the_same(scaling: dict[str, Any] | None):
    four = read(rope_theta=7e5, rope_local_base_freq=2e4, rope_scaling=scaling)
    assert four == read(**five(rope_theta=7e5, **(scaling or {"rope_type": "default"})))
    assert four["rope_scaling"] == ({"rope_type": "linear", "factor": 8.0} if scaling else None)


def test_what_is_written_out_reads_the_same():
    for given in (tiny.hf_config(), GEMMA3_4B, {"model_type": "gemma2"}):
        assert text_config(text_config(given)) == text_config(given)


def test_what_hugging_face_leaves_out_has_its_defaults():
    found = read(rope_theta=None, rope_local_base_freq=None)
    assert (found["rope_theta"], found["rope_local_base_freq"]) == (1e6, 1e4)
    assert read(rope_theta=None, rope_local_base_freq=None, rope_parameters={}) == found


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model_type": "gemma4"}, "model_type is 'gemma4'; read are 'gemma3_text', 'gemma3' (its"),
        ({"model_type": "gemma3"}, "model_type is 'gemma3', but there is no text_config"),
        ({"head_dim": 0}, "head_dim is 0, not a positive number"),
        ({"vocab_size": "96"}, "vocab_size is '96', not a positive number"),
        ({"num_key_value_heads": 3}, "num_attention_heads is not a multiple of num_key_value_head"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu', only 'gelu_pytorch_tanh'"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, only 1e-06"),
        ({"attention_bias": True}, "attention_bias is True, only False"),
        (
            {"final_logit_softcapping": -1},
            "final_logit_softcapping is -1, neither null nor a posit",
        ),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False, only True"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True, only False"),
        ({"layer_types": [FULL] * 6}, "layer_types names 6 layers, num_hidden_layers is 7"),
        ({"layer_types": ["chunked"] * 7}, "layer_types has chunked; computed are sliding_attent"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn', only"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type is 'yarn', only"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type 'linear' without a factor"),
        (five(rope_type="default", partial_rotary_factor=0.5), "partial_rotary_factor is not comp"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], line: str):
    with pytest.raises(ValueError, match=r"^config\.json: .") as raised:
        read(**changes)
    assert line in str(raised.value)


def test_all_that_is_wrong_is_named_at_once():
    with pytest.raises(ValueError, match=r"rope_type.*; rms_norm_eps.*; attention_bias"):
        read(rms_norm_eps=1e-5, attention_bias=True, rope_scaling={"rope_type": "yarn"})
    with pytest.raises(ValueError, match=r"head_dim is -1, not .*; sliding_window is 0, not "):
        read(head_dim=-1, sliding_window=0)
