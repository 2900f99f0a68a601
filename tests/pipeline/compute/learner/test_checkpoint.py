"""Checkpoints: restored bit for bit, damaged ones skipped, the newest N kept."""

from __future__ import annotations

import dataclasses
import os
import shutil
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
from pipeline.contracts.progress import (
    PartialRollouts,
    Progress,
    SamplingState,
    SignalShare,
)
from pipeline.contracts.rollouts import VersionSpan
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
    pairs = (
        zip(*map(jax.tree_util.tree_leaves_with_path, trees), strict=True)
        for trees in (
            (found.adapter, expected.adapter),
            (found.optimizer, expected.optimizer),
        )
    )
    for (path, one), (where, two) in (pair for part in pairs for pair in part):
        assert path == where
        assert one.dtype == two.dtype
        assert one.sharding == two.sharding
        np.testing.assert_array_equal(one, two, err_msg=jax.tree_util.keystr(path))


def write(checkpoints: Checkpoints, state: LearnerState, meta: Meta) -> None:
    """Writes a checkpoint to its end."""
    checkpoints.save(state, meta)
    checkpoints.wait()


def damage(folder: Path, version: int) -> None:
    """Inverts bytes in the middle of the largest file that Orbax reads of a checkpoint."""
    files = list((folder / str(version) / "state" / "d").iterdir())
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    middle = len(content) // 2
    for place in range(middle, middle + 16):
        content[place] ^= 0xFF
    largest.write_bytes(content)


META: dict[str, Any] = {"cursor": 7, "counts": {"tokens": 123}, "names": ["a", "b"], "rate": 0.1}


@pytest.mark.parametrize("devices", [1, 8])
def test_a_state_is_restored_bit_for_bit(tmp_path: Path, devices: int):
    state = trained(5, devices)
    write(Checkpoints(tmp_path / "checkpoints", keep=2), state, META)
    found = Checkpoints(tmp_path / "checkpoints", keep=2).restore(fresh(devices))
    assert found is not None
    restored, meta, damaged = found
    same_bits(restored, state)
    assert (meta, damaged) == (META, [])


def test_the_other_adapters_are_restored_and_hashed(tmp_path: Path):
    state = dataclasses.replace(
        trained(5), previous=trained(9).adapter, reference=trained(8).adapter
    )
    write(Checkpoints(tmp_path / "checkpoints", keep=2), state, META)
    zeros = fresh().adapter
    like = dataclasses.replace(fresh(), previous=zeros, reference=zeros)
    found = Checkpoints(tmp_path / "checkpoints", keep=2).restore(like)
    assert found is not None
    same_bits(found[0], state)
    for one, other in ((found[0].previous, state.previous), (found[0].reference, state.reference)):
        assert one is not None
        assert other is not None
        assert lora.sha256(one) == lora.sha256(other) != lora.sha256(state.adapter)


def test_partial_rollouts_are_restored_bit_for_bit(tmp_path: Path):
    rollouts = tiny.make_rollouts([(3, 9), (14, 28)], advantages=[0.0, 0.0])
    one, two = (rollout.completion for rollout in rollouts)
    two = dataclasses.replace(
        two, stop_reason="truncated", earlier_spans=(VersionSpan(2, "ab", 9),)
    )
    signal = SignalShare(0.1, 1 / 3)
    state = SamplingState(PartialRollouts((one, two)), 7, signal)
    progress = Progress(step=5, truncated=3, sampling=state)
    write(Checkpoints(tmp_path / "checkpoints", keep=2), trained(5), progress.to_meta())
    found = Checkpoints(tmp_path / "checkpoints", keep=2).restore(fresh())
    assert found is not None
    restored = Progress.of_meta(found[1])
    without = dataclasses.replace(restored.sampling, partial=PartialRollouts())
    assert without == SamplingState(PartialRollouts(), 7, signal)
    assert dataclasses.replace(restored, sampling=SamplingState()) == Progress(step=5, truncated=3)
    assert restored.to_meta() == progress.to_meta()
    for before, after in zip((one, two), restored.sampling.partial.completions, strict=True):
        np.testing.assert_array_equal(after.logprobs, before.logprobs)
        assert (after.logprobs.dtype, after.earlier_spans) == (
            np.dtype(np.float32),
            before.earlier_spans,
        )


def test_a_missing_folder_has_no_checkpoint_and_is_not_created(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    assert Checkpoints(folder, keep=1).restore(fresh()) is None
    assert not folder.exists()
    folder.mkdir()
    assert Checkpoints(folder, keep=1).restore(fresh()) is None


def test_the_configured_number_of_newest_checkpoints_is_kept(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for version in (1, 2, 3, 10):
        write(checkpoints, trained(version), META)
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()}
    assert kept == {"3", "10"}


def test_the_best_version_and_every_nth_are_kept_besides_the_newest(tmp_path: Path):
    folder = tmp_path / "checkpoints"

    def kept() -> list[int]:
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())

    checkpoints = Checkpoints(folder, keep=1, keep_every=4)
    for version in range(1, 8):
        write(checkpoints, trained(version), META)
        if version in {2, 6}:
            checkpoints.keep_best({"x": np.zeros(3, np.float32)}, version=version)
    assert kept() == [4, 6, 7]
    # A later process knows the best version from its file.
    checkpoints = Checkpoints(folder, keep=1)
    for version in (9, 10):
        write(checkpoints, trained(version), META)
    assert kept() == [6, 10]


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


def held(checkpoints: Checkpoints) -> threading.Event:
    """Delays all writing until the event is set."""
    go = threading.Event()
    checkpoints._writer.submit(go.wait)
    return go


def test_a_checkpoint_counts_when_it_is_complete(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, keep=1)
    assert checkpoints.saved() is None
    write(checkpoints, trained(1), META)
    go = held(checkpoints)
    checkpoints.save(trained(2), META)
    checkpoints.keep_best({"x": np.zeros(3, np.float32)}, version=2)
    assert checkpoints.saved() is None
    # Of a process that is killed now, the checkpoint before and no later best adapter remain.
    found = Checkpoints(folder, keep=1).restore(fresh())
    assert found is not None
    assert (found[0].version, found[2]) == (1, [])
    assert not (folder / "best").exists()
    go.set()
    checkpoints.wait()
    assert checkpoints.saved() is not None
    assert (folder / "best").exists()


def test_the_files_of_an_incomplete_write_are_ignored_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, copies = tmp_path / "checkpoints", tmp_path / "copies"
    first = Checkpoints(folder, keep=2)
    write(first, trained(1), META)
    rename = os.rename

    def watched(*paths: Any, **more: Any) -> None:
        """Copies the folder as a process leaves it that is killed before the rename."""
        shutil.copytree(folder, copies / str(len(list(copies.iterdir()))))
        rename(*paths, **more)

    copies.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", watched)
        write(first, trained(2), META)
    left = next(copies.iterdir())
    assert {path.name for path in left.iterdir()} > {"1"}
    assert not (left / "2").exists()
    checkpoints = Checkpoints(left, keep=2)
    found = checkpoints.restore(fresh())
    assert found is not None
    assert (found[0].version, found[2]) == (1, [])
    write(checkpoints, trained(2), META)
    assert {path.name for path in left.iterdir()} == {"1", "2"}


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


def test_a_version_is_saved_once(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    state = trained(4)
    write(checkpoints, state, META)
    write(checkpoints, dataclasses.replace(trained(9), version=4), {"cursor": 0})
    found = Checkpoints(tmp_path / "checkpoints", keep=2).restore(fresh())
    assert found is not None
    same_bits(found[0], state)
    assert found[1] == META


def test_a_damaged_checkpoint_is_skipped_reported_and_replaced(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    for version in (1, 2):
        write(Checkpoints(folder, keep=2), trained(version), {"cursor": version})
    damage(folder, 2)
    checkpoints = Checkpoints(folder, keep=2)
    found = checkpoints.restore(fresh())
    assert found is not None
    same_bits(found[0], trained(1))
    assert found[1] == {"cursor": 1}
    (line,) = found[2]
    assert line.startswith("checkpoint 2 is damaged: ")
    # The run continues from 1 and reaches 2 again; the damaged one is moved, not deleted.
    write(checkpoints, trained(2), {"cursor": 22})
    assert (tmp_path / "superseded" / "0001" / "checkpoints" / "2" / "state").is_dir()
    again = Checkpoints(folder, keep=2).restore(fresh())
    assert again is not None
    same_bits(again[0], trained(2))
    assert again[1:] == ({"cursor": 22}, [])


@pytest.mark.parametrize("part", ["state/manifest.ocdbt", "state/d/*"])
def test_a_disk_error_is_raised_and_skips_no_checkpoint(tmp_path: Path, part: str):
    folder = tmp_path / "checkpoints"
    for version in (1, 2):
        write(Checkpoints(folder, keep=2), trained(version), META)
    moved = {path: path.read_bytes() for path in (folder / "2").glob(part)}
    for path in moved:
        path.unlink()
        path.symlink_to(path.name)  # opening it fails with ELOOP
    checkpoints = Checkpoints(folder, keep=2)
    with pytest.raises(OSError, match=r"Too many levels of symbolic links: '.*/2/state/"):
        checkpoints.restore(fresh())
    for path, content in moved.items():
        path.unlink()
        path.write_bytes(content)
    found = checkpoints.restore(fresh())
    assert found is not None
    same_bits(found[0], trained(2))


@pytest.mark.parametrize("lacking", [MemoryError("no host memory"), OSError(5, "I/O error")])
def test_an_error_wrapped_by_orbax_is_raised_unwrapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: Exception
):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    write(checkpoints, trained(1), META)

    def wrapped(*_: Any, **__: Any) -> None:
        # As Orbax wraps errors that occur while it reads an array.
        raise Exception("Encountered error while reading array index") from lacking

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "restore", wrapped)
        with pytest.raises(type(lacking)) as told:
            checkpoints.restore(fresh())
    assert told.value is lacking
    assert checkpoints.restore(fresh()) is not None


def test_a_version_saved_between_a_good_and_a_damaged_one_is_kept(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    for version in (10, 20):
        write(Checkpoints(folder, keep=2), trained(version), META)
    damage(folder, 20)
    checkpoints = Checkpoints(folder, keep=2)
    assert checkpoints.restore(fresh()) is not None
    write(checkpoints, trained(15), META)
    found = Checkpoints(folder, keep=2).restore(fresh())
    assert found is not None
    same_bits(found[0], trained(15))


def test_all_checkpoints_damaged_is_an_error_that_names_each(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    for version in (1, 2):
        write(Checkpoints(folder, keep=2), trained(version), META)
        damage(folder, version)
    message = rf"no usable checkpoint in {folder}: checkpoint 2 is damaged: .*; checkpoint 1 is dam"
    with pytest.raises(ValueError, match=message):
        Checkpoints(folder, keep=2).restore(fresh())


@pytest.mark.parametrize(
    ("hashed", "why"),
    [(True, "facts/metadata has changed"), (False, "the hash of its content is ")],
)
def test_changed_counters_are_detected_as_damage(tmp_path: Path, hashed: bool, why: str):
    folder = tmp_path / "checkpoints"
    write(Checkpoints(folder, keep=1), trained(1), META)
    (facts,) = (folder / "1" / "facts").rglob("metadata")
    text = facts.read_text()
    assert '"cursor": 7' in text
    facts.write_text(text.replace('"cursor": 7', '"cursor": 8'))
    if not hashed:
        (folder / "1" / "files.json").unlink()
    with pytest.raises(ValueError, match=f"checkpoint 1 is damaged: {why}"):
        Checkpoints(folder, keep=1).restore(fresh())


def test_damage_inside_any_large_array_is_detected(tmp_path: Path):
    # Orbax stores large arrays in files without a checksum.
    def state(seed: int) -> LearnerState:
        one, two = np.random.default_rng(seed).standard_normal((2, 100, 300)).astype(np.float32)
        return LearnerState({"x": jax.device_put(one)}, {"m": jax.device_put(two)}, 1, 1)

    whole = tmp_path / "whole"
    write(Checkpoints(whole, keep=1), state(0), META)
    files = [path for path in whole.rglob("*") if path.is_file() and path.stat().st_size > 50_000]
    places = [(path, at) for path in files for at in range(20_000, path.stat().st_size, 40_000)]
    assert len(places) >= 4
    for number, (path, at) in enumerate(places):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        copy = folder / path.relative_to(whole)
        content = bytearray(copy.read_bytes())
        content[at] ^= 1
        copy.write_bytes(content)
        with pytest.raises(ValueError, match="checkpoint 1 is damaged"):
            Checkpoints(folder, keep=1).restore(state(1))
    found = Checkpoints(whole, keep=1).restore(state(1))
    assert found is not None
    same_bits(found[0], state(0))
