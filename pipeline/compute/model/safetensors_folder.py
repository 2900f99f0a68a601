"""Parameters from Hugging Face's folders; files are memory-mapped."""

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
        shapes: shapes of the tensors, by their names in a folder of the text model alone.
        dtypes: NumPy names of readable dtypes, otherwise safetensors' names.
        ignored: optional tensors that are not read.
    """

    # Some folders store the tied head, which equals the embedding.
    ignored = frozenset({"lm_head.weight"})

    def __init__(self, folder: Path) -> None:
        """Reads the headers.

        Raises:
            FileNotFoundError: if a file is missing.
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
        """Our parameter `name` in the folder's dtype; a view of the mapped file if possible."""
        row = entry(name)
        return row.read([self._mapped(tensor) for tensor in row.tensors], shape)

    def _mapped(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        return tensor.data().view(jnp.dtype(_DTYPES[tensor.dtype])).reshape(tensor.shape)
