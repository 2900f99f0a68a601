"""Checkpoints of the learner with Orbax, written in the background.

The caller waits for a copy of the state in host memory. One thread writes the copies in their
order; a checkpoint appears in the folder when it is complete, and counts from then on. The
best adapter, beside the checkpoints, is written by the same thread: it is never of a later version
than the newest checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
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
from pipeline.run.checkpoint_files import BEST, best_version
from pipeline.run.record_files import unwritten
from pipeline.run.threads import first_line

Meta = dict[str, Any]
"""The state of the coordinator: counters and sampling state, as JSON."""


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
        # The first one is of the best version, and replaced with it.
        self._kept = [retention.CustomSteps([]), retention.LatestN(keep)]
        self._kept += [retention.EveryNSteps(keep_every)] if keep_every else []
        self._opened: ocp.CheckpointManager | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[float] | None = None
        self._keeping: Future[None] | None = None

    def _manager(self) -> ocp.CheckpointManager:
        if self._opened is None:
            if (best := best_version(self.folder)) is not None:
                self._kept[0] = retention.CustomSteps([best])
            options = ocp.CheckpointManagerOptions(
                preservation_policy=retention.AnyPreservationPolicy(self._kept),
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
        plain = json.loads(json.dumps(meta))
        self._saving = self._writer.submit(self._write, state.on_host(), plain, began)

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
            self._kept[0] = retention.CustomSteps([version])

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
        """Writes a checkpoint; returns the seconds since `began`."""
        if state.version not in self._manager().all_steps():
            facts = {
                "version": state.version,
                "updates": state.updates,
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
        return time.monotonic() - began

    def restore(self, like: LearnerState) -> tuple[LearnerState, Meta] | None:
        """Restores the newest checkpoint.

        Args:
            like: a state with the shapes, dtypes and shardings to restore to.

        Returns:
            State and the coordinator's state; None if the folder holds no checkpoint.

        Raises:
            ValueError: if it cannot be read, with the remedy.
            Exception: any other error, such as a lack of memory.
        """
        self.wait()
        step = self._manager().latest_step() if self.folder.is_dir() else None
        if step is None:
            return None
        try:
            return _read(self._manager(), step, like)
        except Exception as error:  # noqa: BLE001  # raised again, or reported
            raise _unreadable(
                error,
                f"the checkpoint {self.folder / str(step)} cannot be restored",
                "Move it away to continue from the one before it, or start another run with "
                "--run.fork RUN@STEP",
            ) from None


def saved_optimizer(folder: Path, like: LearnerState) -> optax.OptState:
    """The optimizer's state of the checkpoint in `folder`, which belongs to another run.

    Args:
        folder: `checkpoints/N` of a run, or a copy; nothing is written there.
        like: a state with an adapter of the same shape.

    Raises:
        ValueError: if it cannot be read, or is of another shape.
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
        raise _unreadable(
            error,
            f"run.fork: the optimizer state in {folder} cannot be used",
            "fork from another step",
        ) from None


def _read(
    manager: ocp.CheckpointManager, step: int, like: LearnerState
) -> tuple[LearnerState, Meta]:
    """Reads a checkpoint."""
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
    return state, facts["meta"]


def _tree(state: LearnerState) -> dict[str, Any]:
    tree: dict[str, Any] = {"adapter": state.adapter, "optimizer": state.optimizer}
    more = {"reference": state.reference, "previous": state.previous}
    return tree | {name: adapter for name, adapter in more.items() if adapter is not None}


def _unreadable(error: BaseException, what: str, remedy: str) -> BaseException:
    """The error to raise where a checkpoint cannot be read: a lack of memory stays what it is."""
    while error.__cause__ is not None:  # Orbax wraps errors that occur while it reads an array
        error = error.__cause__
    if not isinstance(error, OSError | ValueError | LookupError | AttributeError | TypeError):
        return error
    why, *_ = first_line(error).partition(" [tensorstore_spec")
    return ValueError(f"{what}: {why}. {remedy}")
