"""Hugging Face's folders as a source of parameters; files are mapped, not read into memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from pipeline.compute.model.tensors import entry
from pipeline.inputs.hub.hf_folder import text_tensors

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class SafetensorsFolder:
    """The text model's tensors in a folder.

    Attributes:
        shapes: of the tensors, by the names they have in a folder of the text model alone.
        dtypes: their types: NumPy's words for those that can be read, else safetensors' own.
        ignored: tensors that may be there or not.
    """

    # A tied head that is written out all the same is the embedding once more.
    ignored = frozenset({"lm_head.weight"})

    def __init__(self, folder: Path) -> None:
        """Read the headers.

        Raises:
            FileNotFoundError: if a file is absent.
            ValueError: if one is damaged.
        """
        self._tensors, _ = text_tensors(folder)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.dtypes = {
            name: _DTYPES.get(tensor.dtype, tensor.dtype) for name, tensor in self._tensors.items()
        }

    def wanted(self, name: str, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """The tensors that make up our parameter `name`, and their shapes."""
        row = entry(name)
        return dict.fromkeys(row.tensors, row.stored_shape(shape))

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Our parameter `name` in the folder's type: the file's own pages wherever possible."""
        row = entry(name)
        return row.read([self._mapped(tensor) for tensor in row.tensors], shape)

    def _mapped(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        return tensor.data().view(jnp.dtype(_DTYPES[tensor.dtype])).reshape(tensor.shape)
