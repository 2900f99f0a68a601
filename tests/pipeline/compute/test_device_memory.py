"""Out-of-memory errors as values, and the limit of device memory."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from configs.schema import Config
from pipeline.compute.device_memory import (
    DeviceMemoryError,
    catch_out_of_memory,
    check_fits,
    resident_bytes,
)
from pipeline.plan.topology import GIB
from pipeline.protocols import OutOfMemory
from tests import tiny


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore"), "RESOURCE_EXH"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_lack_of_memory_is_out_of_memory(error: Exception, message: str):
    def work() -> None:
        raise error

    with pytest.raises(OutOfMemory, match=message) as raised:
        catch_out_of_memory("export", work)
    assert raised.value.phase == "export"


def test_memory_is_freed_before_the_error_is_raised():
    before = resident_bytes()

    def work() -> None:
        held = jax.device_put(np.zeros(1000, np.float32), jax.devices()[0])
        assert resident_bytes() == before + held.nbytes
        raise MemoryError("no\nmore")

    with pytest.raises(OutOfMemory) as raised:
        catch_out_of_memory("generate", work)
    assert resident_bytes() == before
    assert raised.value.what == "no"
    assert raised.value.__context__ is None


def limited(size: int) -> Config:
    return tiny.make_config(plan={"hbm_gib": size / GIB})


def test_the_limit_covers_live_arrays_and_the_largest_program(monkeypatch: pytest.MonkeyPatch):
    held = jax.device_put(np.zeros(2**20, np.int8), jax.devices()[0])
    resident = resident_bytes()
    needs = {"prefill 8": 1000, "segment 4": 5000}
    check_fits(needs, limited(resident + 5000))
    with pytest.raises(DeviceMemoryError, match=r"segment 4 needs .* plan\.hbm_gib is ") as raised:
        check_fits(needs, limited(resident + 4000))
    assert raised.value.share == pytest.approx(0.8)
    check_fits(needs, tiny.make_config())  # a CPU reports no limit
    stats = {"bytes_limit": resident + 4000}
    device = SimpleNamespace(memory_stats=lambda: stats, device_kind="a GPU")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with pytest.raises(DeviceMemoryError, match=r"segment 4 needs .* the memory of a GPU is "):
        check_fits(needs, limited(2 * resident + GIB))
    assert held.nbytes == 2**20
