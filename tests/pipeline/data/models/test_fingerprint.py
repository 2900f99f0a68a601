"""The fingerprint of a base changes with its weights, and with nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from pipeline.data.models.fingerprint import weights_fingerprint


def test_the_fingerprint_changes_with_weights_and_config_only(tmp_path: Path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    values = np.random.default_rng(0).standard_normal((4, 300, 300)).astype(np.float32)
    for number, value in enumerate(values):
        save_file({"x": value}, one / f"model-{number}.safetensors")
    (one / "config.json").write_text("{}")
    shutil.copytree(one, other)
    (other / "README.md").write_text("text")
    found = [weights_fingerprint(one)]
    assert weights_fingerprint(other) == found[0]
    (other / "config.json").write_text('{"x": 1}')
    found.append(weights_fingerprint(other))
    save_file({"x": -values[3]}, other / "model-3.safetensors")
    found.append(weights_fingerprint(other))
    (other / "model-3.safetensors").unlink()
    found.append(weights_fingerprint(other))
    assert len(set(found)) == 4
