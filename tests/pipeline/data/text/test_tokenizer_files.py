"""Tokenizers of both formats: exact round trips, special tokens, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2 as proto

from configs.schema import Model
from pipeline.data.text.chat import GEMMA4, ChatTemplate
from pipeline.data.text.tokenizer import Tokenizer
from pipeline.data.text.tokenizer_files import open_tokenizer, read_tokenizer
from tests.demo_texts import write_tokenizer, write_tokenizer_json


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pieces = write_tokenizer(tmp_path_factory.mktemp("pieces"))
    return {
        "tokenizer.model": pieces,
        "tokenizer.json": write_tokenizer_json(tmp_path_factory.mktemp("json"), of=pieces),
    }


@pytest.fixture(scope="module", params=["tokenizer.model", "tokenizer.json"])
def tokenizer(folders: dict[str, Path], request: pytest.FixtureRequest) -> Tokenizer:
    found = read_tokenizer(folders[request.param])
    assert found.path.name == request.param
    return found


@pytest.fixture(scope="module")
def both(folders: dict[str, Path]) -> list[Tokenizer]:
    return [read_tokenizer(folder) for folder in folders.values()]


def test_ids_are_gemmas(tokenizer: Tokenizer):
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) == (0, 1, 2)
    pieces = ("<unk>", "<start_of_turn>", "<end_of_turn>")
    assert [tokenizer.piece_id(piece) for piece in pieces] == [3, 105, 106]
    assert tokenizer.vocab_size == 480
    assert (tokenizer.piece(105), tokenizer.find("<nothing>")) == ("<start_of_turn>", None)
    ids = tokenizer.encode("<start_of_turn>user\n")
    assert ids.dtype == np.int32
    assert ids.tolist() == [105, tokenizer.piece_id("user"), 107]


def test_decoded_text_has_no_stop_token(tokenizer: Tokenizer):
    answer = "<answer>33</answer>"
    ids = tokenizer.encode(answer)
    for whole in ([*ids, 106], [*ids, 1], np.array([2, 105, *ids, 4, 0, 3], np.int32)):
        assert tokenizer.decode(whole) == answer


@given(first=st.text(), second=st.text())
def test_text_round_trips_and_parts_concatenate(both: list[Tokenizer], first: str, second: str):
    # SentencePiece does not distinguish U+2581 from a space; turn tokens are special.
    first, second = (t.replace("\u2581", "").replace("<", "") for t in (first, second))
    for tokenizer in both:
        ids = np.concatenate([tokenizer.encode(first), tokenizer.encode(second)])
        assert tokenizer.decode(ids) == first + second


@given(ids=st.lists(st.one_of(st.integers(0, 479), st.integers(112, 367)), max_size=20))
def test_any_ids_decode_equally_in_both_formats(both: list[Tokenizer], ids: list[int]):
    assert both[0].decode(ids) == both[1].decode(ids)


def test_bytes_of_an_incomplete_character_become_replacement_characters(tokenizer: Tokenizer):
    snow = [tokenizer.piece_id(f"<0x{byte:02X}>") for byte in "é☃".encode()]
    assert tokenizer.decode(snow) == "é☃"
    assert tokenizer.decode(snow[:-1]) == "é\ufffd\ufffd"


@pytest.mark.parametrize("damage", [b"", b"not a model"])
def test_a_damaged_file_and_a_tokenizer_of_another_kind_are_refused(tmp_path: Path, damage: bytes):
    path = write_tokenizer(tmp_path) / "tokenizer.model"
    model = proto.ModelProto.FromString(path.read_bytes())
    model.pieces[0].piece = "<padding>"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="has no piece '<pad>'; nearest: '<padding>'"):
        read_tokenizer(tmp_path)
    path.write_bytes(damage)
    with pytest.raises(ValueError, match=r"tokenizer\.model is not a SentencePiece model"):
        read_tokenizer(tmp_path)
    # It is read if there are both, as in transformers.
    (tmp_path / "tokenizer.json").write_bytes(damage)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a Hugging Face tokenizer"):
        read_tokenizer(tmp_path)


def opened(folder: Path, **changes: Any) -> Tokenizer:
    return open_tokenizer(Model(path=str(folder), **changes))


def test_the_tokenizer_is_in_the_models_folder_by_default(folders: dict[str, Path], tmp_path: Path):
    assert opened(folders["tokenizer.model"]).chat_template is None
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        opened(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("of the model")
    elsewhere = opened(tmp_path, tokenizer=str(folders["tokenizer.json"] / "tokenizer.json"))
    assert elsewhere.path == folders["tokenizer.json"] / "tokenizer.json"
    assert elsewhere.chat_template == ChatTemplate(tmp_path / "chat_template.jinja", "of the model")
    with pytest.raises(FileNotFoundError, match=r"model\.tokenizer: no file or folder .*gone"):
        opened(tmp_path, tokenizer=str(tmp_path / "gone"))


def test_gemma_4_has_its_own_turn_tokens_and_shows_its_thoughts(tmp_path: Path):
    write_tokenizer_json(tmp_path, of=write_tokenizer(tmp_path, gemma4=True))
    path = tmp_path / "tokenizer.model"
    expected = read_tokenizer(path)
    # Some files have control pieces instead.
    model = proto.ModelProto.FromString(path.read_bytes())
    for name in ("<|think|>", "<|channel>", "<channel|>", "<|turn>", "<turn|>"):
        model.pieces[expected.piece_id(name)].type = proto.ModelProto.SentencePiece.CONTROL
    (tmp_path / "controls.model").write_bytes(model.SerializeToString())
    text = "<|turn>system\n<|think|>\n<turn|>\n<|turn>model\n<|channel>thought\n1<channel|>2<turn|>"
    for file in ("tokenizer.model", "tokenizer.json", "controls.model"):
        tokenizer = read_tokenizer(tmp_path / file)
        assert tokenizer.turns == GEMMA4
        # The names of Gemma 3 mean the turn tokens of any model.
        assert tokenizer.piece_id("<start_of_turn>") == tokenizer.piece_id("<|turn>") == 105
        assert tokenizer.piece_id("<end_of_turn>") == tokenizer.piece_id("<turn|>") == 106
        assert tokenizer.find("<end_of_turn>") is None
        ids = tokenizer.encode(text)
        np.testing.assert_array_equal(ids, expected.encode(text))
        assert [ids[0], ids[-1]] == [105, 106]
        assert tokenizer.decode(ids) == expected.decode(ids)
        assert tokenizer.decode(ids).endswith("<|channel>thought\n1<channel|>2")
