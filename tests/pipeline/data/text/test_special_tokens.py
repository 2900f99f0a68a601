"""Matching and mismatching tokenizers and models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from configs.schema import Model, Prompt
from pipeline.data.rows import Malformed, Row
from pipeline.data.text.prompts import PromptMaker, Rendered
from pipeline.data.text.special_tokens import check_tokenizer
from pipeline.data.text.tokenizer import Tokenizer
from pipeline.data.text.tokenizer_files import open_tokenizer, read_tokenizer
from tests import tiny
from tests.demo_texts import write_tokenizer, write_tokenizer_json

PIECES = 480


def check(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    config: dict[str, Any] | None,
    generation: dict[str, Any] | None = None,
    vocab_size: int | None = None,
    stop_tokens: tuple[str, ...] = ("<end_of_turn>", "<eos>"),
) -> None:
    if config is not None:
        whole = tiny.hf_config(vocab_size=PIECES) | config
        (folder / "config.json").write_text(json.dumps(whole))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    check_tokenizer(tokenizer, folder=folder, vocab_size=vocab_size, stop_tokens=stop_tokens)


def with_added_piece(folder: Path, piece: str) -> Path:
    """A folder whose `tokenizer.json` has a piece beyond the model's rows."""
    write_tokenizer_json(folder, of=write_tokenizer(folder))
    file = str(folder / "tokenizer.json")
    whole = tokenizers.Tokenizer.from_file(file)
    whole.add_special_tokens([piece])
    whole.save(file)
    return folder


@pytest.mark.parametrize(
    "said",
    [
        {"config": {"vocab_size": PIECES + 64, "bos_token_id": 2, "eos_token_id": 1}},
        {"config": {"eos_token_id": None}, "generation": {"eos_token_id": [1, 106]}},
        # A configured stop token may also be the model's end token.
        {"config": {"eos_token_id": 107}, "stop_tokens": ("\n",)},
        {"config": None},
    ],
)
def test_matching_tokenizers_and_models_are_accepted(
    tmp_path: Path, tokenizer: Tokenizer, said: dict[str, Any]
):
    check(tmp_path, tokenizer, **said)


@pytest.mark.parametrize(
    ("said", "lines"),
    [
        (
            {"config": None, "vocab_size": 262_144},
            ["{} has 480 pieces, the model's embedding 262144 rows; at most 1024 rows of padding"],
        ),
        (
            {"config": {"bos_token_id": 1, "eos_token_id": 2}},
            [
                "config.json: bos_token_id is 1, which is '<eos>' in {}, not <bos>",
                "config.json: eos_token_id is 2, which is '<bos>' in {}, not <eos> or <end_of_turn",
            ],
        ),
        (
            # Gemma 2's end of turn is Gemma 3's newline.
            {"config": {}, "generation": {"eos_token_id": [1, 107, 9_999]}},
            [
                "generation_config.json: eos_token_id is 107, which is '\\n' in {}, not <eos> or",
                "generation_config.json: eos_token_id is 9999, which is no piece in {}, not <eos>",
            ],
        ),
    ],
)
def test_mismatched_tokenizers_and_models_are_refused(
    tmp_path: Path, tokenizer: Tokenizer, said: dict[str, Any], lines: list[str]
):
    with pytest.raises(ValueError, match="tokenizer of another model") as raised:
        check(tmp_path, tokenizer, **said)
    *found, hint = str(raised.value).splitlines()
    assert len(found) == len(lines)
    for line, expected in zip(found, lines, strict=True):
        assert line.startswith(expected.format(tokenizer.path))
    assert "set model.tokenizer" in hint


def test_an_added_piece_needs_a_row_only_where_it_occurs(tmp_path: Path):
    """As a text-only Gemma 3 saved by transformers 5: `<image_soft_token>` is beyond its rows."""
    folder = with_added_piece(tmp_path, "<image_soft_token>")
    config = tiny.hf_config(vocab_size=PIECES)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = open_tokenizer(Model(path=str(folder)))
    assert (tokenizer.vocab_size, tokenizer.rows) == (PIECES + 1, PIECES)
    check(folder, tokenizer, config={})
    with pytest.raises(ValueError, match=r"481 pieces, .* 96 rows"):
        check(folder, tokenizer, config={"vocab_size": 96})
    maker = PromptMaker(Prompt(), tokenizer)
    assert isinstance(maker.make(Row(1, {"question": "tom"})), Rendered)
    assert maker.make(Row(2, {"question": "an <image_soft_token>"})) == Malformed(
        2, "the prompt contains <image_soft_token>, for which the model's embedding has no row"
    )


def test_an_unknown_end_of_turn_may_become_a_stop_token(tmp_path: Path):
    folder = with_added_piece(tmp_path, "<|im_end|>")
    tokenizer, ends = read_tokenizer(folder), {"vocab_size": PIECES + 64, "eos_token_id": PIECES}
    with pytest.raises(ValueError, match=r"^config.*'<\|im_end\|>' in .* rollout\.stop_tokens$"):
        check(folder, tokenizer, config=ends)
    check(folder, tokenizer, config=ends, stop_tokens=("<|im_end|>",))


def test_gemma_4_also_ends_before_the_response_of_a_tool(tmp_path: Path):
    tokenizer = read_tokenizer(write_tokenizer(tmp_path, gemma4=True))
    # As published with google/gemma-4-E2B-it.
    check(tmp_path, tokenizer, config={}, generation={"eos_token_id": [1, 106, 50]})
    message = "not <eos> or <turn|> or <|tool_response> or <end_of_turn>"
    with pytest.raises(ValueError, match=re.escape(message)):
        check(tmp_path, tokenizer, config={"eos_token_id": 100})
