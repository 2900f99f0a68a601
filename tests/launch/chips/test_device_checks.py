"""Collectives, checkpoint and speed, and the process that makes the checks."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from launch.chip_results import ChipResult
from launch.chips import __main__, device_checks


def devices(count: int = 8) -> list[jax.Device]:
    return list(jax.devices()[:count])


@pytest.mark.parametrize(
    ("count", "over"), [(8, "all chips and groups of 4"), (4, "all chips"), (1, "all chips")]
)
def test_collectives_are_exact(count: int, over: str):
    result = device_checks.collectives(devices(count))
    assert (result.state, result.finding.partition("over ")[2]) == ("ok", over)


@pytest.mark.parametrize("name", ["sum", "gather", "scatter", "shift"])
def test_a_wrong_collective_is_a_fault(monkeypatch: pytest.MonkeyPatch, name: str):
    exchanged = device_checks.exchanged

    def changed(chips: Any, size: int) -> Any:
        found = exchanged(chips, size)
        result, wanted = found[name]
        if size == 4:
            result = result.copy()
            result.reshape(-1)[-1] += 1
        return found | {name: (result, wanted)}

    monkeypatch.setattr(device_checks, "exchanged", changed)
    result = device_checks.collectives(devices())
    assert result.state == "fault"
    assert result.finding == f"wrong numbers: {name} over groups of 4"


def test_a_checkpoint_is_restored():
    assert device_checks.checkpoint(devices()).state == "ok"


@pytest.mark.parametrize("part", [0, 1])
def test_another_state_than_was_written_is_a_fault(monkeypatch: pytest.MonkeyPatch, part: int):
    restored = device_checks.saved_and_restored

    def changed(model: Any) -> Any:
        written, read = restored(model)
        leaves, tree = jax.tree.flatten(read[part])
        leaves[-1] = np.array(leaves[-1])
        leaves[-1] += 1
        parts: list[Any] = list(read)
        parts[part] = jax.tree.unflatten(tree, leaves)
        return written, tuple(parts)

    monkeypatch.setattr(device_checks, "saved_and_restored", changed)
    assert device_checks.checkpoint(devices()).state == "fault"


def test_the_speed_of_virtual_devices_is_not_measured():
    result = device_checks.speed(devices())
    assert (result.state, result.figures) == ("skipped", {})


def test_a_check_that_raises_is_a_fault_and_the_others_follow(capsys: pytest.CaptureFixture[str]):
    def fails() -> ChipResult:
        raise RuntimeError("INTERNAL: no answer\nmore")

    found = list(__main__.results({"one": fails, "two": lambda: ChipResult("ok", "fine")}))
    assert [(one.check, one.state) for one in found] == [("one", "fault"), ("two", "ok")]
    assert found[0].finding == "RuntimeError: INTERNAL: no answer"
    assert "Traceback" in capsys.readouterr().err
