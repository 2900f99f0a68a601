"""What a `config.json` says about the text model, with all that transformers fills in. No JAX."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

MULTIMODAL = "gemma3"
"""`model_type` of a folder whose text model stands beside a vision tower, in `text_config`."""

SLIDING, FULL = "sliding_attention", "full_attention"
"""What a layer attends to, in transformers' words."""

_SIZES: dict[str, Any] = {
    "num_hidden_layers": 26,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
# Published files leave out what is the default of transformers' Gemma3TextConfig or Gemma2Config.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        **_SIZES,
        "vocab_size": 262_208,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "gemma2": {
        **_SIZES,
        "vocab_size": 256_000,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
}
_NULLABLE = ("attn_logit_softcapping", "final_logit_softcapping")
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "rms_norm_eps": (1e-6,),
    "attention_bias": (False,),
    "tie_word_embeddings": (True,),
    "use_bidirectional_attention": (False, None),
}
_INHERITED = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
_ARCHITECTURES = {"gemma3_text": "Gemma3ForCausalLM", "gemma2": "Gemma2ForCausalLM"}


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The whole configuration of the text model, as a folder of it alone would have it.

    Defaults are written out, `layer_types` among them. RoPE is spelled as transformers 4 does and
    5 still reads it: `rope_theta`, `rope_scaling` (None, or linear with its `factor`) and, where
    local layers have their own, `rope_local_base_freq`.

    Args:
        hf: a `config.json` of Gemma 2, of Gemma 3 text, or of a multimodal Gemma 3.

    Raises:
        ValueError: one line with everything in it that is not computed here.
    """
    text = _text_part(hf)
    kind = text.get("model_type")
    if kind not in _DEFAULTS:
        raise ValueError(
            f"config.json: model_type is {hf.get('model_type')!r}; read are 'gemma3_text', "
            f"'{MULTIMODAL}' (its text part) and 'gemma2'"
        )
    given = {key: value for key, value in text.items() if value is not None or key in _NULLABLE}
    whole = {**_DEFAULTS[kind], **given, "architectures": [_ARCHITECTURES[kind]]}
    wrong = _wrong_sizes(whole)
    if not wrong:
        whole["layer_types"] = _layer_types(whole)
        full, sliding = _ropes(whole)
        wrong += _wrong_layers(whole) + _wrong_rope(full, ("default", "linear"))
        if kind != "gemma2":
            wrong += _wrong_rope(sliding, ("default",))
    for key, values in _ONLY.items():
        if whole.get(key, values[0]) not in values:
            wrong.append(f"{key} is {whole[key]!r}, only {values[0]!r} is computed")
    if wrong:
        raise ValueError("config.json: " + "; ".join(dict.fromkeys(wrong)))
    whole |= {"rope_theta": full["rope_theta"], "rope_scaling": None}
    if full["rope_type"] == "linear":
        whole["rope_scaling"] = {"rope_type": "linear", "factor": full["factor"]}
    if kind != "gemma2":
        whole["rope_local_base_freq"] = sliding["rope_theta"]
    for key in ("rope_parameters", "sliding_window_pattern", "_sliding_window_pattern"):
        whole.pop(key, None)
    return whole


def is_multimodal(hf: Mapping[str, Any]) -> bool:
    """Whether the folder holds more than a text model."""
    return hf.get("model_type") == MULTIMODAL


def _text_part(hf: Mapping[str, Any]) -> dict[str, Any]:
    if not is_multimodal(hf):
        return dict(hf)
    text = hf.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"config.json: model_type is {MULTIMODAL!r}, but there is no text_config")
    inherited = {key: hf[key] for key in (*_INHERITED, "dtype", "torch_dtype") if key in hf}
    return {"model_type": "gemma3_text", **inherited, **text}


def _wrong_sizes(text: Mapping[str, Any]) -> list[str]:
    wrong = [
        f"{key} is {text[key]!r}, not a positive number"
        for key in (*_SIZES, "vocab_size")
        if isinstance(text[key], bool) or not isinstance(text[key], int | float) or text[key] <= 0
    ]
    wrong += [
        f"{key} is {text[key]!r}, neither null nor a positive number"
        for key in _NULLABLE
        if text[key] is not None and not (isinstance(text[key], int | float) and text[key] > 0)
    ]
    if not wrong and text["num_attention_heads"] % text["num_key_value_heads"]:
        wrong.append("num_attention_heads is not a multiple of num_key_value_heads")
    return wrong


def _layer_types(text: Mapping[str, Any]) -> list[str]:
    """As given; by default five local layers to a global one, in Gemma 2 one to one."""
    if "layer_types" in text:
        return text["layer_types"]
    pattern = text.get("sliding_window_pattern", 6) if text["model_type"] != "gemma2" else 2
    return [SLIDING if (n + 1) % pattern else FULL for n in range(text["num_hidden_layers"])]


def _wrong_layers(text: Mapping[str, Any]) -> list[str]:
    kinds, count = text["layer_types"], text["num_hidden_layers"]
    if len(kinds) != count:
        return [f"layer_types names {len(kinds)} layers, num_hidden_layers is {count}"]
    odd = sorted({str(kind) for kind in kinds} - {SLIDING, FULL})
    return [f"layer_types has {', '.join(odd)}; computed are {SLIDING} and {FULL}"] if odd else []


def _ropes(text: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """RoPE of global and of local layers; transformers 5 and 4 write it differently."""
    given = text.get("rope_parameters") or {}
    scaling = _one_spelling(text.get("rope_scaling"))
    if text["model_type"] == "gemma2":
        both = {"rope_type": "default", "rope_theta": text.get("rope_theta", 10_000.0)}
        both |= scaling | _one_spelling(given)
        return both, both
    full = {"rope_type": "default", "rope_theta": text.get("rope_theta", 1_000_000.0)}
    local = {"rope_type": "default", "rope_theta": text.get("rope_local_base_freq", 10_000.0)}
    return full | scaling | _one_spelling(given.get(FULL)), local | _one_spelling(
        given.get(SLIDING)
    )


def _one_spelling(rope: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"rope_type" if key == "type" else key: value for key, value in (rope or {}).items()}


def _wrong_rope(rope: Mapping[str, Any], kinds: Collection[str]) -> list[str]:
    kind = rope["rope_type"]
    if kind not in kinds:
        computed = " and ".join(map(repr, kinds))
        return [f"rope_type is {kind!r}, only {computed} computed here"]
    if kind == "linear" and "factor" not in rope:
        return ["rope_type 'linear' without a factor"]
    return [
        f"rope setting {key} is not computed"
        for key in sorted(rope.keys() - {"rope_theta", "rope_type", "factor"})
    ]
