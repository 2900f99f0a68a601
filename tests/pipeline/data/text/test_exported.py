"""transformers reads our token ids from the tokenizer files of an export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipeline.data.text.chat import GEMMA3 as GEMMA3_TURNS
from pipeline.data.text.chat import GEMMA4 as GEMMA4_TURNS
from pipeline.data.text.chat import ChatTemplate, Turn, Turns, in_turns, read_chat_template
from pipeline.data.text.exported import (
    check_exported,
    write_chat_template,
    write_unigram_json,
)
from pipeline.data.text.tokenizer_files import read_tokenizer
from tests.demo_texts import write_tokenizer
from tests.pipeline.data.text.test_chat import GEMMA3, GEMMA4_TEMPLATE

DEMO = Path(__file__).parents[4] / "launch" / "demo" / "tiny_gemma3"
MODELS = {"gemma3_text": GEMMA3, "gemma4_text": GEMMA4_TEMPLATE}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An export with a SentencePiece unigram model and a chat template."""
    kind: str = request.param
    write_tokenizer(tmp_path, gemma4=kind == "gemma4_text")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    (tmp_path / "chat_template.jinja").write_text(MODELS[kind])
    return tmp_path


def test_promise_9_transformers_reads_our_token_ids(folder: Path):
    tokenizer = read_tokenizer(folder)
    template = folder / "chat_template.jinja"
    tokenizer.chat_template = ChatTemplate(template, template.read_text())
    write_unigram_json(folder, model=folder / "tokenizer.model")
    check_exported(folder, tokenizer)
    begun = AutoTokenizer.from_pretrained(folder)("1 + 1?")["input_ids"]
    assert begun == [tokenizer.bos_id, *tokenizer.encode("1 + 1?").tolist()]
    template.write_text("{{ bos_token }}{{ messages[0].content }}")
    with pytest.raises(RuntimeError, match=r"reads other token ids .*'<bos>What is 1,234"):
        check_exported(folder, tokenizer)
    template.write_text("{{ 1 / 0 }}")
    with pytest.raises(RuntimeError, match=r"cannot read the tokenizer in .*: division by zero"):
        check_exported(folder, tokenizer)


def test_the_tokenizer_of_the_demo_is_read_after_a_conversion(tmp_path: Path):
    for path in DEMO.glob("*.json"):
        shutil.copyfile(path, tmp_path / path.name)
    shutil.copyfile(DEMO / "tokenizer.model", tmp_path / "tokenizer.model")
    with pytest.raises(RuntimeError, match="transformers reads other token ids"):
        check_exported(tmp_path, read_tokenizer(DEMO))
    write_unigram_json(tmp_path, model=DEMO / "tokenizer.model")
    check_exported(tmp_path, read_tokenizer(DEMO))


@pytest.mark.parametrize("turns", [GEMMA3_TURNS, GEMMA4_TURNS])
def test_the_turns_of_a_run_are_the_chat_template_of_its_export(tmp_path: Path, turns: Turns):
    write_chat_template(tmp_path, turns)
    template = read_chat_template(tmp_path)
    assert template is not None
    asked: list[Turn] = [("user", " 1 + 1?\n"), ("assistant", "2"), ("user", "2 + 2?")]
    assert template.render(asked) == in_turns(asked, turns)
    opened: list[Turn] = [("user", "Add.\n\n 1 + 1?\n"), *asked[1:]]
    expected = [("system", "Add."), *asked] if turns.has_system else opened
    assert template.render([("system", "Add."), *asked]) == in_turns(expected, turns)
