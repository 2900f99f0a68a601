"""In float64 rows that share prompts give the values of rows that repeat them, to 1e-9."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import json
import jax, jax.numpy as jnp, numpy as np

jax.config.update("jax_enable_x64", True)
jnp.float32, np.float32 = jnp.float64, np.float64  # which the code names

from tests import tiny
from tests.pipeline.compute.learner.test_shared_prompts import (
    GEMMA3, ONE, gradient, make_learner, num_tokens
)


for model in (GEMMA3, {**tiny.GEMMA2, "num_hidden_layers": 2}):
    found = {}
    for share in (True, False):
        learner = make_learner({"dtype": "float64"} | model, {}, ONE, share=share)
        grads, _, logprobs = gradient(learner)
        found[share] = grads, logprobs, num_tokens(learner)
    (shared, own, fewer), (separate, other, more) = found[True], found[False]
    assert fewer < more and next(iter(shared.values())).dtype == np.dtype("float64")
    norm = jnp.linalg.norm
    print(json.dumps({
        "gradient": max(
            float(norm(shared[name] - x) / norm(x)) for name, x in separate.items()
        ),
        "logprobs": max(float(np.abs(own[name] - x).max()) for name, x in other.items()),
    }))
"""


def test_shared_prompts_are_exact_in_float64():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        found = json.loads(line)
        assert found["gradient"] < 1e-9
        assert found["logprobs"] < 1e-9
    assert len(done.stdout.splitlines()) == 2
