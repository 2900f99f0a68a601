"""The demos: their tasks, the tokenizer, and the base in the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
from safetensors.numpy import load_file

from configs.load import load_config
from launch.demo import gemma, queues, task
from launch.demo.tiny import TAGS, write_tokenizer
from pipeline.data.text.tokenizer_files import read_tokenizer
from tests.launch.cluster_fixtures import PROJECT
from tests.launch.small_run import write_rows

BASE = PROJECT / "launch" / "demo" / "tiny_gemma3"


def test_splits_are_disjoint_and_those_of_the_repository(tmp_path: Path) -> None:
    for file in task.write_splits(tmp_path, seed=0):
        assert file.read_bytes() == (PROJECT / "launch/demo/data" / file.name).read_bytes()
    problems = [one for split in task.make_splits(3).values() for one in split]
    assert len({one.terms for one in problems}) == len(problems)
    assert len({one.question for one in problems}) == len(problems)


def test_demonstrations_are_correct_answers_to_training_problems(tmp_path: Path) -> None:
    file = task.write_demonstrations(tmp_path, seed=0)
    answers = {p.question: p.answer for p in task.make_splits(0)["train"]}
    for row in map(json.loads, file.read_text().splitlines()):
        assert row["completion"].endswith(f"<answer>{answers[row['question']]}</answer>")
    assert file.read_text() == (PROJECT / "launch/demo/data/demonstrations.jsonl").read_text()


# --- the base


def test_the_tokenizer_has_gemmas_ids_whole_words_and_single_digits(tmp_path: Path):
    write_tokenizer(tmp_path, seed=0)
    made = tmp_path / "tokenizer.model"
    assert made.read_bytes() == (BASE / "tokenizer.model").read_bytes()
    processor = sentencepiece.SentencePieceProcessor(model_file=str(made))
    pieces = [processor.id_to_piece(id_) for id_ in range(112)]
    assert pieces[:7] == ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "[multimodal]", "<unused0>"]
    assert pieces[104:] == ["<unused98>", "<start_of_turn>", "<end_of_turn>", "\n", *TAGS]
    words = "<reasoning> 1 4 + 2 </reasoning> ▁apples <end_of_turn>"
    pieces = processor.encode("<reasoning>14+2</reasoning> apples<end_of_turn>", out_type=str)
    assert " ".join(pieces) == words


@pytest.mark.slow  # the folder is in the repository: it does not change by itself
@pytest.mark.ray
def test_the_base_has_correct_and_wrong_answers(tmp_path: Path):
    """Most groups have correct and wrong answers; most answers are well formed."""
    result = tmp_path / "result.json"
    options = ["--eval.samples=8", "--eval.temperature=1.0", "--data.test.limit=200"]
    command = [sys.executable, "-m", "launch.evaluate", "configs/demo.toml", *options]
    subprocess.run([*command, f"--json={result}"], cwd=PROJECT, env=os.environ, check=True)
    base = json.loads(result.read_text())["sets"]["test"]["base"]
    assert 0.25 <= base["accuracy"] <= 0.45
    assert base["pass@8"] >= 0.85
    assert base["well_formed"] >= 0.9


@pytest.mark.slow
def test_the_base_can_be_made_again(tmp_path: Path):
    command = [sys.executable, "-m", "launch.demo.tiny", "--out", str(tmp_path), "--steps", "3"]
    subprocess.run(command, cwd=PROJECT, env=os.environ, check=True)
    made, kept = (load_file(folder / "model.safetensors") for folder in (tmp_path, BASE))
    assert {name: x.shape for name, x in made.items()} == {n: x.shape for n, x in kept.items()}
    assert read_tokenizer(tmp_path).vocab_size == 512


def test_an_unwritable_folder_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    out = f"--out={tmp_path}/file/a/data"
    monkeypatch.setattr("sys.argv", ["gemma", out])
    assert (queues.main([out]), gemma.main()) == (1, 1)
    with pytest.raises(SystemExit):
        task.main([out])
    told = f"--out {tmp_path}/file/a/data cannot be written: Not a directory\n"
    assert capsys.readouterr().err.count(told) == 3


# --- the task of `make gemma`


def test_the_queues_and_their_template_are_those_of_the_repository(tmp_path: Path) -> None:
    for file in queues.write_splits(tmp_path, seed=0):
        assert file.read_bytes() == (PROJECT / "launch/demo/queues" / file.name).read_bytes()
    config = load_config(PROJECT / "configs" / "gemma3_270m_cpu.toml")
    assert config.prompt.template == queues.template(3)


def test_kinds_of_answers_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"queue": "Eva, Jim, Ruth, Mark", "name": "Jim", "answer": "Ruth"}
    test = tmp_path / "test.jsonl"
    write_rows(test, [row] * 4)
    config = {"data": {"test": {"path": str(test)}}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "rollouts").mkdir()
    for when, answers in (
        ("before", ["Ruth", "Eva", "Kate", "Caylan"]),
        ("after", ["Ruth", "Ruth", "Ruth", None]),
    ):
        lines = [{"prompt_id": n, "found": found} for n, found in enumerate(answers, start=1)]
        write_rows(tmp_path / "rollouts" / f"test_{when}.jsonl", lines)
    assert queues.main(["--answers", str(tmp_path)]) == 0
    before, after = capsys.readouterr().out.splitlines()
    for kind in ("right", "another of the queue", "another name", "no name"):
        assert f"{kind} 25.0%" in before
    assert after == "after: right 75.0%, no name 25.0% of 4"
