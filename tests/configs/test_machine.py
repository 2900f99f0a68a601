"""The accelerators of a machine, by its files."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.machine import Machine, this_machine

GPUS = ["proc/driver/nvidia/gpus/0000:01", "proc/driver/nvidia/gpus/0000:02"]


@pytest.mark.parametrize(
    ("files", "cuda", "visible", "found"),
    [
        ([], True, None, Machine("cpu", 1, None, "neither a TPU nor an NVIDIA GPU")),
        (["dev/accel0"], False, None, Machine("tpu", 1, None, "1 TPU chip")),
        ([f"dev/vfio/{n}" for n in range(5)], False, None, Machine("tpu", 4, None, "5 TPU chips")),
        ([f"dev/accel{n}" for n in range(8)], True, None, Machine("tpu", 8, None, "8 TPU chips")),
        (GPUS, True, None, Machine("gpu", 1, 0.75 * 20, "2 NVIDIA GPUs")),
        (GPUS, True, "-1", Machine("cpu", 1, None, "neither a TPU nor an NVIDIA GPU")),
        (
            *(GPUS, False, None),
            Machine("cpu", 1, None, "an NVIDIA GPU without JAX for CUDA (make install-cuda13)"),
        ),
    ],
)
def test_a_tpu_precedes_a_gpu_that_jax_can_use(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: list[str],
    cuda: bool,
    visible: str | None,
    found: Machine,
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    spec: Callable[[str], object] = lambda _: "found" if cuda else None  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", spec)

    def smi(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, "81920\n20480\n")

    monkeypatch.setattr("subprocess.run", smi)
    assert this_machine(tmp_path) == found
