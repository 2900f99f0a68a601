"""The bounds of the checks: a form passes, and fails where its results are falsified."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest

from tests.accelerator import small_model
from tests.accelerator.compare import Arrays, difference, error_difference
from tests.accelerator.forms import Forms

RNG = np.random.default_rng(0)
EXACT: Arrays = {"a": RNG.standard_normal((40, 30)), "b": 10 * RNG.standard_normal(500)}


def rounded(seed: int) -> Arrays:
    """The exact numbers with errors as of bfloat16."""
    rng = np.random.default_rng(seed)
    return {name: x * (1 + 2e-3 * rng.standard_normal(x.shape)) for name, x in EXACT.items()}


CPU, CHIPS = rounded(1), rounded(2)


def one_wrong(x: np.ndarray) -> np.ndarray:
    """One number is wrong by half of itself."""
    x[np.abs(x).argmax()] *= 1.5
    return x


def not_a_number(x: np.ndarray) -> np.ndarray:
    x[3] = np.nan
    return x


def swapped(x: np.ndarray) -> np.ndarray:
    """Two positions have each other's numbers."""
    x[[0, 1]] = x[[1, 0]]
    return x


def test_rounding_at_other_places_is_within_the_bounds():
    assert difference(CHIPS, rounded=CPU, exact=EXACT).is_small


@pytest.mark.parametrize(
    "change", [one_wrong, not_a_number, swapped, lambda x: 1.02 * x, lambda x: 7 / 8 * x]
)
def test_a_wrong_number_a_wrong_scale_and_a_missing_chip_are_faults(
    change: Callable[[np.ndarray], np.ndarray],
):
    chips = {**CHIPS, "b": change(CHIPS["b"].copy())}
    found = difference(chips, rounded=CPU, exact=EXACT)
    assert not found.is_small
    assert found.name == "b"


def test_errors_of_other_tokens_have_the_same_bounds():
    allowed = (CPU["b"] - EXACT["b"])[100:]
    assert error_difference(CHIPS["b"] - EXACT["b"], allowed=allowed, name="b").is_small
    assert not error_difference(5 * allowed, allowed=allowed, name="b").is_small


def test_a_form_agrees_with_the_cpu_unless_its_mask_is_wrong(monkeypatch: pytest.MonkeyPatch):
    forms = Forms(jax.devices(), jax.devices()[-1])
    assert forms.log_probs().is_small
    monkeypatch.setitem(small_model.GEMMA3, "sliding_window", small_model.WINDOW // 2)
    others = Forms(jax.devices()[:4], jax.devices()[-1])
    assert not others.log_probs().is_small
