"""Ids of the configured special tokens."""

from __future__ import annotations

import numpy as np
import pytest

from configs.schema import Rollout
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.data.text.tokenizer import Tokenizer
from pipeline.data.text.tokenizer_files import read_tokenizer
from tests.demo_texts import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return read_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def rollout(**changes: object) -> Rollout:
    sizes = {"prompts_per_step": 1, "max_prompt_tokens": 1, "max_new_tokens": 1}
    return Rollout.model_validate(sizes | changes)


def test_the_defaults_are_those_of_gemma(tokenizer: Tokenizer):
    # <end_of_turn>, <eos>; <pad>, <bos>, <unk>, <mask>, <start_of_turn>
    found = Vocabulary.of(tokenizer, rollout())
    assert found == Vocabulary(pad=0, stops=(106, 1), forbidden=(0, 2, 3, 4, 105), pieces=480)


@pytest.mark.parametrize("key", ["stop_tokens", "forbidden_tokens"])
def test_an_unknown_token_is_an_error(tokenizer: Tokenizer, key: str):
    with pytest.raises(ValueError, match="no piece '<end_of_trun>'"):
        Vocabulary.of(tokenizer, rollout(**{key: ["<end_of_trun>"]}))


def test_the_mask_is_true_where_forbidden():
    mask = Vocabulary(pad=0, stops=(1,), forbidden=(0, 3)).forbidden_mask(5)
    np.testing.assert_array_equal(mask, [True, False, False, True, False])
    # Padding rows of the embedding.
    mask = Vocabulary(pad=0, stops=(1,), forbidden=(0,), pieces=3).forbidden_mask(5)
    np.testing.assert_array_equal(mask, [True, False, False, True, True])
