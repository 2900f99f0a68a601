"""The tokenizer that tests of data share."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.data.text.tokenizer import Tokenizer
from pipeline.data.text.tokenizer_files import read_tokenizer
from tests.demo_texts import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small tokenizer."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return read_tokenizer(tokenizer_folder)
