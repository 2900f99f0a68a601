"""The programs of sampler and learner on this host's accelerator, against the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

from tests.accelerator.compare import Difference
from tests.accelerator.conftest import Report
from tests.accelerator.forms import Forms
from tests.accelerator.small_model import WINDOW

pytestmark = pytest.mark.accelerator

Check = Callable[[Difference], None]
SAME_TOKENS = 0.25
"""Least share of tokens that equal the CPU's, up to the first difference of each rollout. bfloat16
decides one token in fifty differently, after which a rollout is another one; on average a good half
of 40 tokens are equal. Other noise, or another distribution, leaves a few percent."""
_SHORT = WINDOW // 2
"""Prompts and completions that fit into the window together: rings never wrap around."""
ROUNDED = {"learner__importance_cap": 2.0}
"""What weights that round differently from the learner's need."""
DECODE: dict[str, dict[str, Any]] = {
    "ring caches that wrap": {},
    "plain caches": {"rollout__max_prompt_tokens": _SHORT, "rollout__max_new_tokens": _SHORT},
    "int8 caches": {"plan__kv_cache": "int8"},
    "merged weights": {"plan__rollout_weights": "merged", **ROUNDED},
    "int8 weights": {"plan__rollout_weights": "int8", **ROUNDED},
}


def test_log_probs(forms: Forms, check: Check):
    check(forms.log_probs())


def test_soft_caps_of_gemma_2(forms: Forms, check: Check):
    check(forms.log_probs(gemma2=True))


def test_exact_top_k_of_the_reference(forms: Forms, check: Check):
    check(forms.top_k())


def test_gradient(forms: Forms, check: Check):
    check(forms.gradient())


def test_gradient_with_rematerialization(forms: Forms, check: Check):
    check(forms.gradient(plan__remat="full"))


@pytest.mark.parametrize("form", ["log_probs", "gradient"])
def test_flash_attention(forms: Forms, chips: list[jax.Device], check: Check, form: str):
    if chips[0].platform != "tpu":
        pytest.skip("JAX's splash attention kernel is for TPUs")
    check(getattr(forms, form)(plan__attention="splash"))


@pytest.mark.parametrize("form", DECODE)
def test_decoding(forms: Forms, report: Report, form: str):
    """The sampler reports the log-probs of its own tokens."""
    found, same = forms.decode(**DECODE[form])
    text = f"{found}; {same:.0%} of the tokens equal the CPU's until a first difference"
    report(f"{text} (at least {SAME_TOKENS:.0%})", {**vars(found), "same_tokens": same})
    assert found.is_small, str(found)
    assert same >= SAME_TOKENS
