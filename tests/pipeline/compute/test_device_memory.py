"""Out-of-memory errors as values, and the limit of device memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.compute.device_memory import (
    GIB,
    DeviceMemoryError,
    catch_out_of_memory,
    check_fits,
    resident_bytes,
)
from pipeline.contracts.memory import OutOfMemory


def full(*_: Any, **__: Any) -> Any:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.\nmore")


def test_a_device_error_becomes_out_of_memory():
    with pytest.raises(OutOfMemory) as raised:
        catch_out_of_memory("update", lambda: jnp.zeros((2**50,), jnp.int8))
    assert raised.value.phase == "update"
    assert raised.value.what.startswith("RESOURCE_EXHAUSTED: Out of memory allocating")


@pytest.mark.parametrize("error", [MemoryError(), MemoryError("no host memory")])
def test_a_host_error_becomes_out_of_memory(error: MemoryError):
    def work() -> None:
        raise error

    with pytest.raises(OutOfMemory, match="MemoryError" if not str(error) else "no host memory"):
        catch_out_of_memory("export", work)


@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("INTERNAL: something else"), ValueError("no")]
)
def test_other_errors_are_raised_unchanged(error: Exception):
    def work() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        catch_out_of_memory("generate", work)
    assert raised.value is error


def test_memory_is_freed_before_the_error_is_raised():
    before = resident_bytes()

    def work() -> None:
        held = jax.device_put(np.zeros(1000, np.float32), jax.devices()[0])
        assert resident_bytes() == before + held.nbytes
        full()

    with pytest.raises(OutOfMemory) as raised:
        catch_out_of_memory("generate", work)
    assert resident_bytes() == before
    assert raised.value.what == "RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes."
    assert raised.value.__context__ is None


def test_the_limit_covers_live_arrays_and_the_largest_program():
    held = jax.device_put(np.zeros(2**20, np.int8), jax.devices()[0])
    resident = resident_bytes()
    needs = {"prefill 8": 1000, "segment 4": 5000}
    check_fits(needs, hbm_gib=(resident + 5000) / GIB)
    with pytest.raises(DeviceMemoryError, match=r"segment 4 needs .* plan\.hbm_gib = ") as raised:
        check_fits(needs, hbm_gib=(resident + 4000) / GIB)
    assert raised.value.share == pytest.approx(0.8)
    assert held.nbytes == 2**20
