"""Hugging Face's transformers and PEFT load our exports and compute the trained policy.

They run in a separate interpreter, named by $GEMMA_GRPO_TORCH_PYTHON: PyTorch and the project do
not share an environment. Without it these tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from configs.schema import Lora
from pipeline.compute.learner.export import Exporter
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.opening import open_policy
from tests import tiny
from tests.pipeline.compute.learner.test_export import examples

PYTHON = os.environ.get("GEMMA_GRPO_TORCH_PYTHON")
GOLDEN = Path(__file__).parents[3] / "golden"
PEER = Path(__file__).parents[3] / "torch_peer.py"
LORA = Lora(rank=3, alpha=6.0)

KINDS = {
    "gemma3": "Gemma3ForCausalLM",
    "gemma3_scaled": "Gemma3ForCausalLM",
    "gemma3_vision": "Gemma3ForConditionalGeneration",
    "gemma2": "Gemma2ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "gemma4_multimodal": "Gemma4ForConditionalGeneration",
}
"""transformers' class of each golden folder, and so of its export."""

pytestmark = pytest.mark.skipif(not PYTHON, reason="$GEMMA_GRPO_TORCH_PYTHON is not set")


def ask(folder: Path, given: dict[str, np.ndarray], model: Path, base: Path | None) -> Any:
    """Results of `torch_peer.py`."""
    source, target = folder / "given.npz", folder / "answer.npz"
    np.savez(source, tokens=given["tokens"], prompt=given["prompt"])
    arguments = [source, target, model, *([base] if base else [])]
    assert PYTHON is not None
    subprocess.run([PYTHON, str(PEER), *map(str, arguments)], check=True)
    return np.load(target)


@pytest.mark.parametrize("shard_bytes", [2**32, 50_000])
@pytest.mark.parametrize("name", KINDS)
def test_the_merged_model_and_the_adapter_compute_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, shard_bytes: int
):
    monkeypatch.setattr("pipeline.compute.learner.export.SHARD_BYTES", shard_bytes)
    like = GOLDEN / name
    mesh = make_mesh(jax.devices()[:1])
    policy, base = open_policy(like, dtype="float32", lora=LORA, mesh=mesh)
    config = tiny.make_config(lora=LORA.model_dump(), model={"path": str(like)})
    pieces = tmp_path / "tokenizer.model"
    pieces.write_bytes(b"pieces")
    writer = Exporter(policy, base, config, tiny.VOCABULARY, like=like, tokenizer=pieces)
    adapter = tiny.make_probe(policy)
    out = tmp_path / "export"
    writer.export(out, adapter, version=1, examples=examples())
    (out / "tokenizer.model").unlink()
    assert ((out / "model.safetensors.index.json").is_file()) == (shard_bytes < 2**32)
    tokens = np.load(like / "golden.npz")["tokens"]
    given = {"tokens": tokens, "prompt": tokens[0, :12]}
    expected = tiny.logits(policy, base, adapter, tokens)
    for model, beside in ((out, None), (out / "adapter", like)):
        answer = ask(tmp_path, given, model, beside)
        assert str(answer["complaints"]) == ""
        kind = KINDS[name] if beside is None else "PeftModelForCausalLM"
        assert str(answer["kind"]) == kind
        np.testing.assert_allclose(answer["logits"], expected, rtol=0, atol=1e-4)
        # Each token of the continuation is our greedy choice, given the earlier ones.
        greedy = answer["greedy"]
        assert len(greedy) == 12 + 24
        ours = tiny.logits(policy, base, adapter, greedy[None])[0].argmax(axis=-1)
        np.testing.assert_array_equal(greedy[12:], ours[11:-1])
