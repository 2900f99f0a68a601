"""Checkpoints: restored bit for bit, unreadable ones refused, the newest N kept."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from pipeline.compute.learner.checkpoint import Checkpoints, Meta
from pipeline.compute.learner.optimizer import grpo_rate, make_optimizer
from pipeline.compute.learner.state import LearnerState
from pipeline.compute.model import lora
from tests import tiny

CONFIG = tiny.make_config()


def fresh(devices: int = 1) -> LearnerState:
    """A state of zeros with the shapes of the tiny policy."""
    adapter = tiny.policy(layers=2, devices=devices).no_adapter()
    optimizer = make_optimizer(CONFIG, grpo_rate(CONFIG)).init(adapter)
    place = next(iter(adapter.values())).sharding
    return LearnerState(adapter, jax.device_put(optimizer, place), version=0, updates=0)


def trained(version: int, devices: int = 1) -> LearnerState:
    """A state of random values that depend on the version."""
    rng = np.random.default_rng(version)

    def fill(x: jax.Array) -> jax.Array:
        value = rng.standard_normal(x.shape) if x.ndim else np.full((), version)
        return jax.device_put(value.astype(x.dtype), x.sharding)

    state = fresh(devices)
    return dataclasses.replace(
        state,
        adapter=jax.tree.map(fill, state.adapter),
        optimizer=jax.tree.map(fill, state.optimizer),
        version=version,
        updates=3 * version,
    )


def same_bits(found: LearnerState, expected: LearnerState) -> None:
    assert (found.version, found.updates) == (expected.version, expected.updates)

    def same(path: Any, one: jax.Array, two: jax.Array) -> None:
        assert (one.dtype, one.sharding) == (two.dtype, two.sharding)
        np.testing.assert_array_equal(one, two, err_msg=jax.tree_util.keystr(path))

    jax.tree.map_with_path(
        same, (found.adapter, found.optimizer), (expected.adapter, expected.optimizer)
    )


def write(checkpoints: Checkpoints, state: LearnerState, meta: Meta) -> None:
    """Writes a checkpoint to its end."""
    checkpoints.save(state, meta)
    checkpoints.wait()


META: dict[str, Any] = {"cursor": 7, "counts": {"tokens": 123}, "names": ["a", "b"], "rate": 0.1}


@pytest.mark.parametrize(("saved_on", "restored_on"), [(1, 1), (1, 4), (8, 8)])
def test_a_state_with_its_other_adapters_is_restored_bit_for_bit(
    tmp_path: Path, saved_on: int, restored_on: int
):
    state = dataclasses.replace(
        trained(5, saved_on),
        previous=trained(9, saved_on).adapter,
        reference=trained(8, saved_on).adapter,
    )
    write(Checkpoints(tmp_path / "checkpoints", keep=2), state, META)
    like = fresh(restored_on)
    like = dataclasses.replace(like, previous=like.adapter, reference=like.adapter)
    found = Checkpoints(tmp_path / "checkpoints", keep=2).restore(like)
    assert found is not None
    restored, meta = found
    same_bits(restored, trained(5, restored_on))
    assert meta == META
    for one, version in ((restored.previous, 9), (restored.reference, 8)):
        assert one is not None
        assert lora.sha256(one) == lora.sha256(trained(version).adapter)


def test_the_best_version_and_every_nth_are_kept_besides_the_newest(tmp_path: Path):
    folder = tmp_path / "checkpoints"

    def kept() -> list[int]:
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())

    checkpoints = Checkpoints(folder, keep=2, keep_every=4)
    for version in range(1, 10):
        write(checkpoints, trained(version), META)
        if version in {2, 6}:
            checkpoints.keep_best({"x": np.zeros(3, np.float32)}, version=version)
    assert kept() == [4, 6, 8, 9]
    # A later process knows the best version from its file.
    checkpoints = Checkpoints(folder, keep=1)
    for version in (10, 11):
        write(checkpoints, trained(version), META)
    assert kept() == [6, 11]


def test_a_checkpoint_is_of_the_state_before_a_donating_update(tmp_path: Path):
    state = trained(5)
    adapter, expected = state.adapter, jax.tree.map(np.array, state.adapter)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(state, META)
    double = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0)
    jax.block_until_ready(double(adapter))
    assert all(leaf.is_deleted() for leaf in adapter.values())
    checkpoints.wait()
    found = Checkpoints(tmp_path / "checkpoints", keep=1).restore(fresh())
    assert found is not None
    for name, value in found[0].adapter.items():
        np.testing.assert_array_equal(value, expected[name])


def test_a_checkpoint_counts_when_it_is_complete(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, keep=1)
    assert checkpoints.restore(fresh()) is None
    write(checkpoints, trained(1), META)
    go = threading.Event()
    checkpoints._writer.submit(go.wait)  # delays all writing
    checkpoints.save(trained(2), META)
    checkpoints.keep_best({"x": np.zeros(3, np.float32)}, version=2)
    assert checkpoints.saved() is None
    # Of a process that is killed now, the checkpoint before and no later best adapter remain.
    found = Checkpoints(folder, keep=1).restore(fresh())
    assert found is not None
    assert found[0].version == 1
    assert not (folder / "best").exists()
    go.set()
    checkpoints.wait()
    assert checkpoints.saved() is not None
    assert (folder / "best").exists()


def test_a_checkpoint_that_cannot_be_written_is_an_error_of_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, keep=2)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", full)
        checkpoints.save(trained(1), META)
        checkpoints.keep_best({"x": np.zeros(3, np.float32)}, version=1)
        with pytest.raises(OSError, match="No space left"):
            checkpoints.wait()
        with pytest.raises(OSError, match="No space left"):
            checkpoints.saved()
    assert not (folder / "best").exists()


def test_a_checkpoint_that_cannot_be_read_stops_the_start_with_the_remedy(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    for version in (1, 2):
        write(Checkpoints(folder, keep=2), trained(version), META)
    (folder / "2" / "state" / "_METADATA").unlink()
    told = rf"the checkpoint {folder}/2 cannot be restored: .*\. Move it away to continue from the"
    with pytest.raises(ValueError, match=told):
        Checkpoints(folder, keep=2).restore(fresh())
    (folder / "2").rename(tmp_path / "2")
    checkpoints = Checkpoints(folder, keep=2)
    found = checkpoints.restore(fresh())
    assert found is not None
    same_bits(found[0], trained(1))
    write(checkpoints, trained(2), META)
    assert {path.name for path in folder.iterdir()} == {"1", "2"}
