"""Reads and checks the files of a model folder. No JAX."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from reprlib import repr as show
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from configs.base import nearest_hint
from pipeline.data.models.hf_config import (
    is_multimodal,
    read_model_shape,
    tensor_shapes,
    text_config,
    unused_tensors,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLAX_MARKS = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")
_TEXT_PREFIXES = {
    # The names of published files, and those of transformers 5.
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_OTHER_PARTS = (
    *("vision_tower.", "model.vision_tower."),
    *("multi_modal_projector.", "model.multi_modal_projector."),
    *("model.audio_tower.", "model.embed_vision.", "model.embed_audio."),  # Gemma 4
)
"""Prefixes of the tensors of towers and projectors of multimodal models."""
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_BUFFER = re.compile(r"(?:.*\.)?rotary_emb(?:_local)?\.(?:\w+_)?inv_freq")
"""Frequencies of RoPE, which older versions of transformers stored; `config.json` has them."""
_ADAPTER = "adapter_config.json"
_FLAX_TOWER = re.compile(
    r"(^|/)(SigLiPFromPatches_\d+|vision_encoder|siglip_encoder"
    r"|PatchInputVariablePoolingEncoder_\d+|AudioEncoder)/|/mm_|/audio_"
)
_BLOCK = 2**26
"""Bytes of tensors that are compared at once."""
_MOST_SHOWN = 20
_WEIGHT_FILE = re.compile(r"[\w.-]{1,200}\.safetensors", re.ASCII)
STORED_TYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Data types of weights by safetensors' names."""
READABLE = tuple(str(dtype) for dtype in STORED_TYPES.values())
"""NumPy's names of these types."""
_BYTES = np.dtype(np.uint8)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor at an offset of a safetensors file, in bytes.

    `dtype` is NumPy's name of a data type in `STORED_TYPES`, otherwise safetensors' name.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def data(self) -> np.ndarray:
        """The values, memory-mapped from the file."""
        return np.memmap(self.path, np.dtype(self.dtype), "r", self.offset, self.shape)

    @property
    def item_bytes(self) -> int:
        """Size of a number in the file."""
        return self.num_bytes // max(1, prod(self.shape))

    def raw(self) -> np.ndarray:
        """The bytes, memory-mapped from the file."""
        return np.memmap(self.path, _BYTES, "r", self.offset, (self.num_bytes,))


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`.

    Raises:
        FileNotFoundError: if the folder or the file is missing.
        ValueError: if it is not a file with a JSON object.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"model.path: no folder {folder}{nearest_hint(folder)}")
    path = folder / "config.json"
    if not path.exists():
        if (folder / _ADAPTER).is_file():
            base = read_object(folder / _ADAPTER).get("base_model_name_or_path")
            raise FileNotFoundError(
                f"model.path: {folder} is a PEFT adapter; set model.path to its base "
                f"({show(base)}), and lora.start to this folder"
            )
        raise FileNotFoundError(
            f"model.path: {folder} has no config.json; it is not a Hugging Face model folder"
        )
    return read_object(path)


def read_text_config(folder: Path) -> dict[str, Any]:
    """The complete configuration of the folder's text model; see `hf_config.text_config`.

    Raises as `read_config`, or a ValueError with the unsupported settings.
    """
    config = read_config(folder)
    try:
        return text_config(config)
    except ValueError as error:
        raise ValueError(f"model.path: {folder}: {error}") from None


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder, by their names in `model.safetensors` or the files of the index.

    Raises:
        FileNotFoundError: with the missing weight files.
        ValueError: if the index cannot be read; with the damaged files, and with the tensors that
            are in two files.
    """
    index = _read_index(folder)
    names = [SINGLE] if index is None else sorted(set(index.values()))
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(f"model.path: {folder} lacks {', '.join(absent)}")
    found: dict[str, StoredTensor] = {}
    problems = []
    for path in (folder / name for name in names):
        try:
            tensors = _read_header(path)
        except (SafetensorError, OSError) as error:
            problems.append(f"{path} is damaged: {error}")
            continue
        problems += [
            f"{name} is in both {found[name].path} and {path}" for name in tensors if name in found
        ]
        found |= tensors
    if problems:
        raise ValueError("\n".join(problems))
    return found


def text_tensors(folder: Path) -> tuple[dict[str, StoredTensor], list[StoredTensor]]:
    """The tensors of the text model by their names in a text-only folder, and all others.

    Raises as `stored_tensors` and `read_text_config`.
    """
    text, others = dict[str, StoredTensor](), list[StoredTensor]()
    whole, shape = is_multimodal(read_config(folder)), read_model_shape(read_text_config(folder))
    unused = unused_tensors(shape)
    for name, tensor in stored_tensors(folder).items():
        if _BUFFER.fullmatch(name):
            continue
        plain = _text_name(name) if whole else name
        if plain in unused or (whole and name.startswith(_OTHER_PARTS)):
            others.append(tensor)
        else:
            text[plain] = tensor
    return text, others


def is_multimodal_folder(folder: Path) -> bool:
    """Whether it is a Hugging Face folder of a multimodal model."""
    has_config = (folder / "config.json").is_file() and flax_folder(folder) is None
    return has_config and is_multimodal(read_config(folder))


def flax_folder(folder: Path) -> Path | None:
    """The orbax checkpoint: the folder or, as on Kaggle, a subfolder; None if there is none.

    Safetensors files take precedence.
    """
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return None
    for place in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        if any((place / mark).is_file() for mark in FLAX_MARKS):
            return place
    return None


def check_folder(folder: Path) -> str | None:
    """Checks a model folder without reading weights.

    Returns:
        A sentence for the user if tensors of a multimodal model are skipped.

    Raises:
        FileNotFoundError: with the missing files.
        ValueError: with the damaged or unsupported files.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"model.path: no folder {folder}{nearest_hint(folder)}")
    if flax_folder(folder) is not None:
        if (folder / "config.json").exists():
            read_text_config(folder)
        return None
    tensors, others = text_tensors(folder)
    wanted = dict(tensor_shapes(read_model_shape(read_text_config(folder))))
    check_tensors(
        folder,
        wanted,
        shapes={name: tensor.shape for name, tensor in tensors.items()},
        dtypes={name: tensor.dtype for name, tensor in tensors.items()},
        optional={_HEAD},
    )
    if _HEAD in tensors:
        _check_head(folder, tensors[_HEAD], tensors[_EMBEDDING])
    skipped = f"{folder}: only the text model is used; {len(others)} other tensors are skipped"
    return skipped if others else None


def check_tensors(
    folder: Path,
    wanted: Mapping[str, tuple[int, ...]],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    optional: Collection[str] = (),
) -> None:
    """Compares the tensors of a model with those that its configuration requires.

    Args:
        folder: of the model, for the message.
        wanted: the shapes of the required tensors, by name.
        shapes: the shapes of the tensors in the files.
        dtypes: their types; see `StoredTensor`.
        optional: names of further tensors that the files may have.

    Raises:
        ValueError: listing the tensors that are missing, surplus, or of another shape or type.
    """
    problems = [f"missing: {name} {wanted[name]}" for name in wanted if name not in shapes]
    problems += [f"surplus: {name}" for name in sorted(shapes.keys() - wanted - set(optional))]
    for name, shape in wanted.items():
        if name not in shapes:
            continue
        if shapes[name] != shape:
            found = shapes[name]
            problems.append(f"shape of {name}: {found}, the configuration requires {shape}")
        if dtypes[name] not in READABLE:
            problems.append(f"dtype of {name}: {dtypes[name]}; supported: {', '.join(READABLE)}")
    if problems:
        more = len(problems) - _MOST_SHOWN
        problems[_MOST_SHOWN:] = [f"and {more} more"] if more > 0 else []
        raise ValueError(
            f"model.path: {folder} does not fit its configuration:\n  " + "\n  ".join(problems)
        )


def _check_head(folder: Path, head: StoredTensor, embedding: StoredTensor) -> None:
    """Refuses a head that differs from the embedding: only tied ones are supported."""
    ours, theirs = head.raw(), embedding.raw()
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape) and all(
        np.array_equal(ours[start : start + _BLOCK], theirs[start : start + _BLOCK])
        for start in range(0, len(ours), _BLOCK)
    )
    if not same:
        raise ValueError(
            f"model.path: {folder}: {head.name} differs from {embedding.name}; a head that is not "
            "tied to the embedding is not supported"
        )


def is_flax_tower(name: str) -> bool:
    """Whether a tensor of a flax checkpoint, by its path in the tree, is of images or sound."""
    return _FLAX_TOWER.search(name) is not None


def _text_name(name: str) -> str:
    for prefix, plain in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _read_index(folder: Path) -> Mapping[str, str] | None:
    """The file of each tensor; None if there is one file, which precedes an index."""
    path = folder / INDEX
    if (folder / SINGLE).is_file() or not path.is_file():
        return None
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"model.path: {path} is damaged: weight_map is not an object")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _WEIGHT_FILE.fullmatch(file):
            raise ValueError(
                f"model.path: {path} is damaged: {name} is in {show(file)}, not the name of a "
                ".safetensors file in this folder"
            )
    return weight_map


def read_object(path: Path) -> dict[str, Any]:
    """Reads the JSON object of a file.

    Raises:
        ValueError: if the file cannot be read or is not a JSON object.
    """
    text = read_text(path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"model.path: {path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"model.path: {path} is not a JSON object")
    return found


def read_text(path: Path) -> str:
    """Reads the text of a small file.

    Raises:
        ValueError: if it is not a file, cannot be read, or is not UTF-8.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"model.path: {path} is not a file")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"model.path: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"model.path: {path} is not UTF-8 text: {error}") from None


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Reads the tensors from the file's header; the library checks it, and the file's size.

    Layout: 8 bytes with the header's length, the header (JSON), the tensors' bytes.
    """
    with safe_open(path, framework="numpy"):
        pass
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        dtype = str(STORED_TYPES.get(entry["dtype"], entry["dtype"]))
        start, end = entry["data_offsets"]
        offset = 8 + length + start
        found[name] = StoredTensor(name, path, dtype, tuple(entry["shape"]), offset, end - start)
    return found
