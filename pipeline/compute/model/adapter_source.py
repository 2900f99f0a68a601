"""Loads initial adapters: from a PEFT folder, an export, a run, or one of its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from configs.load import read_saved_config
from configs.schema import Lora
from pipeline.compute.model import adapter_file, peft_folder
from pipeline.compute.model.peft_folder import fit_to_policy, read_peft, scale_problems
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.projections import needs_separate_lora_a
from pipeline.run.checkpoint_files import BEST, BEST_FILE
from pipeline.run.threads import first_line

Reader = Callable[[Path], tuple[dict[str, np.ndarray], int]]
"""Reads the adapter of a folder and its version."""


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
    folder, read = _find(Path(path))
    if read is None:
        adapter = policy.place_adapter(fit_to_policy(read_peft(folder), policy))
        return LoadedAdapter(adapter, 0, f"PEFT adapter {folder}")
    _check_scale(folder, policy.lora)
    with _named(folder):
        values, version = read(folder)
        adapter = policy.place_adapter(values)
    return LoadedAdapter(adapter, version, f"step {version} of {folder}")


def needs_separate(settings: Lora) -> bool:
    """Whether the adapter of `lora.start` needs a separate lora_a for each projection.

    Raises:
        FileNotFoundError: if there is no adapter.
        ValueError: if it cannot be read.
    """
    if settings.start is None:
        return False
    folder, read = _find(Path(settings.start))
    if read is None:
        return needs_separate_lora_a(read_peft(folder).pairs)
    with _named(folder):
        adapter, _ = read(folder)
    # Only an adapter with separate lora_a has two ranks.
    return len({len(value) for name, value in adapter.items() if name.endswith("_lora_b")}) > 1


def check_start(settings: Lora) -> None:
    """Checks `lora.start` as far as possible without the base; reads it only in PEFT's format.

    Raises:
        FileNotFoundError: if there is no adapter.
        ValueError: if it cannot be read, or was trained with another scale.
    """
    assert settings.start is not None
    folder, read = _find(Path(settings.start))
    problems = scale_problems(read_peft(folder), settings) if read is None else []
    if problems:
        raise ValueError(f"lora.start: {folder} does not fit:\n  {problems[0]}")


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Adds setting and folder to error messages."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"lora.start: {folder}: {error}") from None


def _find(path: Path) -> tuple[Path, Reader | None]:
    """The folder of the adapter at `path`, and what reads it; None for a PEFT folder.

    Raises:
        FileNotFoundError: if there is none.
    """
    for folder in (path, path / "adapter"):
        if (folder / peft_folder.CONFIG).is_file():
            return folder, None
    checkpoints = path / "checkpoints"
    if (path / BEST_FILE).is_file():
        return path, adapter_file.read_adapter_file
    if path.name.isdecimal() and (path / "state").is_dir():
        return path, _read_checkpoint
    if (checkpoints / BEST / BEST_FILE).is_file():
        return checkpoints / BEST, adapter_file.read_adapter_file
    names = (state.parent.name for state in checkpoints.glob("*/state"))
    if steps := [int(name) for name in names if name.isdecimal()]:
        return checkpoints / str(max(steps)), _read_checkpoint
    raise FileNotFoundError(
        f"lora.start: {path} is no PEFT folder ({peft_folder.CONFIG}), no export (adapter/), no "
        "run folder with checkpoints and none of its checkpoints/N"
    )


def _read_checkpoint(folder: Path) -> tuple[dict[str, np.ndarray], int]:
    """Adapter and version of the Orbax checkpoint `checkpoints/N`; not the optimizer's state.

    Raises:
        ValueError: if it is damaged.
    """
    import orbax.checkpoint as ocp

    handler, state = ocp.PyTreeCheckpointHandler(), folder / "state"
    try:
        leaves = handler.metadata(state).tree["adapter"]
        wanted = {n: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for n, leaf in leaves.items()}
        in_memory = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in wanted}
        args = ocp.args.PyTreeRestore(
            item={"adapter": wanted}, restore_args={"adapter": in_memory}, partial_restore=True
        )
        facts = json.loads((folder / "facts" / "metadata").read_text(encoding="utf-8"))
        version = int(facts["version"])
        found = handler.restore(state, args=args)["adapter"]
    except Exception as error:  # noqa: BLE001  # damage can cause any error; reported
        raise ValueError(f"damaged: {first_line(error)}") from None
    return {name: np.asarray(value) for name, value in found.items()}, version


def _check_scale(folder: Path, settings: Lora) -> None:
    """Compares the scale with that of the checkpoint's run, if its `config.json` exists.

    Raises:
        ValueError: if the adapter was trained with another scale.
    """
    config = folder.parent.parent / "config.json"
    if not config.is_file():
        return
    theirs = Lora.model_validate(read_saved_config(config)["lora"])
    if theirs.scale != settings.scale:
        raise ValueError(
            f"lora.start: {folder} was trained with scale {theirs.scale:g} (alpha "
            f"{theirs.alpha:g}, rank {theirs.rank}, {theirs.scaling}); lora.alpha, lora.rank and "
            f"lora.scaling here make {settings.scale:g}"
        )
