"""The tiny Gemma's tokenizer: Gemma's ids, whole words, single digits, nothing lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import sentencepiece

from launch.demo.tokenizer import train_tokenizer
from tests.demo_texts import TAGS, demo_texts, write_tokenizer


@pytest.fixture(scope="module")
def processor(
    tmp_path_factory: pytest.TempPathFactory,
) -> sentencepiece.SentencePieceProcessor:
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def test_special_tokens_have_gemmas_ids(processor):
    pieces = [processor.id_to_piece(id_) for id_ in range(112)]
    assert pieces[:7] == ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "[multimodal]", "<unused0>"]
    assert pieces[104:] == ["<unused98>", "<start_of_turn>", "<end_of_turn>", "\n", *TAGS]
    assert processor.vocab_size() == 480
    assert [processor.pad_id(), processor.eos_id(), processor.bos_id()] == [0, 1, 2]
    assert processor.unk_id() == 3


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (
            "<start_of_turn>user\ntom has 14 apples. he gets 27 more",
            "<start_of_turn> user \n tom ▁has ▁ 1 4 ▁apples . ▁he ▁gets ▁ 2 7 ▁more",
        ),
        (
            "<reasoning>14+27=41 41-8=33</reasoning><answer>33</answer><end_of_turn>",
            (
                "<reasoning> 1 4 + 2 7 = 4 1 ▁ 4 1 - 8 = 3 3 </reasoning> <answer> 3 3 </answer> "
                "<end_of_turn>"
            ),
        ),
    ],
)
def test_words_are_whole_and_digits_single(processor, text, pieces):
    assert processor.encode(text, out_type=str) == pieces.split(" ")


def test_the_same_texts_give_the_same_bytes(tmp_path: Path):
    for name in ("one", "two"):
        train_tokenizer(iter(demo_texts(50)), tmp_path / name, vocab_size=512, whole=TAGS)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
