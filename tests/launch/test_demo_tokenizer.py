"""The tiny Gemma's tokenizer: Gemma's ids, whole words, single digits, nothing lost."""

from __future__ import annotations

from pathlib import Path

import sentencepiece

from launch.demo.tokenizer import train_tokenizer
from tests.demo_texts import TAGS, demo_texts, write_tokenizer

TEXT = (
    "<start_of_turn>user\ntom has 14 apples<end_of_turn>\n"
    "<reasoning>14+27=41</reasoning><answer>41</answer>"
)
PIECES = (
    "<start_of_turn> user \n tom ▁has ▁ 1 4 ▁apples <end_of_turn> \n "
    "<reasoning> 1 4 + 2 7 = 4 1 </reasoning> <answer> 4 1 </answer>"
)


def test_special_tokens_have_gemmas_ids_and_words_are_whole(tmp_path: Path):
    model = str(write_tokenizer(tmp_path) / "tokenizer.model")
    processor = sentencepiece.SentencePieceProcessor(model_file=model)
    pieces = [processor.id_to_piece(id_) for id_ in range(112)]
    assert pieces[:7] == ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "[multimodal]", "<unused0>"]
    assert pieces[104:] == ["<unused98>", "<start_of_turn>", "<end_of_turn>", "\n", *TAGS]
    assert processor.vocab_size() == 480
    assert [processor.pad_id(), processor.eos_id(), processor.bos_id()] == [0, 1, 2]
    assert processor.unk_id() == 3
    assert processor.encode(TEXT, out_type=str) == PIECES.split(" ")


def test_the_same_texts_give_the_same_bytes(tmp_path: Path):
    for name in ("one", "two"):
        train_tokenizer(iter(demo_texts(50)), tmp_path / name, vocab_size=512, whole=TAGS)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
