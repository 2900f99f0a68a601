"""The accelerators of a machine: TPUs by its files, NVIDIA GPUs by what nvidia-smi prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from configs.machine import Machine, this_machine
from configs.short_forms import completed

CPU = Machine("cpu", 1, "neither a TPU nor an NVIDIA GPU")
H100 = "GPU-6d0f1a5e-9c1b-4a0e-8f37-2b7a1c5d9e01, NVIDIA H100 80GB HBM3, 81559\n"
L4 = "GPU-0b1f6c2a-44d2-3f0e-a1de-6f5a3c2b1d02, NVIDIA L4, 23034\n"
L40S = "GPU-f3c2b1a0-5e4d-4c7b-9a86-7d6c5b4a3f04, NVIDIA L40S, 46068\n"
GB10 = "GPU-4be1c0d2-77aa-4b1c-8d5e-9e8f7a6b5c05, NVIDIA GB10, [N/A]\n"
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that "
    "the latest NVIDIA driver is installed and running.\n\n"
)
TWO_L4 = L4 + L4.replace("-0b1f", "-5c2e")


def one(name: str, kind: str | None, gib: float | None, shown: str) -> Machine:
    memory = f" with {shown} GiB" if shown else ""
    return Machine("gpu", 1, f"1 x NVIDIA {name}{memory}", kind, gib)  # type: ignore[arg-type]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX with its plugin for CUDA."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: "found")


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts an nvidia-smi on PATH that prints this."""
    for variable in ("CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")

    def put(text: str, status: int = 0) -> None:
        program = tmp_path / "bin/nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        query = "--query-gpu=uuid,name,memory.total --format=csv,noheader,nounits"
        program.write_text(
            f'#!/bin/sh\n[ "$*" = "{query}" ] || exit 2\ncat <<E\n{text}E\nexit {status}\n'
        )
        program.chmod(0o755)

    return put


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("printed", "visible", "found"),
    [
        (H100, None, one("H100 80GB HBM3", "h100", 59.73, "79.6")),
        (L40S, None, one("L40S", None, 33.74, "45.0")),
        (GB10, None, one("GB10", None, None, "")),
        (TWO_L4, None, Machine("gpu", 1, "2 x NVIDIA L4 with 22.5 GiB", "l4", 16.87)),
        (L4 + H100, None, Machine("gpu", 1, "2 x NVIDIA L4 with 22.5 GiB", None, 16.87)),
        (L4 + H100, "1", one("H100 80GB HBM3", "h100", 59.73, "79.6")),
        (L4 + H100, "GPU-6d0f", one("H100 80GB HBM3", "h100", 59.73, "79.6")),
        (H100, "-1", Machine("cpu", 1, f"{CPU.why} that CUDA_VISIBLE_DEVICES allows")),
        (NO_DRIVER, None, f"(nvidia-smi: {NO_DRIVER.strip()})"),
    ],
)
def test_nvidia_gpus(
    smi: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    printed: str,
    visible: str | None,
    found: Machine | str,
) -> None:
    smi(printed, status=0 if printed.startswith("GPU-") else 9)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if isinstance(found, str):
        found = Machine("cpu", 1, f"no NVIDIA GPU that can be used {found}")
    assert this_machine(tmp_path) == found


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["dev/accel0"], Machine("tpu", 1, "1 TPU chip")),
        ([f"dev/vfio/{n}" for n in range(5)], Machine("tpu", 4, "5 TPU chips")),
        ([], CPU),
    ],
)
def test_a_tpu_precedes_a_gpu_that_jax_can_use(
    smi: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: Sequence[str],
    found: Machine,
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert this_machine(tmp_path) == found
    smi(L4)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    without = "1 x NVIDIA L4 with 22.5 GiB without JAX for CUDA (make install-cuda13)"
    assert this_machine(tmp_path) == (found if files else Machine("cpu", 1, without))


@pytest.mark.usefixtures("cuda")
def test_a_configuration_gets_kind_and_memory_of_the_gpu(
    smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("configs.short_forms.this_machine", lambda: this_machine(Path("/nowhere")))

    def plan(**given: object) -> tuple[object, list[str]]:
        tree, assumed = completed({"plan": given}, name="x")
        return tree["plan"], assumed

    smi(TWO_L4)
    here = ": this machine has 2 x NVIDIA L4 with 22.5 GiB"
    l4 = {"platform": "gpu", "gpu": "l4", "hbm_gib": 16.87}
    said = 'plan.gpu = "l4", plan.hbm_gib = 16.87'
    auto = f'plan.platform = "auto" is "gpu" with plan.learner_devices = 1, {said}{here}'
    assert plan() == ({**l4, "learner_devices": 1}, [auto])
    assert plan(platform="gpu") == (l4, [said + here])
    assert plan(platform="gpu", hbm_gib=9)[0] == {**l4, "hbm_gib": 9}
    assert plan(platform="gpu", gpu="h100") == ({"platform": "gpu", "gpu": "h100"}, [])
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert plan(platform="gpu")[0] == {**l4, "hbm_gib": 20.24}
    smi(L40S)
    assert "plans assume the speed of a known one" in plan(platform="gpu")[1][0]
    smi(NO_DRIVER, 9)
    assert plan(platform="gpu") == ({"platform": "gpu"}, [])
