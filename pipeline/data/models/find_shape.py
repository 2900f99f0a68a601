"""Finds the shape of a run's model: by its `config.json`, or by a table of published models.

Downloads nothing.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from configs.schema import Config
from pipeline.data.models.hf_config import FULL, GEMMA2, GEMMA3, GEMMA4, SLIDING, read_model_shape
from pipeline.data.models.hf_folder import read_text_config, text_tensors
from pipeline.data.models.model_shape import ModelShape
from pipeline.data.models.model_source import HF_HANDLE

_SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads"),
)


def _published(kind: str, *sizes: int, **others: Any) -> dict[str, Any]:
    return {"model_type": kind, **dict(zip(_SIZES, sizes, strict=True)), **others}


_GEMMA3 = partial(_published, GEMMA3, head_dim=256, vocab_size=262_208, sliding_window=1024)
_GEMMA3_SMALL = partial(_GEMMA3, vocab_size=262_144, sliding_window=512)
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-3-270m": _GEMMA3_SMALL(18, 640, 2048, 4, 1),
    "gemma-3-1b": _GEMMA3_SMALL(26, 1152, 6912, 4, 1),
    "gemma-3-4b": _GEMMA3(34, 2560, 10_240, 8, 4),
    "gemma-3-12b": _GEMMA3(48, 3840, 15_360, 16, 8),
    "gemma-3-27b": _GEMMA3(62, 5376, 21_504, 32, 16, head_dim=128),
    "gemma-2-2b": {"model_type": GEMMA2},  # transformers' defaults
    "gemma-2-9b": _published(GEMMA2, 42, 3584, 14_336, 16, 8),
    "gemma-2-27b": _published(GEMMA2, 46, 4608, 36_864, 32, 16, head_dim=128),
    "gemma-4-e2b": _published(
        *(GEMMA4, 35, 1536, 6144, 8, 1),
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
        layer_types=7 * [*4 * [SLIDING], FULL],
        final_logit_softcapping=30.0,
    ),
    "gemma-4-e4b": _published(
        *(GEMMA4, 42, 2560, 10_240, 8, 2), num_kv_shared_layers=18, final_logit_softcapping=30.0
    ),
}
"""Memory-relevant settings of the `config.json` files that Google has published, by model name."""
_UNUSED = {
    "gemma-3-4b": 419_816_304,
    "gemma-3-12b": 421_290_864,
    "gemma-3-27b": 423_060_336,
    "gemma-4-e2b": 494_609_600,
    "gemma-4-e4b": 533_144_000,
}
"""Parameters of published models besides the text model's: of towers and projectors, and of keys
and values that Gemma 4 does not use. The towers' are counted by transformers' modules."""
_UNUSED_BYTES = 2
_HANDLE = re.compile(
    r"(?:hf://[\w.-]+/|kaggle://google/gemma-?[234]/\w+/)"
    rf"gemma-?(?P<kind>{'|'.join(name.removeprefix('gemma-') for name in PUBLISHED)})"
    r"(?:-it|-pt)?(?:[@/].+)?",
    re.IGNORECASE,
)
"""Google's models and their mirrors, such as hf://unsloth/gemma-3-1b-it."""


def shape_of(config: Config) -> ModelShape:
    """The shape of the run's model, without a download.

    Read from the `config.json` of the model's folder or of the hub's cache, else from `PUBLISHED`.

    Raises:
        FileNotFoundError: if the folder is missing or has no `config.json`.
        ValueError: if the model is unknown or not supported, or has no embeddings for
            `plan.per_layer_embeddings`.
    """
    shape = _shape_at(config.model.path)
    shape.check_embeddings(config.plan.per_layer_embeddings)
    return shape


def _shape_at(path: str) -> ModelShape:
    if "://" not in path:
        return read_model_shape(read_text_config(Path(path)))
    cached = _cached(path)
    if cached is not None:
        return read_model_shape(read_text_config(cached))
    known = _HANDLE.fullmatch(path)
    if known is None:
        what = "its shape is unknown before the download; download it, or set a folder with its "
        what += "config.json"
        if "gemma" not in path.lower():
            what = "only Gemma 2, 3 and 4 can be trained; if it is one, download it first"
        names = ", ".join(f"google/{name}" for name in PUBLISHED)
        raise ValueError(
            f"model.path: {path}: {what}; known without a download, also with -it and of other "
            f"owners: {names}"
        )
    return read_model_shape(PUBLISHED[f"gemma-{known['kind'].lower()}"])


def unused_bytes(config: Config) -> int:
    """Bytes of the model's published weights that its text model does not use; no download.

    They are downloaded, and exported unless the weights are a flax checkpoint. Read from the
    weights in the model's folder or in the hub's cache, else from a table; 0: none, or unknown.
    """
    path = config.model.path
    folder = _cached(path) if "://" in path else Path(path)
    if folder is not None:
        with suppress(FileNotFoundError):  # it has no weights yet
            return sum(tensor.num_bytes for tensor in text_tensors(folder)[1])
    known = _HANDLE.fullmatch(path)
    return _UNUSED_BYTES * _UNUSED.get(f"gemma-{known['kind'].lower()}", 0) if known else 0


def _cached(handle: str) -> Path | None:
    """The folder of the model's `config.json` in the hub's cache; None if it is not cached."""
    match = HF_HANDLE.fullmatch(handle)
    if match is None:
        return None
    import huggingface_hub

    found = huggingface_hub.try_to_load_from_cache(match[1], "config.json", revision=match[2])
    return Path(found).parent if isinstance(found, str) else None
