"""Gemma 3 weights in Hugging Face folders, read and written through one table.

Each row of the table names a parameter of ours, the tensors it is made of, and the way there and
back. What is read goes to the devices tensor by tensor.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from pipeline.hf_folder import INDEX, SINGLE, read_config, weight_files
from pipeline.model.gemma import Architecture, architecture


@dataclass(frozen=True)
class _Entry:
    """How one of our parameters is stored: tensor names, and both directions."""

    tensors: tuple[str, ...]
    read: Callable[[Sequence[np.ndarray], tuple[int, ...]], np.ndarray]
    write: Callable[[np.ndarray], list[np.ndarray]]
    stored_shape: Callable[[tuple[int, ...]], tuple[int, ...]]


def _plain(tensor: str) -> _Entry:
    return _Entry((tensor,), lambda t, _: t[0], lambda w: [w], lambda shape: shape)


def _transposed(tensor: str) -> _Entry:
    return _Entry((tensor,), lambda t, _: t[0].T, lambda w: [w.T], lambda shape: shape[::-1])


def _heads_in(tensor: str) -> _Entry:
    """Ours `heads embed head_dim`, stored `(heads head_dim) embed`."""
    return _Entry(
        (tensor,),
        lambda t, shape: _split_heads(t[0], shape),
        lambda w: [_join_heads(w)],
        lambda shape: (shape[0] * shape[2], shape[1]),
    )


def _stacked_heads_in(*tensors: str) -> _Entry:
    """Ours `len(tensors) heads embed head_dim`, stored apart as in `_heads_in`."""
    return _Entry(
        tensors,
        lambda t, shape: np.stack([_split_heads(x, shape[1:]) for x in t]),
        lambda w: [_join_heads(x) for x in w],
        lambda shape: (shape[1] * shape[3], shape[2]),
    )


def _heads_out(tensor: str) -> _Entry:
    """Ours `heads head_dim embed`, stored `embed (heads head_dim)`."""
    return _Entry(
        (tensor,),
        lambda t, shape: t[0].T.reshape(shape),
        lambda w: [w.reshape(-1, w.shape[2]).T],
        lambda shape: (shape[2], shape[0] * shape[1]),
    )


def _split_heads(stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    heads, embed, head_dim = shape
    return stored.reshape(heads, head_dim, embed).transpose(0, 2, 1)


def _join_heads(ours: np.ndarray) -> np.ndarray:
    return ours.transpose(0, 2, 1).reshape(-1, ours.shape[1])


_NORMS = {
    "pre_attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn._query_norm": "self_attn.q_norm",
    "attn._key_norm": "self_attn.k_norm",
}


def _entry(name: str) -> _Entry:
    """The table's row for one of our parameters."""
    if name == "embedder.input_embedding":
        return _plain("model.embed_tokens.weight")
    if name == "final_norm.scale":
        return _plain("model.norm.weight")
    match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(w|kernel|scale)", name)
    assert match, name
    layer, module = f"model.layers.{match[1]}", match[2]
    attn = f"{layer}.self_attn"
    if module in _NORMS:
        return _plain(f"{layer}.{_NORMS[module]}.weight")
    if module.startswith("mlp."):
        return _transposed(f"{layer}.{module}.weight")
    return {
        "attn.q_einsum": _heads_in(f"{attn}.q_proj.weight"),
        "attn.kv_einsum": _stacked_heads_in(f"{attn}.k_proj.weight", f"{attn}.v_proj.weight"),
        "attn.qkv_einsum": _stacked_heads_in(
            f"{attn}.q_proj.weight", f"{attn}.k_proj.weight", f"{attn}.v_proj.weight"
        ),
        "attn.attn_vec_einsum": _heads_out(f"{attn}.o_proj.weight"),
    }[module]


def read_architecture(folder: Path, *, dtype: jnp.dtype) -> Architecture:
    """The architecture that a folder's `config.json` describes.

    Raises:
        FileNotFoundError: if the folder or the file is absent.
        ValueError: if it is no JSON, or no Gemma 3 that is computed here.
    """
    return architecture(read_config(folder), dtype=dtype)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Where each tensor of a folder is.

    Raises:
        FileNotFoundError: if weights or one of the files that the index names are absent.
        ValueError: if a file cannot be read.
    """
    where: dict[str, Path] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="numpy") as file:
                where.update(dict.fromkeys(file.keys(), path))
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from None
    return where


def load(
    folder: Path,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    *,
    sharding: jax.sharding.Sharding,
) -> dict[str, jax.Array]:
    """The parameters named by `shapes`, in their types and with `sharding`.

    Raises:
        FileNotFoundError: if a file is absent.
        ValueError: listing every tensor that is missing, surplus or of another shape.
    """
    where = tensor_files(folder)
    entries = {name: _entry(name) for name in shapes}
    _check(folder, where, entries, shapes)
    params = {}
    for name, entry in entries.items():
        spec = shapes[name]
        stored = [_read(where[tensor], tensor) for tensor in entry.tensors]
        value = entry.read(stored, spec.shape).astype(spec.dtype)
        params[name] = jax.device_put(value, sharding)
    return params


def _read(path: Path, tensor: str) -> np.ndarray:
    with safe_open(path, framework="numpy") as file:
        return file.get_tensor(tensor)


def _check(
    folder: Path,
    where: Mapping[str, Path],
    entries: Mapping[str, _Entry],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
    wanted = {
        tensor: entry.stored_shape(shapes[name].shape)
        for name, entry in entries.items()
        for tensor in entry.tensors
    }
    # A tied head that is written out all the same is the embedding once more.
    surplus = sorted(where.keys() - wanted.keys() - {"lm_head.weight"})
    problems = [f"missing: {t} {wanted[t]}" for t in wanted if t not in where]
    problems += [f"surplus: {t}" for t in surplus]
    for tensor, shape in wanted.items():
        if tensor in where:
            with safe_open(where[tensor], framework="numpy") as file:
                found = tuple(file.get_slice(tensor).get_shape())
            if found != shape:
                problems.append(f"shape of {tensor}: {found}, config.json asks for {shape}")
    if problems:
        raise ValueError(f"{folder} does not fit its config.json:\n  " + "\n  ".join(problems))


def stored_tensors(params: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Our parameters under Hugging Face's names and in its shapes."""
    for name, value in params.items():
        entry = _entry(name)
        for tensor, stored in zip(entry.tensors, entry.write(value), strict=True):
            yield tensor, np.ascontiguousarray(stored)


def save(folder: Path, params: Mapping[str, np.ndarray], *, like: Path) -> None:
    """Writes a Hugging Face folder: weights, and configuration and tokenizer from `like`.

    Args:
        folder: an existing, empty folder.
        params: by our names; their type is written and named in `config.json`.
        like: the folder the model came from.
    """
    for path in sorted(like.iterdir()):
        if path.is_file() and path.suffix not in {".safetensors", ".bin"} and path.name != INDEX:
            shutil.copyfile(path, folder / path.name)
    config = read_config(like)
    dtype = str(next(iter(params.values())).dtype)
    config = {key: value for key, value in config.items() if key not in {"dtype", "torch_dtype"}}
    # Both spellings: transformers 5 reads `dtype`, 4 reads `torch_dtype`.
    config |= {"dtype": dtype, "torch_dtype": dtype}
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    save_file(dict(stored_tensors(params)), folder / SINGLE, metadata={"format": "pt"})
