"""A real Gemma, Gemma 3 270m, against transformers.

`python -m launch.demo.gemma` fetches the model; without it, or without $GEMMA_GRPO_TORCH_PYTHON
(the interpreter of an environment with PyTorch, transformers and PEFT), the test is skipped.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from launch.demo.gemma import FOLDER
from pipeline.compute.learner.export import Exporter
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.opening import open_policy
from pipeline.data.text.tokenizer_files import read_tokenizer
from tests import tiny
from tests.pipeline.compute.learner.test_export import examples
from tests.pipeline.compute.learner.test_torch import LORA, PYTHON, ask

pytestmark = pytest.mark.slow

MODEL = Path(FOLDER).expanduser()


PROMPTS = [
    "The capital of France is",
    "Queue: Eva, Greg, Susan, Martin.\nWho stands after Greg?",
    "def add(a, b):\n    return",
]


@pytest.mark.skipif(not MODEL.is_dir(), reason="no model; python -m launch.demo.gemma fetches it")
@pytest.mark.skipif(not PYTHON, reason="$GEMMA_GRPO_TORCH_PYTHON is not set")
def test_logits_greedy_text_and_exports_equal_transformers(tmp_path: Path):
    tokenizer = read_tokenizer(MODEL)
    policy, base = open_policy(MODEL, dtype="float32", lora=LORA, mesh=make_mesh(jax.devices()[:1]))
    config = tiny.make_config(lora=LORA.model_dump(), model={"path": str(MODEL)})
    # Changes logits by 4 to 8 of 32; a larger one would amplify rounding beyond the bound.
    adapter = jax.tree.map(lambda leaf: 0.2 * leaf, tiny.make_probe(policy))
    out = tmp_path / "export"
    writer = Exporter(
        policy,
        base,
        config,
        tiny.VOCABULARY,
        like=MODEL,
        tokenizer=MODEL / "tokenizer.model",
    )
    writer.export(out, adapter, version=1, examples=examples())
    models = {"base": (MODEL, None), "merged": (out, None), "adapter": (out / "adapter", MODEL)}
    for text in PROMPTS:
        tokens = np.concatenate([[tokenizer.bos_id], tokenizer.encode(text)])[None]
        for name, (model, beside) in models.items():
            used = policy.no_adapter() if name == "base" else adapter
            answer = ask(tmp_path, {"tokens": tokens, "prompt": tokens[0]}, model, beside)
            ours = tiny.logits(policy, base, used, tokens)
            np.testing.assert_allclose(answer["logits"], ours, rtol=0, atol=2e-3, err_msg=name)
            greedy = answer["greedy"]
            chosen = tiny.logits(policy, base, used, greedy[None])[0].argmax(axis=-1)
            start = tokens.shape[1]
            np.testing.assert_array_equal(greedy[start:], chosen[start - 1 : -1], err_msg=name)
