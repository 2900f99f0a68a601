"""Reads the text model's settings from a `config.json`, with transformers' defaults. No JAX.

By hand instead of by transformers' AutoConfig, which takes more than a second to import, stops at
the first mistake, keeps unknown keys silently, and reads other keys in each version.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from reprlib import repr as show
from typing import Any

from pipeline.data.models.model_shape import ModelShape

GEMMA2, GEMMA3 = "gemma2", "gemma3_text"
GEMMA4 = "gemma4_text"
"""`model_type` of a Gemma 4's text model."""
MULTIMODAL = {"gemma3": GEMMA3, "gemma4": GEMMA4}
"""`model_type` of folders with towers for images or sound, and of the text model in their
`text_config`."""

SLIDING, FULL = "sliding_attention", "full_attention"
"""Attention types of a layer, as transformers names them."""

_MOST_LAYERS = 1024
_MOST_SIZE = 2**24
_LEAST, _MOST = 1e-30, 1e30
"""Positive numbers outside of this range overflow or underflow in float32."""
_ABSENT = object()
_NULLABLE = ("attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True)
class _Key:
    """A key of a text model: whether a value is supported, and what is wrong with others.

    The default is that of transformers, which published files omit; _ABSENT is not filled in.
    """

    accepts: Callable[[Any], bool]
    wrong: str
    default: Any = _ABSENT


def _is_number(value: Any) -> bool:
    """Whether it is a positive number in the range of float32."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and _LEAST <= value <= _MOST


def _integer(default: Any, *, least: int = 1, most: int = _MOST_SIZE) -> _Key:
    wrong = f"not an integer from {least} to {most}"
    return _Key(lambda value: type(value) is int and least <= value <= most, wrong, default)


def _soft_cap(default: float | None) -> _Key:
    wrong = "neither null nor a positive number"
    return _Key(lambda value: value is None or _is_number(value), wrong, default)


def _only(*values: Any, wrong: str = "", default: Any = _ABSENT) -> _Key:
    """A key of which other values than these are not supported."""
    return _Key(values.__contains__, wrong or f"only {values[0]!r} is supported", default)


_NO_CAP = "which transformers ignores in a Gemma 3 or 4; set it to null"
_COMMON = {
    "num_hidden_layers": _integer(26, most=_MOST_LAYERS),
    "hidden_size": _integer(2304),
    "intermediate_size": _integer(9216),
    "num_attention_heads": _integer(8),
    "num_key_value_heads": _integer(4),
    "head_dim": _integer(256),
    "sliding_window": _integer(4096),
    "query_pre_attn_scalar": _Key(_is_number, "not a positive number", 256),
    "sliding_window_pattern": _integer(_ABSENT, most=_MOST_LAYERS),
    "hidden_activation": _only("gelu_pytorch_tanh"),
    "rms_norm_eps": _only(1e-6),
    "attention_bias": _only(False),
    "tie_word_embeddings": _only(True),
    "use_bidirectional_attention": _only(False, None),
}
_KEYS: dict[str, dict[str, _Key]] = {
    GEMMA3: {
        **_COMMON,
        "vocab_size": _integer(262_208),
        "attn_logit_softcapping": _only(None, wrong=_NO_CAP, default=None),
        "final_logit_softcapping": _soft_cap(None),
    },
    GEMMA2: {
        **_COMMON,
        "vocab_size": _integer(256_000),
        "attn_logit_softcapping": _soft_cap(50.0),
        "final_logit_softcapping": _soft_cap(30.0),
    },
    GEMMA4: {
        **{key: _COMMON[key] for key in _COMMON if key != "query_pre_attn_scalar"},
        "num_hidden_layers": _integer(30, most=_MOST_LAYERS),
        "sliding_window": _integer(512),
        "vocab_size": _integer(262_144),
        "attn_logit_softcapping": _only(None, wrong=_NO_CAP),
        "final_logit_softcapping": _soft_cap(None),
        "global_head_dim": _integer(512),
        "num_kv_shared_layers": _integer(0, least=0, most=_MOST_LAYERS),
        "use_double_wide_mlp": _Key(lambda value: type(value) is bool, "not a boolean", False),
        "hidden_size_per_layer_input": _integer(256, least=0),
        "vocab_size_per_layer_input": _integer(262_144),
        "use_bidirectional_attention": _only(None, "vision"),  # text alone is causal with both
        "enable_moe_block": _only(
            False, wrong="a mixture of experts (26B-A4B) is not supported yet"
        ),
        "attention_k_eq_v": _only(
            False, wrong="one projection for keys and values (31B) is not supported yet"
        ),
    },
}
"""The keys of each kind of model that decide what it computes."""
_ROPE_KEYS = {
    GEMMA2: {"rope_theta", "rope_scaling", "rope_parameters"},
    GEMMA3: {"rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq"},
    GEMMA4: {"rope_parameters"},
}
_HARMLESS = frozenset(
    {
        *("model_type", "architectures", "dtype", "torch_dtype", "transformers_version"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "layer_types", "quantization_config"),
        # Have an effect only together with others.
        *("num_global_key_value_heads", "num_experts", "top_k_experts", "moe_intermediate_size"),
        # Of training by transformers, of its caches and outputs, and of other tasks.
        *("attention_dropout", "initializer_range", "max_position_embeddings", "use_cache"),
        *("cache_implementation", "hidden_act", "chunk_size_feed_forward", "id2label", "label2id"),
        *("is_encoder_decoder", "output_attentions", "output_hidden_states", "problem_type"),
        *("return_dict", "tokenizer_class", "is_decoder", "add_cross_attention"),
        *("sliding_window_size", "pruned_heads", "torchscript", "use_bfloat16"),
        *("tie_encoder_decoder", "temperature", "top_k", "top_p", "do_sample", "max_length"),
    }
)
"""Keys that are checked elsewhere, or change nothing."""
_HARMLESS_STARTS = ("_", "unsloth")
_INHERITED = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"),
    *("dtype", "torch_dtype", "quantization_config"),
)
_ARCHITECTURES = {
    GEMMA3: "Gemma3ForCausalLM",
    GEMMA2: "Gemma2ForCausalLM",
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
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ValueError(
            f"config.json: model_type is {show(kind)}; supported are "
            f"{', '.join(map(repr, _KEYS))}, and the text part of "
            f"{' and '.join(map(repr, MULTIMODAL))}"
        )
    keys = _KEYS[kind]
    given = {key: value for key, value in text.items() if value is not None or key in _NULLABLE}
    wrong = _read_per_layer_config(given) if kind == GEMMA4 else []
    defaults = {key: one.default for key, one in keys.items() if one.default is not _ABSENT}
    whole = {**defaults, **given, "architectures": [_ARCHITECTURES[kind]]}
    full, sliding = _ropes(whole, wrong)
    wrong += _wrong_keys(whole)
    values = [
        f"{key} is {show(whole[key])}, {one.wrong}"
        for key, one in keys.items()
        if key in whole and not one.accepts(whole[key])
    ]
    if not values:
        whole["layer_types"] = _layer_types(whole)
        values = [*_wrong_layers(whole), *_contradictions(whole)]
    if wrong := list(dict.fromkeys(wrong + values)):
        raise ValueError("config.json: " + "; ".join(wrong))
    if kind == GEMMA4:
        return whole | {"rope_parameters": {FULL: full, SLIDING: sliding}}
    whole |= {"rope_theta": full["rope_theta"], "rope_scaling": None}
    if full["rope_type"] == "linear":
        whole["rope_scaling"] = {"rope_type": "linear", "factor": full["factor"]}
    if kind == GEMMA3:
        whole["rope_local_base_freq"] = sliding["rope_theta"]
    for key in ("rope_parameters", "sliding_window_pattern", "_sliding_window_pattern"):
        whole.pop(key, None)
    return whole


def _text_part(hf: Mapping[str, Any]) -> dict[str, Any]:
    kind = _text_kind(hf)
    if kind is None:
        return dict(hf)
    text, whole = hf.get("text_config"), hf["model_type"]
    if not isinstance(text, dict):
        raise ValueError(f"config.json: model_type is {whole!r}, but there is no text_config")
    return {"model_type": kind, **{key: hf[key] for key in _INHERITED if key in hf}, **text}


def is_multimodal(hf: Mapping[str, Any]) -> bool:
    """Whether the model has towers for images or sound beside the text model."""
    return _text_kind(hf) is not None


def _text_kind(hf: Mapping[str, Any]) -> str | None:
    """`model_type` of the text part of a multimodal model."""
    kind = hf.get("model_type")
    return MULTIMODAL.get(kind) if isinstance(kind, str) else None


def _read_per_layer_config(given: dict[str, Any]) -> list[str]:
    """Replaces `per_layer_config`, as transformers 5.15 writes it, with `global_head_dim`."""
    layers = given.pop("per_layer_config", None)
    if layers is None:
        return []
    width, kinds = given.get("head_dim", _COMMON["head_dim"].default), given.get("layer_types")
    full = [n for n, kind in enumerate(kinds) if kind == FULL] if isinstance(kinds, list) else []
    try:
        own = {int(layer): settings for layer, settings in layers.items()}  # "05" is layer 5
        width = own[full[0]]["head_dim"] if own else width
    except (AttributeError, ValueError, TypeError, LookupError):
        own = {-1: None}
    if own and own != {layer: {"head_dim": width} for layer in full}:
        what = f"another head_dim, the same in all layers of {FULL}"
        return [f"per_layer_config is {show(layers)}; supported is only {what}"]
    if given.setdefault("global_head_dim", width) != width:
        both = f"{show(given['global_head_dim'])}, and {show(width)} in per_layer_config"
        return [f"global_head_dim is {both}, which contradict each other; remove one"]
    return []


def _wrong_keys(text: Mapping[str, Any]) -> Iterator[str]:
    """Quantized weights, and keys that nothing here knows: they may change the model."""
    if quantized := text.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        yield (
            f"quantization_config: the weights are quantized ({show(method)}), which is not "
            "supported; set model.path to the model before that, which model.quantization quantizes"
        )
    kind = text["model_type"]
    for key in sorted(text.keys() - _KEYS[kind].keys() - _ROPE_KEYS[kind] - _HARMLESS):
        if not key.startswith(_HARMLESS_STARTS):
            value = show(text[key])
            yield f"{key} = {value} is unknown; remove it if the weights do not depend on it"


def _layer_types(text: Mapping[str, Any]) -> Any:
    """The layer types; by default 5 local layers per global one, in Gemma 2 one."""
    if "layer_types" in text:
        return text["layer_types"]
    pattern = text.get("sliding_window_pattern", 6) if text["model_type"] != GEMMA2 else 2
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


def _contradictions(text: Mapping[str, Any]) -> Iterator[str]:
    """Sizes that are valid alone, but not together."""
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    if heads % kv_heads:
        yield f"num_attention_heads is not a multiple of num_key_value_heads: {heads}, {kv_heads}"
    for key in ("head_dim", "global_head_dim"):
        if text.get(key, 2) % 2:
            yield f"{key} is {text[key]}, but must be even: RoPE rotates pairs"
    if text["model_type"] != GEMMA4:
        return
    if text.get("num_global_key_value_heads", kv_heads) != kv_heads:
        yield (
            f"num_global_key_value_heads is {show(text['num_global_key_value_heads'])}; other "
            "heads of keys and values in global layers (31B) are not supported yet"
        )
    vocab, others = text["vocab_size"], text["vocab_size_per_layer_input"]
    if text["hidden_size_per_layer_input"] and vocab != others:
        yield f"vocab_size_per_layer_input is {others}, but must be vocab_size, {vocab}"


Rope = dict[str, Any]


def _ropes(text: Mapping[str, Any], wrong: list[str]) -> tuple[Rope, Rope]:
    """RoPE settings of global and of local layers; adds their problems to `wrong`.

    transformers 4 and 5 have different formats. A file may contain both if they agree.
    """
    kind = text["model_type"]
    given = _object(text, "rope_parameters", "", wrong)
    older = {"the top level": _theta(text, "rope_theta")}
    older["rope_scaling"] = _object(text, "rope_scaling", "", wrong)
    if kind == GEMMA2:
        both = _rope({**older, "rope_parameters": given}, ("default", "linear"), 1e4, wrong)
        return both, both
    places = {which: f"rope_parameters.{which}" for which in (FULL, SLIDING)}
    newer = {which: _object(given, which, "rope_parameters.", wrong) for which in places}
    wrong += [
        f"rope_parameters has {show(key)}; a Gemma 3 or 4 has only {FULL} and {SLIDING}"
        for key in given.keys() - places
    ]
    local = {"rope_local_base_freq": _theta(text, "rope_local_base_freq")}
    kinds: tuple[str, ...] = ("default", "linear")
    if kind == GEMMA4:
        older, local, kinds = {}, {}, ("proportional",)
    part: Any = newer[FULL].pop("partial_rotary_factor", 0.25) if kind == GEMMA4 else None
    full = _rope({**older, places[FULL]: newer[FULL]}, kinds, 1e6, wrong)
    if kind == GEMMA4:
        full["partial_rotary_factor"] = part
        if not (_is_number(part) and part <= 1):
            wrong.append(f"partial_rotary_factor is {show(part)}, not a number from 0 to 1")
    return full, _rope({**local, places[SLIDING]: newer[SLIDING]}, ("default",), 1e4, wrong)


def _object(settings: Mapping[str, Any], key: str, within: str, wrong: list[str]) -> Rope:
    """The object at a key, without null values; adds another value to `wrong`."""
    found = settings.get(key) or {}
    if not isinstance(found, dict):
        wrong.append(f"{within}{key} is {show(found)}, not an object")
        return {}
    return {name: value for name, value in found.items() if value is not None}


def _theta(text: Mapping[str, Any], key: str) -> Rope:
    return {"rope_theta": text[key]} if key in text else {}


def _rope(
    sources: Mapping[str, Rope], kinds: Collection[str], theta: float, wrong: list[str]
) -> Rope:
    """Merges the RoPE settings of several places by name, and adds their problems to `wrong`.

    The first of `kinds` is the default of `rope_type`, and `theta` that of `rope_theta`.
    """
    rope: Rope = {}
    places: dict[str, str] = {}
    for place, settings in sources.items():
        for name, value in settings.items():
            key = "rope_type" if name == "type" else name
            if rope.get(key, value) != value:
                values = show(rope[key]), show(value)
                what = f"{key} is {values[0]} in {places[key]} and {values[1]} in {place}"
                wrong.append(f"{what}, which contradict each other; remove one")
            rope[key], places[key] = value, place
    rope = {"rope_type": next(iter(kinds)), "rope_theta": theta} | rope
    if rope["rope_type"] not in kinds:
        supported = " and ".join(map(repr, kinds))
        wrong.append(f"rope_type is {show(rope['rope_type'])}, supported: {supported}")
    elif rope["rope_type"] == "linear" and "factor" not in rope:
        wrong.append("rope_type 'linear' without a factor")
    else:
        for key in sorted(rope.keys() - {"rope_type"}):
            if key not in ("rope_theta", "factor"):
                wrong.append(f"rope setting {show(key)} is not supported")
            elif not _is_number(rope[key]):
                wrong.append(f"{key} of RoPE is {show(rope[key])}, not a positive number")
    return rope


_SIZES = {
    "window": "sliding_window",
    "embed": "hidden_size",
    "hidden": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "final_softcap": "final_logit_softcapping",
}
_SIZES_GEMMA4 = {
    "global_head_dim": "global_head_dim",
    "kv_shared_layers": "num_kv_shared_layers",
    "per_layer_input": "hidden_size_per_layer_input",
}
"""Fields of `ModelShape` and keys with the same values."""


def read_model_shape(hf: Mapping[str, Any]) -> ModelShape:
    """Reads the sizes from a `config.json` of Gemma 2, 3 or 4, text or multimodal.

    Raises:
        ValueError: one line that lists every unsupported setting.
    """
    text = text_config(hf)
    kind = text["model_type"]
    sizes = {field: text[key] for field, key in _SIZES.items()}
    if kind == GEMMA4:
        sizes |= {field: text[key] for field, key in _SIZES_GEMMA4.items()}
        sizes["shared_hidden"] = text["intermediate_size"] * (1 + text["use_double_wide_mlp"])
    return ModelShape(
        local=tuple(layer == SLIDING for layer in text["layer_types"]),
        query_key_norm=kind != GEMMA2,
        attention_softcap=None if kind == GEMMA4 else text["attn_logit_softcapping"],
        value_norm=kind == GEMMA4,
        **sizes,
    )


def hf_config_of(shape: ModelShape) -> dict[str, Any]:
    """A `config.json` for this shape; settings that do not affect memory have defaults."""
    layers = [SLIDING if local else FULL for local in shape.local]
    text = {"num_hidden_layers": shape.layers, "layer_types": layers}
    text |= {key: getattr(shape, field) for field, key in _SIZES.items()}
    if not shape.value_norm:
        kind = GEMMA3 if shape.query_key_norm else GEMMA2
        cap = {"attn_logit_softcapping": shape.attention_softcap}
        return text | cap | {"model_type": kind, "query_pre_attn_scalar": shape.head_dim}
    text |= {key: getattr(shape, field) for field, key in _SIZES_GEMMA4.items()}
    wide = shape.shared_hidden == 2 * shape.hidden
    vocab = {"vocab_size_per_layer_input": shape.vocab}
    return text | vocab | {"model_type": GEMMA4, "use_double_wide_mlp": wide}


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
