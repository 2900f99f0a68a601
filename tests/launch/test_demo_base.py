"""The demo's base: low accuracy, the real formats, reproducible bytes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.load import load_config
from launch.demo.ability import measure
from tests.launch.cluster_fixtures import PROJECT

FOLDER = PROJECT / "launch" / "demo" / "tiny_gemma3"


@pytest.mark.slow  # the folder is in the repository: it does not change by itself
def test_the_base_has_correct_and_wrong_answers():
    """Most groups have correct and wrong answers; most answers are well formed."""
    config = load_config(
        PROJECT / "configs" / "demo.toml",
        [("plan.sampler_devices", "1"), ("model.path", str(FOLDER))],
    )
    found = measure(config, prompts=200)
    assert 0.25 <= found["pass@1"] <= 0.45
    assert found["pass@8"] >= 0.85
    assert found["well formed"] >= 0.9


def test_the_folder_is_small_and_complete():
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.model"} <= files.keys()
    assert sum(files.values()) < 4 * 2**20


@pytest.mark.slow
def test_pretraining_twice_gives_the_same_bytes(tmp_path: Path):
    hashes = set()
    for name in ("one", "other"):
        command = [sys.executable, "-m", "launch.demo.tiny", "--out", str(tmp_path / name)]
        subprocess.run([*command, "--steps", "10"], cwd=PROJECT, env=os.environ, check=True)
        weights = (tmp_path / name / "model.safetensors").read_bytes()
        hashes.add(hashlib.sha256(weights).hexdigest())
    assert len(hashes) == 1
