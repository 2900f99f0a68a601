"""The bounds of the checks: a form passes, and fails where its results are falsified."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest

from tests.accelerator import small_model
from tests.accelerator.compare import Arrays, difference
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


@pytest.mark.parametrize("change", [one_wrong, lambda x: x * np.nan, lambda x: 1.02 * x])
def test_rounding_is_within_the_bounds_and_a_wrong_number_or_scale_is_not(
    change: Callable[[np.ndarray], np.ndarray],
):
    assert difference(CHIPS, rounded=CPU, exact=EXACT).is_small
    wrong = {**CHIPS, "b": change(CHIPS["b"].copy())}
    found = difference(wrong, rounded=CPU, exact=EXACT)
    assert not found.is_small
    assert found.name == "b"


def test_a_form_agrees_with_the_cpu_unless_its_mask_is_wrong(monkeypatch: pytest.MonkeyPatch):
    forms = Forms(jax.devices(), jax.devices()[-1])
    assert forms.log_probs().is_small
    monkeypatch.setitem(small_model.GEMMA3, "sliding_window", small_model.WINDOW // 2)
    assert not forms.log_probs().is_small
