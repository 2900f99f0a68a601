"""A sampler that opens its adapters itself: the base, a run's adapter, and back."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from actors.sampler import SamplerActor
from pipeline.model import lora
from pipeline.model.adapter_file import write_adapter_file
from tests import tiny


@pytest.fixture
def sampler() -> SamplerActor:
    actor = SamplerActor(tiny.make_config())
    actor.policy = tiny.policy(layers=2)
    return actor


def write_best(folder: Path) -> str:
    adapter = jax.device_get(tiny.probe(layers=2))
    write_adapter_file(folder / "checkpoints" / "best", adapter, version=7)
    return lora.sha256(adapter)


def test_without_a_path_it_is_the_base(sampler: SamplerActor):
    opened = sampler.open_adapter(None)
    assert (opened.version, opened.what) == (0, "the base")
    assert not any(np.asarray(value).any() for value in sampler.adapter.values())
    assert (sampler.version, sampler.sha256) == (0, opened.sha256)


def test_a_runs_adapter_is_opened_and_kept(sampler: SamplerActor, tmp_path: Path):
    sha256 = write_best(tmp_path)
    opened = sampler.open_adapter(str(tmp_path))
    assert (opened.version, opened.sha256) == (7, sha256)
    assert opened.what == f"step 7 of {tmp_path / 'checkpoints' / 'best'}"
    base = sampler.open_adapter(None)
    assert sampler.sha256 == base.sha256 != sha256
    # Not read again: a run may replace its best adapter while it is being looked at.
    (tmp_path / "checkpoints" / "best" / "adapter.safetensors").unlink()
    assert sampler.open_adapter(str(tmp_path)) == opened
    assert (sampler.version, sampler.sha256) == (7, sha256)
    assert lora.sha256(sampler.adapter) == sha256


def test_what_is_no_adapter_leaves_the_old_one_in_force(sampler: SamplerActor, tmp_path: Path):
    base = sampler.open_adapter(None)
    with pytest.raises(FileNotFoundError, match="is no PEFT folder"):
        sampler.open_adapter(str(tmp_path))
    assert sampler.sha256 == base.sha256
