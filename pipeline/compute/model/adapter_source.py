"""Loads initial adapters: from a PEFT folder, an export, a run, or one of its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from configs.schema import Lora
from pipeline.compute.model import adapter_file, lora, peft_folder
from pipeline.compute.model.peft_folder import fit_to_policy, read_peft
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.projections import needs_separate_lora_a

BEST = "best"
"""Folder of the best adapter by validation in `checkpoints/`."""


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter on the devices.

    Attributes:
        adapter: float32 parameters, of the policy's shapes.
        version: steps it was trained for; 0 if unknown.
        what: description of its source.
    """

    adapter: Params
    version: int
    what: str


def load_adapter(path: str, policy: Policy) -> LoadedAdapter:
    """Reads the adapter at `path` and places it on the policy's mesh.

    For a run folder, reads its best adapter by validation if there is one, else its newest
    checkpoint.

    Raises:
        FileNotFoundError: if there is no adapter at `path`.
        ValueError: if it is damaged, or does not fit the base or the `lora` settings.
    """
    found = find_adapter(Path(path))
    if isinstance(found, Path):
        peft = read_peft(found)
        adapter = policy.place_adapter(fit_to_policy(peft, policy))
        return LoadedAdapter(adapter, 0, f"PEFT adapter {found}")
    _check_scale(found.folder, policy.lora)
    try:
        values, version = found.read()
        placed = policy.place_adapter(values)
    except ValueError as error:
        raise ValueError(f"lora.start: {found.folder}: {error}") from None
    return LoadedAdapter(placed, version, f"step {version} of {found.folder}")


def needs_separate(settings: Lora) -> bool:
    """Whether the adapter of `lora.start` needs a separate lora_a for each projection.

    Raises:
        FileNotFoundError: if there is no adapter.
        ValueError: if it cannot be read.
    """
    if settings.start is None:
        return False
    found = find_adapter(Path(settings.start))
    if isinstance(found, Path):
        return needs_separate_lora_a(read_peft(found).pairs)
    # Only an adapter with separate lora_a has two ranks.
    ranks = {shape[0] for name, shape in found.shapes().items() if name.endswith("_lora_b")}
    return len(ranks) > 1


@dataclass(frozen=True)
class BestAdapter:
    """The adapter of `checkpoints/best`."""

    folder: Path

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter."""
        return {name: value.shape for name, value in self.read()[0].items()}

    def read(self) -> tuple[dict[str, np.ndarray], int]:
        """The adapter and its version.

        Raises:
            ValueError: if it is damaged.
        """
        return adapter_file.read_adapter_file(self.folder)


@dataclass(frozen=True)
class Checkpoint:
    """The adapter of the Orbax checkpoint `checkpoints/N`; does not read the optimizer's state."""

    folder: Path

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter."""
        return {name: tuple(leaf.shape) for name, leaf in self._metadata().items()}

    def read(self) -> tuple[dict[str, np.ndarray], int]:
        """The adapter and its version.

        Raises:
            ValueError: if it is damaged.
        """
        leaves = self._metadata()
        wanted = {n: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for n, leaf in leaves.items()}
        in_memory = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in wanted}
        args = ocp.args.PyTreeRestore(
            item={"adapter": wanted}, restore_args={"adapter": in_memory}, partial_restore=True
        )
        try:
            facts = json.loads((self.folder / "facts" / "metadata").read_text(encoding="utf-8"))
            version, sha256 = int(facts["version"]), facts["adapter_sha256"]
            found = ocp.PyTreeCheckpointHandler().restore(self.folder / "state", args=args)
        except Exception as error:  # noqa: BLE001  # damage can cause any error; reported
            raise ValueError(f"damaged: {_first_line(error)}") from None
        adapter = {name: np.asarray(value) for name, value in found["adapter"].items()}
        if lora.sha256(adapter) != sha256:
            raise ValueError("damaged: the adapter does not match the recorded hash")
        return adapter, version

    def _metadata(self) -> Mapping[str, Any]:
        try:
            metadata: Mapping[str, Any] = (
                ocp.PyTreeCheckpointHandler().metadata(self.folder / "state").tree["adapter"]
            )
        except Exception as error:  # noqa: BLE001  # damage can cause any error; reported
            raise ValueError(f"{self.folder} is damaged: {_first_line(error)}") from None
        return metadata


def find_adapter(path: Path) -> Path | BestAdapter | Checkpoint:
    """The adapter at `path`; a `Path` for a PEFT folder.

    Raises:
        FileNotFoundError: if there is none.
    """
    if (path / peft_folder.CONFIG).is_file():
        return path
    if (path / "adapter" / peft_folder.CONFIG).is_file():
        return path / "adapter"
    if (path / adapter_file.NAME).is_file():
        return BestAdapter(path)
    if path.name.isdecimal() and (path / "state").is_dir():
        return Checkpoint(path)
    checkpoints = path / "checkpoints"
    if (checkpoints / BEST / adapter_file.NAME).is_file():
        return BestAdapter(checkpoints / BEST)
    steps = steps_in(checkpoints)
    if steps:
        return Checkpoint(checkpoints / str(steps[-1]))
    raise FileNotFoundError(
        f"lora.start: {path} is no PEFT folder ({peft_folder.CONFIG}), no export (adapter/), no "
        "run folder with checkpoints and none of its checkpoints/N"
    )


def steps_in(checkpoints: Path) -> list[int]:
    """Steps that have a checkpoint, ascending."""
    if not checkpoints.is_dir():
        return []
    names = (path.name for path in checkpoints.iterdir() if (path / "state").is_dir())
    return sorted(int(name) for name in names if name.isdecimal())


def _check_scale(folder: Path, settings: Lora) -> None:
    """Compares the scale with that of the checkpoint's run, if its `config.json` exists.

    Raises:
        ValueError: if the adapter was trained with another scale.
    """
    config = folder.parent.parent / "config.json"
    if not config.is_file():
        return
    theirs = Lora.model_validate(json.loads(config.read_text(encoding="utf-8"))["lora"])
    if theirs.scale != settings.scale:
        raise ValueError(
            f"lora.start: {folder} was trained with scale {theirs.scale:g} (alpha "
            f"{theirs.alpha:g}, rank {theirs.rank}, {theirs.scaling}); lora.alpha, lora.rank and "
            f"lora.scaling here make {settings.scale:g}"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
