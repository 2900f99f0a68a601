"""Checkpoints of the learner with Orbax: written in the background, verified when read.

The caller waits for a copy of the state in host memory. One thread hashes and writes the copies in
their order; a checkpoint appears in the folder when it is complete, and counts from then on. The
best adapter, beside the checkpoints, is written by the same thread: it is never of a later version
than the newest checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as retention

from pipeline.compute.learner.state import LearnerState
from pipeline.compute.model import lora
from pipeline.compute.model.adapter_file import write_adapter_file
from pipeline.contracts.checkpoint_files import BEST, best_version, check_files, write_hashes
from pipeline.contracts.record_files import move_to_superseded, unwritten

Meta = dict[str, Any]
"""The state of the coordinator: counters and sampling state, as JSON."""

_STATUS = re.compile(r"([A-Z_]+): ")
"""Start of a TensorStore message: the name of an Abseil status code."""
_DAMAGE = {"DATA_LOSS", "FAILED_PRECONDITION", "NOT_FOUND", "OUT_OF_RANGE"}
"""Status codes of missing, truncated or corrupt files; other codes mean disk or memory errors."""


@dataclass
class _KeepVersion:
    """Orbax's retention policy that preserves one version.

    Attributes:
        version: None: none.
    """

    version: int | None = None

    def should_preserve(
        self,
        checkpoints: Sequence[retention.PolicyCheckpointInfo],
        *,
        context: retention.PreservationContext,  # noqa: ARG002  # of Orbax's protocol
    ) -> Sequence[bool]:
        """Whether each checkpoint is preserved."""
        return [one.step == self.version for one in checkpoints]


class Checkpoints:
    """The `checkpoints/` folder of a run; created with the first checkpoint.

    It keeps the newest checkpoints, that of the best version, and those of every Nth version.

    Args:
        folder: path of the folder.
        keep: number of newest checkpoints that are kept.
        keep_every: versions that are multiples of it are kept, too; None: no others.
    """

    def __init__(self, folder: Path, *, keep: int, keep_every: int | None = None) -> None:
        self.folder = folder
        self._keep = [retention.LatestN(keep)]
        self._keep += [retention.EveryNSteps(keep_every)] if keep_every else []
        self._best = _KeepVersion()
        self._damaged: list[int] = []
        self._opened: ocp.CheckpointManager | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[float] | None = None
        self._keeping: Future[None] | None = None

    def _manager(self) -> ocp.CheckpointManager:
        if self._opened is None:
            self._best.version = best_version(self.folder)
            options = ocp.CheckpointManagerOptions(
                preservation_policy=retention.AnyPreservationPolicy([*self._keep, self._best]),
                enable_async_checkpointing=False,  # `save` copies and returns sooner
                cleanup_tmp_directories=True,  # of a process that was killed while it wrote
            )
            self._opened = ocp.CheckpointManager(self.folder, options=options)
        return self._opened

    def save(self, state: LearnerState, meta: Meta) -> None:
        """Begins to write a checkpoint of this version, unless there is one already.

        Returns when the state has been copied: an update may donate it. Waits for the write before.

        Raises:
            OSError: if the checkpoint before could not be written.
        """
        began = time.monotonic()
        self.wait()
        copy = replace(state.on_host(), previous=jax.device_get(state.previous))
        plain = json.loads(json.dumps(meta))
        self._saving = self._writer.submit(self._write, copy, plain, began)

    def saved(self) -> float | None:
        """Seconds from the last `save` until its checkpoint was complete; None: it is not yet.

        Raises:
            OSError: if it could not be written.
        """
        if self._saving is None or not self._saving.done():
            return None
        return self._saving.result()

    def keep_best(self, adapter: Mapping[str, np.ndarray], *, version: int) -> None:
        """Begins to replace the best adapter, after the checkpoint that is being written.

        Args:
            adapter: in host memory; it must not change.
            version: of the adapter; its checkpoint is kept.
        """
        saving = self._saving

        def write() -> None:
            if saving is not None:
                saving.result()
            write_adapter_file(self.folder / BEST, adapter, version=version)
            self._best.version = version

        self._keeping = self._writer.submit(write)

    def wait(self) -> None:
        """Returns when everything is written.

        Raises:
            OSError: if something could not be written.
        """
        for writing in (self._saving, self._keeping):
            if writing is not None:
                writing.result()

    def _write(self, state: LearnerState, meta: Meta, began: float) -> float:
        """Writes a checkpoint; returns the seconds since `began`.

        Damaged checkpoints that `restore` skipped move to `superseded/` first.
        """
        if self._damaged:
            # Orbax does not save a version that is older than the newest one in the folder.
            folders = [self.folder / str(step) for step in self._damaged]
            move_to_superseded(self.folder.parent, folders)
            self._damaged.clear()
            self._manager().reload()
        if state.version not in self._manager().all_steps():
            facts = {
                "version": state.version,
                "updates": state.updates,
                "sha256": _sha256(state, meta),
                "adapter_sha256": lora.sha256(state.adapter),
                "meta": meta,
            }
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(_tree(state)), facts=ocp.args.JsonSave(facts)
            )
            try:
                saved = self._manager().save(state.version, args=args)
            except ValueError as error:  # of TensorStore
                raise unwritten(self.folder / str(state.version), error) from None
            assert saved, state.version
            write_hashes(self.folder / str(state.version))
        return time.monotonic() - began

    def restore(self, like: LearnerState) -> tuple[LearnerState, Meta, list[str]] | None:
        """Restores the newest readable checkpoint whose content has the recorded hash.

        Args:
            like: a state with the shapes, dtypes and shardings to restore to.

        Returns:
            State, the coordinator's state, and one line for each newer checkpoint that was skipped
            as damaged; None if the folder holds no checkpoint.

        Raises:
            ValueError: if there are checkpoints and all of them are damaged.
            OSError: if a checkpoint cannot be read now. It may be intact, so it is not skipped.
            Exception: any other error that is not damage, such as a lack of memory.
        """
        self.wait()
        steps = self._manager().all_steps() if self.folder.is_dir() else []
        damaged: dict[int, str] = {}
        for step in sorted(steps, reverse=True):
            try:
                state, meta = self._restore(step, like)
            except Exception as error:  # noqa: BLE001  # raised again, or reported
                cause = _innermost(error)
                if not _is_damage(cause):
                    raise _undamaged(step, cause) from None
                damaged[step] = f"checkpoint {step} is damaged: {_first_line(error)}"
            else:
                self._damaged = list(damaged)
                return state, meta, list(damaged.values())
        if damaged:
            lines = "; ".join(damaged.values())
            raise ValueError(
                f"no usable checkpoint in {self.folder}: {lines}; nothing was changed. Restore "
                "a checkpoint from a backup, or start a new run with --run.name"
            )
        return None

    def _restore(self, step: int, like: LearnerState) -> tuple[LearnerState, Meta]:
        return _read(self._manager(), step, like)


def saved_optimizer(folder: Path, like: LearnerState) -> optax.OptState:
    """The optimizer's state of the checkpoint in `folder`, which belongs to another run.

    Args:
        folder: `checkpoints/N` of a run, or a copy; nothing is written there.
        like: a state with an adapter of the same shape.

    Raises:
        ValueError: if it is damaged, or of another shape.
        OSError: if it cannot be read now.
    """
    try:
        tree = ocp.PyTreeCheckpointHandler().metadata(folder / "state").tree
        like = replace(
            like,
            reference=like.adapter if "reference" in tree else None,
            previous=like.adapter if "previous" in tree else None,
        )
        options = ocp.CheckpointManagerOptions(read_only=True)
        with ocp.CheckpointManager(folder.parent, options=options) as manager:
            return _read(manager, int(folder.name), like)[0].optimizer
    except Exception as error:  # noqa: BLE001  # raised again, or reported
        cause = _innermost(error)
        if not _is_damage(cause):
            raise _undamaged(int(folder.name), cause) from None
        raise ValueError(
            f"run.fork: the optimizer state in {folder} cannot be used: {_first_line(error)}"
        ) from None


def _read(
    manager: ocp.CheckpointManager, step: int, like: LearnerState
) -> tuple[LearnerState, Meta]:
    """Reads a checkpoint and compares its hashes: of the files, then of what Orbax made of them."""
    check_files(Path(manager.directory) / str(step))
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _tree(like))
    restored = manager.restore(
        step,
        args=ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), facts=ocp.args.JsonRestore()
        ),
    )
    facts, tree = restored["facts"], restored["state"]
    state = replace(
        like,
        adapter=tree["adapter"],
        optimizer=tree["optimizer"],
        reference=tree.get("reference"),
        previous=tree.get("previous"),
        version=facts["version"],
        updates=facts["updates"],
    )
    found = _sha256(state, facts["meta"])
    if found != facts["sha256"]:
        raise ValueError(f"the hash of its content is {found}, recorded was {facts['sha256']}")
    return state, facts["meta"]


def _tree(state: LearnerState) -> dict[str, Any]:
    tree: dict[str, Any] = {"adapter": state.adapter, "optimizer": state.optimizer}
    more = {"reference": state.reference, "previous": state.previous}
    return tree | {name: adapter for name, adapter in more.items() if adapter is not None}


def _sha256(state: LearnerState, meta: Meta) -> str:
    """Hash of the saved state; Orbax does not detect damage inside large arrays."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(_tree(state)):
        value = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {value.dtype} {value.shape}".encode())
        digest.update(value.tobytes())
    counters = [state.version, state.updates, meta]
    digest.update(json.dumps(counters, sort_keys=True).encode())
    return digest.hexdigest()


def _innermost(error: BaseException) -> BaseException:
    """The original error: Orbax wraps errors that occur while it reads an array."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _is_damage(error: BaseException) -> bool:
    """Whether files are missing or malformed; other errors may be transient."""
    if isinstance(error, ValueError) and (status := _STATUS.match(str(error))):
        return status[1] in _DAMAGE
    missing = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    malformed = (ValueError, LookupError, AttributeError, TypeError)
    return isinstance(error, (*missing, *malformed))


def _undamaged(step: int, error: BaseException) -> BaseException:
    """The error itself; an OSError for TensorStore's ValueErrors that are not damage."""
    if not isinstance(error, ValueError):
        return error
    return OSError(f"checkpoint {step} cannot be read: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
