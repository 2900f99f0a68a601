"""Which checkpoint an export means, and on what it is compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import export
from launch.exporting import find_checkpoint, find_examples
from pipeline.contracts.adapters import FORMATS
from pipeline.inputs.text.tokenizer_files import read_tokenizer
from pipeline.run.run_folder import RunFolder

TOKENIZER = read_tokenizer(Path("launch/demo/tiny_gemma3"))


def run(folder: Path, *names: str) -> RunFolder:
    for name in names:
        (folder / "checkpoints" / name).mkdir(parents=True)
    return RunFolder(folder)


@pytest.mark.parametrize(
    ("which", "found"), [(None, "best"), ("best", "best"), ("last", "12"), ("3", "3")]
)
def test_the_best_goes_before_the_last(tmp_path: Path, which: str | None, found: str):
    folder = run(tmp_path, "3", "12", "best", "12.orbax-checkpoint-tmp")
    assert find_checkpoint(folder, which) == tmp_path / "checkpoints" / found


def test_without_a_best_one_it_is_the_last(tmp_path: Path):
    folder = run(tmp_path, "9", "10")
    assert find_checkpoint(folder, None).name == "10"
    with pytest.raises(FileNotFoundError, match="no checkpoint best; there are 10, 9, last"):
        find_checkpoint(folder, "best")


def test_a_run_without_checkpoints_is_told(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="has no checkpoint last; there is none yet"):
        find_checkpoint(RunFolder(tmp_path), None)


def test_texts_of_the_run_are_what_is_compared(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.rollouts.mkdir()
    with pytest.raises(ValueError, match=r"holds no texts .*--no-verify exports without"):
        find_examples(folder, TOKENIZER, max_tokens=20)
    folder.write_rollouts("step_000002", [{"text": "<answer>2</answer>"}])
    folder.write_rollouts("step_000010", [{"text": ""}, {"text": "<answer>10</answer>"}])
    (example,) = find_examples(folder, TOKENIZER, max_tokens=200)
    assert TOKENIZER.decode(example.tokens) == "<answer>10</answer>"
    assert example.prompt_tokens.tolist() == [TOKENIZER.bos_id]
    folder.write_rollouts("test_before", [{"text": "books " * 50}] * 20)
    examples = find_examples(folder, TOKENIZER, max_tokens=20)
    assert [len(example.tokens) for example in examples] == [19] * 8
    assert len({example.name for example in examples}) == 8


def test_the_command_offers_what_can_be_written():
    assert export.FORMATS == FORMATS
