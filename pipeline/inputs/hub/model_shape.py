"""TODO."""

from __future__ import annotations

from pathlib import Path

from configs.schema import Config
from pipeline.contracts.model_shape import (
    _HANDLE,
    ModelShape,
    _cached,
)
from pipeline.inputs.hub.hf_folder import read_text_config
from pipeline.inputs.hub.published import PUBLISHED


def shape_of(config: Config) -> ModelShape:
    """The shape of the run's model: nothing is downloaded.

    From `config.json` where the model's folder is there, or in the hub's cache; else what Google
    has published under the name.

    Raises:
        FileNotFoundError: if the folder is absent or has no `config.json`.
        ValueError: if it is no Gemma that is computed here, or a handle that is neither in the
            cache nor known by its name.
    """
    path = config.model.path
    if "://" not in path:
        return ModelShape.of(read_text_config(Path(path)))
    cached = _cached(path)
    if cached is not None:
        return ModelShape.of(read_text_config(cached))
    known = _HANDLE.fullmatch(path)
    if known is None:
        names = ", ".join(f"hf://google/{name}-it" for name in PUBLISHED)
        raise ValueError(
            f"model.path: {path}: its sizes are not known before it is downloaded; download it, or "
            f"name a folder with its config.json; known by name are {names}"
        )
    return ModelShape.of(PUBLISHED[f"gemma-{known['kind'].lower()}"])
