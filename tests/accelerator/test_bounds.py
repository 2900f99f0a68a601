"""The bounds of the checks: on eight virtual devices a form passes, and fails where falsified.

The devices compute the real results; a falsification changes what they return, or what they are
given. The CPU's results are never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from pipeline.types import Completion
from tests.accelerator import forms, small_model
from tests.accelerator.compare import Arrays, Difference
from tests.accelerator.forms import Forms, Update
from tests.accelerator.small_model import SmallModel
from tests.samples import changed

CHIPS = 8
_known: dict[tuple[object, ...], Any] = {}


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    yield
    _known.clear()


@pytest.fixture(autouse=True)
def _computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes each result once for all tests."""
    for name in ("log_probs", "update", "sample", "scorer"):
        monkeypatch.setattr(forms, name, _once(name, getattr(forms, name)))


def _once(name: str, compute: Callable[[SmallModel], Any]) -> Callable[[SmallModel], Any]:
    def known(model: SmallModel) -> Any:
        mesh, shape = model.policy.mesh, model.policy.architecture.shape
        key = (name, mesh.size, shape, model.config.model_dump_json())
        if key not in _known:
            _known[key] = compute(model)
        return _known[key]

    return known


def falsify(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Any], Any]) -> None:
    """Changes what the devices return."""
    compute = getattr(forms, name)

    def changed(model: SmallModel) -> Any:
        result = compute(model)
        return change(result) if model.policy.mesh.size == CHIPS else result

    monkeypatch.setattr(forms, name, changed)


CHECKS: dict[str, Callable[[Forms], Difference]] = {
    "log-probs": Forms.log_probs,
    "top k": Forms.top_k,
    "gradient": Forms.gradient,
    "decode": lambda forms: forms.decode()[0],
}


def passes(check: str) -> bool:
    devices = jax.devices()
    return CHECKS[check](Forms(devices, devices[-1])).is_small


@pytest.mark.parametrize("check", CHECKS)
def test_a_form_agrees_with_the_cpu(check: str):
    assert passes(check)


def one_wrong(found: Arrays) -> Arrays:
    """One number is wrong by half of itself."""
    changed = {name: value.copy() for name, value in found.items()}
    first = next(iter(changed.values())).reshape(-1)
    first[np.abs(first).argmax()] *= 1.5
    return changed


def scaled(factor: float) -> Callable[[Arrays], Arrays]:
    return lambda found: {name: factor * value for name, value in found.items()}


def not_a_number(found: Arrays) -> Arrays:
    changed = one_wrong(found)
    next(iter(changed.values())).reshape(-1)[3] = np.nan
    return changed


@pytest.mark.parametrize("change", [one_wrong, scaled(1.02), not_a_number])
def test_wrong_log_probs_are_a_fault(monkeypatch: pytest.MonkeyPatch, change: Any):
    falsify(monkeypatch, "log_probs", change)
    assert not passes("log-probs")


def test_a_wrong_mask_is_a_fault(monkeypatch: pytest.MonkeyPatch):
    on_chips = Forms.on_chips

    def with_other_window(self: Forms, **settings: Any) -> SmallModel:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(small_model.GEMMA3, "sliding_window", small_model.WINDOW // 2)
            return on_chips(self, **settings)

    monkeypatch.setattr(Forms, "on_chips", with_other_window)
    for check in ("log-probs", "gradient", "decode"):
        assert not passes(check), check


def of_update(part: str, change: Callable[[Arrays], Arrays]) -> Callable[[Update], Update]:
    return lambda found: replace(found, **{part: change(getattr(found, part))})


def swapped(found: Arrays) -> Arrays:
    """Two positions have each other's tokens."""
    dense = found["top k"].copy()
    dense[[0, 1]] = dense[[1, 0]]
    return {"top k": dense}


@pytest.mark.parametrize("change", [swapped, one_wrong])
def test_a_wrong_top_k_is_a_fault(monkeypatch: pytest.MonkeyPatch, change: Any):
    falsify(monkeypatch, "update", of_update("top_k", change))
    assert not passes("top k")
    assert passes("gradient")


def without_a_chip(found: Arrays) -> Arrays:
    return scaled(1 - 1 / CHIPS)(found)


@pytest.mark.parametrize("change", [one_wrong, without_a_chip])
def test_a_wrong_gradient_is_a_fault(monkeypatch: pytest.MonkeyPatch, change: Any):
    falsify(monkeypatch, "update", of_update("gradient", change))
    assert not passes("gradient")
    assert passes("top k")


def test_a_wrong_log_prob_of_a_sampled_token_is_a_fault(monkeypatch: pytest.MonkeyPatch):
    def change(found: list[Completion]) -> list[Completion]:
        wrong = one_wrong({"": found[7].logprobs})[""]
        return [*found[:7], changed(found[7], logprobs=wrong), *found[8:]]

    falsify(monkeypatch, "sample", change)
    assert not passes("decode")


def test_another_token_than_the_one_with_this_log_prob_is_a_fault(
    monkeypatch: pytest.MonkeyPatch,
):
    def change(found: list[Completion]) -> list[Completion]:
        tokens = found[3].tokens.copy()
        tokens[-1] = (tokens[-1] + 1000) % 2048
        return [*found[:3], changed(found[3], tokens=tokens), *found[4:]]

    falsify(monkeypatch, "sample", change)
    assert not passes("decode")
