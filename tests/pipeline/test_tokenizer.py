"""Text and ids: exact both ways, special tokens apart, clear errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2 as proto

from pipeline.tokenizer import Tokenizer
from tests.demo_texts import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_ids_are_gemmas(tokenizer: Tokenizer):
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) == (0, 1, 2)
    assert tokenizer.piece_id("<start_of_turn>") == 105
    assert tokenizer.piece_id("<end_of_turn>") == 106
    assert tokenizer.piece_id("<unk>") == 3
    assert tokenizer.vocab_size == 480


def test_encoding_is_int32_without_bos_and_knows_turn_tokens(tokenizer: Tokenizer):
    ids = tokenizer.encode("<start_of_turn>user\n")
    assert ids.dtype == np.int32
    assert ids.tolist() == [105, tokenizer.piece_id("user"), 107]
    assert tokenizer.encode("").shape == (0,)


def test_a_stop_token_is_no_text(tokenizer: Tokenizer):
    answer = "<answer>33</answer>"
    ids = tokenizer.encode(answer)
    assert tokenizer.decode([*ids, 106]) == answer
    assert tokenizer.decode([*ids, 1]) == answer
    assert tokenizer.decode(np.array([2, 105, *ids, 4, 0, 3], np.int32)) == answer


def test_a_continuation_keeps_its_leading_space(tokenizer: Tokenizer):
    assert tokenizer.decode(tokenizer.encode(" has 3")) == " has 3"
    assert tokenizer.decode(tokenizer.encode("  ")) == "  "


@given(first=st.text(), second=st.text())
def test_text_survives_and_parts_join(tokenizer: Tokenizer, first: str, second: str):
    # SentencePiece cannot tell U+2581 from a space; turn tokens are no text.
    first, second = (t.replace("\u2581", "").replace("<", "") for t in (first, second))
    ids = np.concatenate([tokenizer.encode(first), tokenizer.encode(second)])
    assert tokenizer.decode(ids) == first + second


def test_an_unknown_piece_names_the_nearest(tokenizer: Tokenizer):
    with pytest.raises(ValueError, match=r"no piece '<end_of_trun>'; nearest: '<end_of_turn>'"):
        tokenizer.piece_id("<end_of_trun>")


def test_a_missing_model_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at .*tokenizer\.model"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"not a model"])
def test_a_damaged_model_is_named(tmp_path: Path, damage: bytes):
    (tmp_path / "tokenizer.model").write_bytes(damage)
    with pytest.raises(ValueError, match=r"tokenizer\.model is not a SentencePiece model"):
        Tokenizer(tmp_path)


def test_a_truncated_model_is_named(tmp_path: Path):
    model = write_tokenizer(tmp_path) / "tokenizer.model"
    model.write_bytes(model.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"tokenizer\.model is not a SentencePiece model"):
        Tokenizer(tmp_path)


def test_a_tokenizer_that_changes_spaces_is_refused(tmp_path: Path):
    path = write_tokenizer(tmp_path) / "tokenizer.model"
    model = proto.ModelProto.FromString(path.read_bytes())
    model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = True
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="changes spaces: ' a  b ' comes back as"):
        Tokenizer(tmp_path)


def test_a_tokenizer_without_gemmas_tokens_is_refused(tmp_path: Path):
    path = write_tokenizer(tmp_path) / "tokenizer.model"
    model = proto.ModelProto.FromString(path.read_bytes())
    model.pieces[0].piece = "<padding>"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="has no piece '<pad>'; nearest: '<padding>'"):
        Tokenizer(tmp_path)
