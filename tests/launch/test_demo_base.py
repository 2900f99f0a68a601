"""The demo's base: low accuracy, the real formats, reproducible bytes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.load import load_config
from launch.bench.rates import SAMPLES, Runs
from tests.launch.cluster_fixtures import PROJECT

FOLDER = PROJECT / "launch" / "demo" / "tiny_gemma3"


@pytest.mark.slow  # the folder is in the repository: it does not change by itself
def test_the_base_has_correct_and_wrong_answers():
    """Most groups have correct and wrong answers; most answers are well formed."""
    config = load_config(
        PROJECT / "configs" / "demo.toml",
        [("plan.sampler_devices", "1"), ("model.path", str(FOLDER))],
    )
    runs = Runs(config)
    prompts, base = runs.data.test.prompts[:200], runs.policy.no_adapter()
    sampled = runs.measure(prompts, base, samples=SAMPLES)
    assert 0.25 <= sampled.correct.mean() <= 0.45
    assert sampled.correct.any(axis=1).mean() >= 0.85
    assert runs.measure(prompts, base, samples=1).well_formed.mean() >= 0.9


@pytest.mark.slow
def test_pretraining_twice_gives_the_same_bytes(tmp_path: Path):
    hashes = set()
    for name in ("one", "other"):
        command = [sys.executable, "-m", "launch.demo.tiny", "--out", str(tmp_path / name)]
        subprocess.run([*command, "--steps", "10"], cwd=PROJECT, env=os.environ, check=True)
        weights = (tmp_path / name / "model.safetensors").read_bytes()
        hashes.add(hashlib.sha256(weights).hexdigest())
    assert len(hashes) == 1
