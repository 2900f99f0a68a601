"""The fingerprint of a base changes with its weights, and with nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.data.models.fingerprint import weights_fingerprint


def model(folder: Path, *, seed: int = 0) -> Path:
    folder.mkdir()
    values = np.random.default_rng(seed).standard_normal((4, 300, 300)).astype(np.float32)
    for number, value in enumerate(values):
        save_file({"x": value}, folder / f"model-{number}.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_equal_weights_in_another_folder_have_the_same_fingerprint(tmp_path: Path):
    one = model(tmp_path / "one")
    other = shutil.copytree(one, tmp_path / "other")
    (other / "README.md").write_text("text")
    assert weights_fingerprint(one) == weights_fingerprint(other)


@pytest.mark.parametrize("change", ["values", "file", "config"])
def test_other_weights_have_another_fingerprint(tmp_path: Path, change: str):
    one = model(tmp_path / "one")
    other = model(tmp_path / "other", seed=int(change == "values"))
    if change == "file":
        (other / "model-3.safetensors").unlink()
    elif change == "config":
        (other / "config.json").write_text('{"x": 1}')
    assert weights_fingerprint(one) != weights_fingerprint(other)
