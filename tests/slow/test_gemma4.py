"""Ten random Gemma 4 against Hugging Face's transformers and PEFT.

They run in a separate interpreter, named by $GEMMA_GRPO_TORCH_PYTHON; without it these tests are
skipped.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from pipeline.compute.decode.engine import Engine
from pipeline.compute.learner.export import Exporter
from pipeline.compute.model.adapter_source import load_adapter
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.compute.opening import open_policy
from pipeline.types import RolloutName, RolloutRequest
from tests import tiny
from tests.pipeline.compute.learner.test_torch import LORA, PYTHON, ask

MAKE = Path(__file__).parents[1] / "golden" / "make_golden.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="$GEMMA_GRPO_TORCH_PYTHON is not set"),
]


@pytest.mark.parametrize("seed", range(10))
def test_a_random_gemma_4_equals_hugging_faces(tmp_path: Path, seed: int):
    like, out = tmp_path / "base", tmp_path / "export"
    assert PYTHON is not None
    subprocess.run([PYTHON, str(MAKE), "--gemma4", str(seed), "--out", str(like)], check=True)
    stored = dict(np.load(like / "golden.npz"))
    mesh = make_mesh(jax.devices()[:1])
    policy, base = open_policy(like, dtype="float32", lora=LORA, mesh=mesh)
    config = tiny.make_config(
        lora=LORA.model_dump(),
        model={"path": str(like)},
        rollout={"max_prompt_tokens": 20, "max_new_tokens": stored["greedy_0"].size},
    )
    found = tiny.logits(policy, base, policy.no_adapter(), stored["tokens"])
    np.testing.assert_allclose(found, stored["logits"], rtol=0, atol=1e-4)

    requests = [
        RolloutRequest(RolloutName("test", 0, prompt_id=n, sample=0), stored[f"prompt_{n}"])
        for n in range(3)
    ]
    completions = Engine(policy, base, config, Vocabulary(pad=0, stops=(), forbidden=())).generate(
        requests,
        adapter=policy.no_adapter(),
        version=0,
        adapter_sha256="",
        temperature=0.0,
    )
    for number, completion in enumerate(completions):
        np.testing.assert_array_equal(completion.tokens, stored[f"greedy_{number}"])

    pieces = tmp_path / "tokenizer.model"
    pieces.write_bytes(b"pieces")
    writer = Exporter(
        policy, base, config, tiny.VOCABULARY, like=like, tokenizer=pieces, verify=False
    )
    # So small that it does not amplify rounding errors.
    adapter = {name: 0.3 * value for name, value in tiny.make_probe(policy).items()}
    writer.export(out, adapter, version=1, examples=())
    (out / "tokenizer.model").unlink()
    reread = load_adapter(str(out), policy).adapter
    for name, value in adapter.items():
        np.testing.assert_array_equal(reread[name], value)
    expected = tiny.logits(policy, base, adapter, stored["tokens"])
    assert np.abs(expected - found).max() > 0.01
    given = {"tokens": stored["tokens"], "prompt": stored["prompt_1"]}
    for model, beside in ((out, None), (out / "adapter", like)):
        answer = ask(tmp_path, given, model, beside)
        assert str(answer["complaints"]) == ""
        np.testing.assert_allclose(answer["logits"], expected, rtol=0, atol=1e-4)
