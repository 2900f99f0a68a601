"""Texts on which an export is compared."""

from __future__ import annotations

from pathlib import Path

from pipeline.data.text.tokenizer_files import read_tokenizer
from pipeline.evaluate.examples import COUNT, recorded_examples
from pipeline.run.run_folder import RunFolder

DEMO = Path(__file__).parents[3] / "launch" / "demo" / "tiny_gemma3"
DEMO_TOKENIZER = read_tokenizer(DEMO)


def test_texts_of_the_run_are_compared(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.rollouts.mkdir()
    assert recorded_examples(folder, DEMO_TOKENIZER, max_tokens=20) == ()
    folder.write_rollouts("step_000002", [{"text": "<answer>2</answer>"}])
    folder.write_rollouts("step_000010", [{"text": ""}, {"text": "<answer>10</answer>"}])
    (example,) = recorded_examples(folder, DEMO_TOKENIZER, max_tokens=200)
    assert DEMO_TOKENIZER.decode(example.tokens) == "<answer>10</answer>"
    assert example.prompt_tokens.tolist() == [DEMO_TOKENIZER.bos_id]
    folder.write_rollouts("test_before", [{"text": "books " * 50}] * 40)
    examples = recorded_examples(folder, DEMO_TOKENIZER, max_tokens=20)
    assert [len(example.tokens) for example in examples] == [19] * COUNT
    assert len({example.name for example in examples}) == COUNT
