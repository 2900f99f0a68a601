"""`make test-accelerator`, tried on virtual CPU devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]


def run(*arguments: str, **given: str) -> subprocess.CompletedProcess[str]:
    own = {"JAX_PLATFORMS", "XLA_FLAGS", "MAKEFLAGS", "MAKELEVEL", "ARGS"}
    variables = {key: value for key, value in os.environ.items() if key not in own}
    return subprocess.run(
        ["make", "test-accelerator", f"PY={sys.executable}", f"ARGS={' '.join(arguments)}"],
        cwd=PROJECT,
        env=variables | given,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_an_accelerator_a_sentence_says_what_to_do():
    done = run("-k", "memory", JAX_PLATFORMS="cpu")
    assert done.returncode != 0
    assert "JAX finds no accelerator" in done.stdout


@pytest.mark.slow
def test_all_checks_on_virtual_devices(tmp_path: Path):
    file = tmp_path / "found.json"
    done = run("--cpu", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    found = {one["check"]: one for one in json.loads(file.read_text(encoding="utf-8"))}
    skipped = {name for name, one in found.items() if one["state"] == "skipped"}
    assert skipped == {"flash_attention[log_probs]", "flash_attention[gradient]", "speed"}
    assert {one["state"] for one in found.values()} == {"passed", "skipped"}
    assert found["two_processes_compute_what_one_does"]["figures"]["largest"] == 0
    figures = found["log_probs"]["figures"]
    assert 0 < figures["largest"] < figures["bound"]
    assert "log_probs: log-probs: largest error" in done.stdout
