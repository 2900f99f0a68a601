"""The answer prefix: the end of the prompt's tokens and the beginning of a completion's text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Prompt
from pipeline.data.rows import Malformed, Row
from pipeline.data.text.chat import ChatTemplate
from pipeline.data.text.prompts import PromptMaker, Rendered
from pipeline.data.text.tokenizer import Tokenizer
from pipeline.data.text.tokenizer_files import read_tokenizer
from pipeline.types import RolloutName, RolloutRequest
from tests.demo_texts import write_tokenizer
from tests.samples import completion

ROW = Row(1, {"question": "tom has 1 apples."})
TURNS = "<start_of_turn>user\ntom has 1 apples.<end_of_turn>\n<start_of_turn>model\n"


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return read_tokenizer(write_tokenizer(tmp_path_factory.mktemp("gemma4"), gemma4=True))


def made(tokenizer: Tokenizer, **prompt: Any) -> Rendered:
    found = PromptMaker(Prompt(**prompt), tokenizer).make(ROW)
    assert isinstance(found, Rendered)
    return found


@pytest.mark.parametrize(
    ("turn", "text"), [("gemma", TURNS), ("auto", TURNS), ("plain", ROW.values["question"])]
)
@pytest.mark.parametrize("prefix", ["", "<reasoning>", " 2 apples"])
def test_the_prefix_is_appended_without_changing_the_prompts_tokens(
    tokenizer: Tokenizer, turn: str, text: str, prefix: str
):
    found = made(tokenizer, turn=turn, answer_prefix=prefix)
    assert found.text == text
    assert found.tokens.tolist() == [2, *tokenizer.encode(text), *tokenizer.encode(prefix)]
    assert found.tokens.dtype == "int32"
    assert tokenizer.decode(found.tokens).endswith(prefix)


@pytest.mark.parametrize("turn", ["auto", "gemma", "plain"])
def test_a_prompt_has_one_bos(tokenizer: Tokenizer, turn: Any):
    maker = PromptMaker(Prompt(turn=turn), tokenizer)
    assert maker.make(Row(1, {"question": "<bos>q"})) == Malformed(
        1, "column 'question' contains <bos>, with which every prompt begins already"
    )
    for prompt in ({"system": "<bos>"}, {"template": "<bos>{question}"}):
        with pytest.raises(ValueError, match="a shot contains <bos>, with which every prompt"):
            made(tokenizer, turn=turn, **prompt)


def test_the_text_of_a_completion_begins_with_the_prefix(tokenizer: Tokenizer):
    maker = PromptMaker(Prompt(answer_prefix="<reasoning>"), tokenizer)
    request = RolloutRequest(RolloutName("train", 0, 1, 0), made(tokenizer).tokens)
    ids = tokenizer.encode("1</reasoning><answer>1</answer>").tolist()
    end = tokenizer.piece_id("<end_of_turn>")
    drawn = completion(request, "".join(map(chr, ids)) + chr(end), ended=False)
    assert maker.text_of(drawn) == "<reasoning>1</reasoning><answer>1</answer>"
    other = maker.with_template("{question}?")
    assert other.text_of(drawn) == maker.text_of(drawn)


@pytest.mark.parametrize(("prefix", "read"), [("<end_of_turn>x", "x"), ("a<start_of_turn>", "a")])
def test_a_prefix_with_special_tokens_is_refused(tokenizer: Tokenizer, prefix: str, read: str):
    message = re.escape(f"prompt.answer_prefix = {prefix!r}: ") + f".* decodes it to {read!r};"
    with pytest.raises(ValueError, match=message):
        PromptMaker(Prompt(answer_prefix=prefix), tokenizer)


def test_thinking_needs_a_model_and_a_template_with_that_mode(
    tokenizer: Tokenizer, gemma4: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    assert made(gemma4, thinking=True).text.startswith("<|turn>system\n<|think|>\n<turn|>\n")
    assert PromptMaker(Prompt(), gemma4).end_of_completion == "<turn|>"
    with pytest.raises(
        ValueError, match=r"prompt\.thinking = true: .* without a thinking mode; remov"
    ):
        PromptMaker(Prompt(thinking=True), tokenizer)
    template = ChatTemplate(Path("folder/file"), "{{ messages[0].content }}")
    monkeypatch.setattr(gemma4, "chat_template", template)
    with pytest.raises(ValueError, match=r"the chat template in folder/file has no thinking mode"):
        PromptMaker(Prompt(thinking=True), gemma4)
    found = made(gemma4, thinking=True, turn="gemma")
    assert found.text.startswith("<|turn>system\n<|think|>\n")
