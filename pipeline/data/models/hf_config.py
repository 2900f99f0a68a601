"""Reads the text model's settings from a `config.json`, with transformers' defaults. No JAX."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from reprlib import repr as show
from typing import Any

from pipeline.data.models.model_shape import ModelShape

GEMMA4 = "gemma4_text"
"""`model_type` of a Gemma 4's text model."""

MULTIMODAL = {"gemma3": "gemma3_text", "gemma4": GEMMA4}
"""`model_type` of folders with towers for images or sound, and of the text model in their
`text_config`."""

SLIDING, FULL = "sliding_attention", "full_attention"
"""Attention types of a layer, as transformers names them."""

_SIZES: dict[str, Any] = {
    "num_hidden_layers": 26,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}
_MOST_LAYERS = 1024
_MOST_SIZE = 2**24
_LEAST, _MOST = 1e-30, 1e30
"""Positive numbers outside of this range overflow or underflow in float32."""
_MOST_MISTAKES = 8
# Published files omit the defaults of transformers' Gemma3TextConfig and Gemma2Config.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        **_SIZES,
        "query_pre_attn_scalar": 256,
        "vocab_size": 262_208,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "gemma2": {
        **_SIZES,
        "query_pre_attn_scalar": 256,
        "vocab_size": 256_000,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    GEMMA4: {
        **_SIZES,
        "num_hidden_layers": 30,
        "sliding_window": 512,
        "vocab_size": 262_144,
        "final_logit_softcapping": None,
        "global_head_dim": 512,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
    },
}
_COUNTS_LAYERS = ("num_hidden_layers", "sliding_window_pattern", "_sliding_window_pattern")
_NULLABLE = ("attn_logit_softcapping", "final_logit_softcapping")
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "rms_norm_eps": (1e-6,),
    "attention_bias": (False,),
    "tie_word_embeddings": (True,),
    "use_bidirectional_attention": (False, None),
}
_ONLY_GEMMA4: dict[str, tuple[Any, ...]] = {
    **_ONLY,
    "use_bidirectional_attention": (None, "vision"),  # text alone is causal with both
    "enable_moe_block": (False,),
    "attention_k_eq_v": (False,),
}
_NOT_YET = {
    "enable_moe_block": "a mixture of experts (26B-A4B) is not supported yet",
    "attention_k_eq_v": "one projection for keys and values (31B) is not supported yet",
}
_OTHERS = frozenset(
    {
        *("model_type", "architectures", "dtype", "torch_dtype", "transformers_version"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "layer_types", "rope_parameters"),
        *("rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern"),
        # Checked if they have an effect.
        *("quantization_config", "attn_logit_softcapping", "num_global_key_value_heads"),
        *("num_experts", "top_k_experts", "moe_intermediate_size"),
        # Of training by transformers, of its caches and outputs, and of other tasks.
        *("attention_dropout", "initializer_range", "max_position_embeddings", "use_cache"),
        *("cache_implementation", "hidden_act", "chunk_size_feed_forward", "id2label", "label2id"),
        *("is_encoder_decoder", "output_attentions", "output_hidden_states", "problem_type"),
        *("return_dict", "tokenizer_class", "is_decoder", "add_cross_attention"),
        *("sliding_window_size", "pruned_heads", "torchscript", "use_bfloat16"),
        *("tie_encoder_decoder", "temperature", "top_k", "top_p", "do_sample", "max_length"),
    }
)
"""Keys of a text model that are read, or change nothing, besides those with defaults."""
_HARMLESS = ("_", "unsloth")
"""Beginnings of further keys that change nothing."""
_INHERITED = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
_ARCHITECTURES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    GEMMA4: "Gemma4ForCausalLM",
}


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The complete configuration of the text model, in the format of a text-only folder.

    Defaults are filled in, including `layer_types`. RoPE settings have the format of transformers
    4, which transformers 5 still reads: `rope_theta`, `rope_scaling` (None, or linear with a
    `factor`) and, if local layers have their own, `rope_local_base_freq`; of a Gemma 4 that of
    transformers 5, `rope_parameters` of both kinds of layers.

    Args:
        hf: a `config.json` of Gemma 2, or of Gemma 3 or 4, text or multimodal.

    Raises:
        ValueError: one line with all unsupported settings.
    """
    text = _text_part(hf)
    kind = text.get("model_type")
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        raise ValueError(
            f"config.json: model_type is {show(kind)}; supported are "
            f"{', '.join(map(repr, _DEFAULTS))}, and the text part of "
            f"{' and '.join(map(repr, MULTIMODAL))}"
        )
    given = {key: value for key, value in text.items() if value is not None or key in _NULLABLE}
    wrong = _read_per_layer_config(given) if kind == GEMMA4 else []
    whole = {**_DEFAULTS[kind], **given, "architectures": [_ARCHITECTURES[kind]]}
    full, sliding, wrong_ropes = _ropes(whole)
    wrong += _wrong_keys(hf, whole) + _wrong_sizes(whole) + wrong_ropes
    if not wrong:
        whole["layer_types"] = _layer_types(whole)
        wrong = _wrong_layers(whole)
    for key, values in (_ONLY_GEMMA4 if kind == GEMMA4 else _ONLY).items():
        if whole.get(key, values[0]) not in values:
            only = f"{key} is {show(whole[key])}, only {values[0]!r} is supported"
            wrong.append(_NOT_YET.get(key, only))
    if wrong:
        wrong = list(dict.fromkeys(wrong))
        more = len(wrong) - _MOST_MISTAKES
        wrong[_MOST_MISTAKES:] = [f"and {more} more"] if more > 0 else []
        raise ValueError("config.json: " + "; ".join(wrong))
    if kind == GEMMA4:
        return whole | {"rope_parameters": {FULL: full, SLIDING: sliding}}
    whole |= {"rope_theta": full["rope_theta"], "rope_scaling": None}
    if full["rope_type"] == "linear":
        whole["rope_scaling"] = {"rope_type": "linear", "factor": full["factor"]}
    if kind != "gemma2":
        whole["rope_local_base_freq"] = sliding["rope_theta"]
    for key in ("rope_parameters", "sliding_window_pattern", "_sliding_window_pattern"):
        whole.pop(key, None)
    return whole


def _wrong_keys(hf: Mapping[str, Any], text: Mapping[str, Any]) -> list[str]:
    """Quantized weights, and keys that nothing here knows: they may change the model."""
    for settings in (hf, text):
        quantized = settings.get("quantization_config")
        if quantized:
            method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
            what = f"the weights are quantized ({show(method)}), which is not supported"
            remedy = "set model.path to the model before that, which model.quantization quantizes"
            return [f"quantization_config: {what}; {remedy}"]
    kind = text["model_type"]
    known = _OTHERS | _DEFAULTS[kind].keys() | (_ONLY_GEMMA4 if kind == GEMMA4 else _ONLY).keys()
    unknown = sorted(key for key in text.keys() - known if not key.startswith(_HARMLESS))
    return [
        f"{key} = {show(text[key])} is unknown; remove it if the weights do not depend on it"
        for key in unknown
    ]


def _read_per_layer_config(given: dict[str, Any]) -> list[str]:
    """Replaces `per_layer_config`, as transformers 5.15 writes it, with `global_head_dim`."""
    layers = given.pop("per_layer_config", None)
    if layers is None:
        return []
    width, kinds = given.get("head_dim", _SIZES["head_dim"]), given.get("layer_types")
    kinds = kinds if isinstance(kinds, list) else []
    full = [str(layer) for layer, kind in enumerate(kinds) if kind == FULL]
    if layers and full and isinstance(layers, dict) and isinstance(layers.get(full[0]), dict):
        width = layers[full[0]].get("head_dim")
    if layers and layers != {layer: {"head_dim": width} for layer in full}:
        what = f"another head_dim, the same in all layers of {FULL}"
        return [f"per_layer_config is {show(layers)}; supported is only {what}"]
    if given.setdefault("global_head_dim", width) != width:
        both = f"{show(given['global_head_dim'])}, and {show(width)} in per_layer_config"
        return [f"global_head_dim is {both}, which contradict each other; remove one"]
    return []


def is_multimodal(hf: Mapping[str, Any]) -> bool:
    """Whether the model has towers for images or sound beside the text model."""
    return _text_kind(hf) is not None


def _text_kind(hf: Mapping[str, Any]) -> str | None:
    """`model_type` of the text part of a multimodal model."""
    kind = hf.get("model_type")
    return MULTIMODAL.get(kind) if isinstance(kind, str) else None


def read_model_shape(hf: Mapping[str, Any]) -> ModelShape:
    """Reads the sizes from a `config.json` of Gemma 2, 3 or 4, text or multimodal.

    Raises:
        ValueError: one line that lists every unsupported setting.
    """
    text = text_config(hf)
    is_gemma4 = text["model_type"] == GEMMA4
    return ModelShape(
        local=tuple(kind == SLIDING for kind in text["layer_types"]),
        window=text["sliding_window"],
        embed=text["hidden_size"],
        hidden=text["intermediate_size"],
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        head_dim=text["head_dim"],
        vocab=text["vocab_size"],
        query_key_norm=text["model_type"] != "gemma2",
        attention_softcap=None if is_gemma4 else text["attn_logit_softcapping"],
        final_softcap=text["final_logit_softcapping"],
        **(_gemma4_settings(text) if is_gemma4 else {}),
    )


def _gemma4_settings(text: Mapping[str, Any]) -> dict[str, Any]:
    wide = 2 if text["use_double_wide_mlp"] else 1
    return {
        "value_norm": True,
        "global_head_dim": text["global_head_dim"],
        "kv_shared_layers": text["num_kv_shared_layers"],
        "shared_hidden": wide * text["intermediate_size"],
        "per_layer_input": text["hidden_size_per_layer_input"],
    }


def unused_tensors(shape: ModelShape) -> frozenset[str]:
    """Names of tensors that a folder may have, although the model does not use them.

    Published Gemma 4 have keys and values in layers that attend to those of another layer.
    """
    return frozenset(
        f"model.layers.{layer}.self_attn.{kind}.weight"
        for layer in range(shape.layers)
        for kind in ("k_proj", "v_proj", "k_norm")
        if not shape.has_kv(layer)
    )


def tensor_shapes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors in a text-only folder."""
    d, p, unused = shape.embed, shape.per_layer_input, unused_tensors(shape)
    yield "model.embed_tokens.weight", (shape.vocab, d)
    if p:
        width = shape.layers * p
        yield "model.embed_tokens_per_layer.weight", (shape.vocab, width)
        yield "model.per_layer_model_projection.weight", (width, d)
        yield "model.per_layer_projection_norm.weight", (p,)
    for layer in range(shape.layers):
        for name, size in _layer_shapes(shape, layer):
            whole = f"model.layers.{layer}.{name}"
            if whole not in unused:
                yield whole, size
    yield "model.norm.weight", (d,)


def _layer_shapes(shape: ModelShape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, p = shape.embed, shape.per_layer_input
    h, f = shape.head_dim_of(layer), shape.hidden_of(layer)
    heads, kv_heads = shape.heads * h, shape.kv_heads * h
    for norm in (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        *(["post_per_layer_input_norm"] if p else []),
    ):
        yield f"{norm}.weight", (d,)
    yield "self_attn.q_proj.weight", (heads, d)
    yield "self_attn.k_proj.weight", (kv_heads, d)
    yield "self_attn.v_proj.weight", (kv_heads, d)
    yield "self_attn.o_proj.weight", (d, heads)
    if shape.query_key_norm:
        yield "self_attn.q_norm.weight", (h,)
        yield "self_attn.k_norm.weight", (h,)
    yield "mlp.gate_proj.weight", (f, d)
    yield "mlp.up_proj.weight", (f, d)
    yield "mlp.down_proj.weight", (d, f)
    if p:
        yield "per_layer_input_gate.weight", (p, d)
        yield "per_layer_projection.weight", (d, p)
    if shape.value_norm:
        yield "layer_scalar", (1,)


def _text_part(hf: Mapping[str, Any]) -> dict[str, Any]:
    kind = _text_kind(hf)
    if kind is None:
        return dict(hf)
    text, whole = hf.get("text_config"), hf["model_type"]
    if not isinstance(text, dict):
        raise ValueError(f"config.json: model_type is {whole!r}, but there is no text_config")
    inherited = {key: hf[key] for key in (*_INHERITED, "dtype", "torch_dtype") if key in hf}
    return {"model_type": kind, **inherited, **text}


def _wrong_sizes(text: Mapping[str, Any]) -> list[str]:
    wrong = []
    for key in (*_SIZES, "vocab_size", "sliding_window_pattern", "_sliding_window_pattern"):
        most = _MOST_LAYERS if key in _COUNTS_LAYERS else _MOST_SIZE
        value = text.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            wrong.append(f"{key} is {show(value)}, not an integer from 1 to {most}")
    if not _is_number(text.get("query_pre_attn_scalar", 1)):
        value = show(text["query_pre_attn_scalar"])
        wrong.append(f"query_pre_attn_scalar is {value}, not a positive number")
    wrong += [
        f"{key} is {show(text[key])}, neither null nor a positive number"
        for key in _NULLABLE
        if text.get(key) is not None and not _is_number(text[key])
    ]
    if text["model_type"] != "gemma2" and text.get("attn_logit_softcapping") is not None:
        value = show(text["attn_logit_softcapping"])
        wrong.append(
            f"attn_logit_softcapping is {value}, which transformers ignores in a Gemma 3 or 4; "
            "set it to null"
        )
    if wrong:
        return wrong
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    if heads % kv_heads:
        wrong.append(
            f"num_attention_heads is not a multiple of num_key_value_heads: {heads}, {kv_heads}"
        )
    if text["head_dim"] % 2:
        wrong.append(f"head_dim is {text['head_dim']}, but must be even: RoPE rotates pairs")
    return wrong + (_wrong_gemma4_sizes(text) if text["model_type"] == GEMMA4 else [])


def _wrong_gemma4_sizes(text: Mapping[str, Any]) -> list[str]:
    wrong = [
        f"{key} is {show(text[key])}, not an integer from {least} to {most}"
        for key, least, most in (
            ("global_head_dim", 1, _MOST_SIZE),
            ("num_kv_shared_layers", 0, _MOST_LAYERS),
            ("hidden_size_per_layer_input", 0, _MOST_SIZE),
        )
        if isinstance(text[key], bool)
        or not isinstance(text[key], int)
        or not least <= text[key] <= most
    ]
    if not isinstance(text["use_double_wide_mlp"], bool):
        wrong.append(f"use_double_wide_mlp is {show(text['use_double_wide_mlp'])}, not a boolean")
    if wrong:
        return wrong
    kv_heads = text["num_key_value_heads"]
    if text.get("num_global_key_value_heads", kv_heads) != kv_heads:
        wrong.append(
            f"num_global_key_value_heads is {show(text['num_global_key_value_heads'])}; other "
            "heads of keys and values in global layers (31B) are not supported yet"
        )
    if text["global_head_dim"] % 2:
        width = text["global_head_dim"]
        wrong.append(f"global_head_dim is {width}, but must be even: RoPE rotates pairs")
    if text["hidden_size_per_layer_input"]:
        vocab, others = text["vocab_size"], text["vocab_size_per_layer_input"]
        if vocab != others:
            wrong.append(f"vocab_size_per_layer_input is {others}, but must be vocab_size, {vocab}")
    return wrong


def _is_number(value: Any) -> bool:
    """Whether it is a positive number in the range of float32."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and _LEAST <= value <= _MOST


def _layer_types(text: Mapping[str, Any]) -> Any:
    """The configured layer types; by default 5 local layers per global one, in Gemma 2 one."""
    if "layer_types" in text:
        return text["layer_types"]
    pattern = text.get("sliding_window_pattern", 6) if text["model_type"] != "gemma2" else 2
    kinds = [SLIDING if (n + 1) % pattern else FULL for n in range(text["num_hidden_layers"])]
    if text["model_type"] == GEMMA4:
        kinds[-1] = FULL  # as transformers
    return kinds


def _wrong_layers(text: Mapping[str, Any]) -> list[str]:
    kinds, count = text["layer_types"], text["num_hidden_layers"]
    if not isinstance(kinds, list):
        return [f"layer_types is {show(kinds)}, not a list of names"]
    if len(kinds) != count:
        return [f"layer_types names {len(kinds)} layers, num_hidden_layers is {count}"]
    odd = [kind for kind in kinds if kind not in (SLIDING, FULL)]
    if odd:
        return [f"layer_types has {show(odd[0])}; supported are {SLIDING} and {FULL}"]
    if text["model_type"] != GEMMA4:
        return []
    shared = text["num_kv_shared_layers"]
    if any(kind not in kinds[: max(count - shared, 0)] for kind in kinds):
        return [f"num_kv_shared_layers is {shared}: the other layers lack a kind of layer_types"]
    if kinds[-1] != FULL:
        return [f"layer_types ends with {SLIDING}, but the last layer has to be {FULL}"]
    return []


def _ropes(text: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """RoPE settings of global and of local layers, and their problems.

    transformers 4 and 5 have different formats. A file may contain both if they agree.
    """
    scaling, scaling_wrong = _settings(text, "rope_scaling")
    given, given_wrong = _settings(text, "rope_parameters")
    wrong = scaling_wrong + given_wrong
    if text["model_type"] == GEMMA4:
        return _gemma4_ropes(given, wrong)
    older = {"the top level": _theta(text, "rope_theta"), "rope_scaling": scaling}
    if text["model_type"] == "gemma2":
        both, more = _rope({**older, "rope_parameters": given}, theta=10_000.0, linear=True)
        return both, both, wrong + more
    newer = {}
    for kind in (FULL, SLIDING):
        newer[kind], more = _settings(given, kind, within="rope_parameters.")
        wrong += more
    wrong += [
        f"rope_parameters has {show(key)}; a Gemma 3 has only {FULL} and {SLIDING}"
        for key in given.keys() - {FULL, SLIDING}
    ]
    full_sources = {**older, f"rope_parameters.{FULL}": newer[FULL]}
    full, more = _rope(full_sources, theta=1_000_000.0, linear=True)
    wrong += more
    local_sources = {
        "rope_local_base_freq": _theta(text, "rope_local_base_freq"),
        f"rope_parameters.{SLIDING}": newer[SLIDING],
    }
    local, more = _rope(local_sources, theta=10_000.0, linear=False)
    return full, local, wrong + more


def _gemma4_ropes(
    given: Mapping[str, Any], wrong: list[str]
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    set_full, full_wrong = _settings(given, FULL, within="rope_parameters.")
    full: dict[str, Any] = {
        "rope_type": "proportional",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.25,
    } | set_full
    local, local_wrong = _settings(given, SLIDING, within="rope_parameters.")
    local = {"rope_type": "default", "rope_theta": 10_000.0} | local
    wrong = wrong + full_wrong + local_wrong + _wrong_rope(local, ("default",))
    part = full.pop("partial_rotary_factor")
    wrong += _wrong_rope(full, ("proportional",))
    if not (_is_number(part) and part <= 1):
        wrong.append(f"partial_rotary_factor is {show(part)}, not a number from 0 to 1")
    return full | {"partial_rotary_factor": part}, local, wrong


def _settings(
    text: Mapping[str, Any], key: str, *, within: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """The object at a key, without null values, and its problems."""
    found = text.get(key)
    if found is None:
        return {}, []
    if not isinstance(found, dict):
        return {}, [f"{within}{key} is {show(found)}, not an object"]
    return {name: value for name, value in found.items() if value is not None}, []


def _theta(text: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {"rope_theta": text[key]} if key in text else {}


def _rope(
    sources: Mapping[str, Mapping[str, Any]], *, theta: float, linear: bool
) -> tuple[dict[str, Any], list[str]]:
    """Merges the RoPE settings of several places, and reports their problems.

    Args:
        sources: settings by the name of their place.
        theta: default of `rope_theta`.
        linear: whether linear scaling is supported.
    """
    rope: dict[str, Any] = {}
    places: dict[str, str] = {}
    wrong = []
    for place, settings in sources.items():
        for name, value in settings.items():
            key = "rope_type" if name == "type" else name
            if key in rope and rope[key] != value:
                values = show(rope[key]), show(value)
                what = f"{key} is {values[0]} in {places[key]} and {values[1]} in {place}"
                wrong.append(f"{what}, which contradict each other; remove one")
            rope[key], places[key] = value, place
    rope = {"rope_type": "default", "rope_theta": theta} | rope
    return rope, wrong + _wrong_rope(rope, ("default", "linear") if linear else ("default",))


def _wrong_rope(rope: Mapping[str, Any], kinds: Collection[str]) -> list[str]:
    kind = rope["rope_type"]
    if kind not in kinds:
        supported = " and ".join(map(repr, kinds))
        return [f"rope_type is {show(kind)}, supported: {supported}"]
    if kind == "linear" and "factor" not in rope:
        return ["rope_type 'linear' without a factor"]
    return [
        f"{key} of RoPE is {show(rope[key])}, not a positive number"
        for key in ("rope_theta", "factor")
        if key in rope and not _is_number(rope[key])
    ] + [
        f"rope setting {show(key)} is not supported"
        for key in sorted(rope.keys() - {"rope_theta", "rope_type", "factor"})
    ]
