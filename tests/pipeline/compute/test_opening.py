"""Opening a model: its format, and its tokenizer, which is checked before the weights load."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from configs.schema import Config
from pipeline.compute.model import flax_checkpoint, weights
from pipeline.compute.opening import open_model
from tests import tiny
from tests.demo_texts import write_tokenizer
from tests.pipeline.compute.model import formats

PIECES = 480


def config(folder: Path) -> Config:
    plan = {"learner_devices": 8, "fsdp": 2, "tp": 2, "slots": 8, "micro_batch_tokens": 336}
    return tiny.make_config(model={"path": str(folder)}, lora={"rank": 2}, plan=plan)


@pytest.fixture
def flax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gemma 2 in Kaggle's layout, with more embedding rows than its tokenizer has tokens."""
    golden = formats.GOLDEN / "gemma2"
    tensors = load_file(golden / formats.SINGLE)
    rows = np.random.default_rng(0).standard_normal((PIECES + 8, 40)).astype(np.float32)
    tensors["model.embed_tokens.weight"] = rows
    text = weights.read_text_config(golden)
    formats.save_flax(formats.flax_tree(tensors, text, turned=False), tmp_path / "gemma2-2b")
    known = {"sliding_window": 8, "query_pre_attn_scalar": 6}
    monkeypatch.setitem(flax_checkpoint._PUBLISHED, ("gemma2", 4, 40), known)
    return write_tokenizer(tmp_path)


def test_a_flax_checkpoint_and_its_tokenizer_are_opened(flax: Path):
    opened = open_model(config(flax), role="learner")
    assert opened.policy.vocab_size == PIECES + 8
    assert opened.policy.architecture.window(0) == 8
    assert opened.base.keys() == opened.policy.base_shapes.keys()
    assert dict(opened.policy.mesh.shape) == {"data": 2, "fsdp": 2, "tp": 2}
    assert opened.policy.embedding(opened.base).addressable_data(0).shape == ((PIECES + 8) // 4, 40)
    assert opened.vocabulary.pieces == PIECES
    assert opened.vocabulary.forbidden_mask(PIECES + 8)[-8:].all()


def test_a_split_sampler_has_its_own_mesh(flax: Path):
    plan = {"placement": "split", "sampler_devices": 8, "sampler_tp": 2, "slots": 4}
    split = tiny.make_config(model={"path": str(flax)}, lora={"rank": 2}, plan=plan)
    opened = open_model(split, role="sampler")
    assert dict(opened.policy.mesh.shape) == {"data": 4, "fsdp": 1, "tp": 2}


def test_the_tokenizer_of_another_model_is_an_error(flax: Path):
    path = flax / "config.json"
    path.write_text(json.dumps({"model_type": "gemma2", "vocab_size": 256_000}))
    with pytest.raises(ValueError, match=r"480 pieces, the model's embedding 256000 rows"):
        open_model(config(flax), role="learner")
