"""The demo: its task, its tokenizer, and the base in the repository."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from launch.demo import task
from launch.demo.task import ErrorRates, Problem, make_problem, solution
from launch.demo.tiny import TAGS, write_tokenizer
from pipeline.data.text.tokenizer_files import read_tokenizer
from tests.launch.cluster_fixtures import PROJECT

BASE = PROJECT / "launch" / "demo" / "tiny_gemma3"


@given(st.integers(0, 2**32))
def test_the_words_match_the_terms(seed: int) -> None:
    problem = make_problem(Random(seed))
    start = re.findall(r"(?:has|starts with) (\d+)", problem.question)
    gains = [verb.replace("{}", r"\d+") for verb in task.GAINS]
    losses = [verb.replace("{}", r"\d+") for verb in task.LOSSES]
    changes = [
        (1 if any(re.fullmatch(gain, words) for gain in gains) else -1)
        * int(re.findall(r"\d+", words)[0])
        for words in re.findall("|".join(gains + losses), problem.question)
    ]
    assert problem.terms == (int(start[0]), *changes)
    assert problem.answer == sum(problem.terms)
    assert len(changes) in (2, 3)


@pytest.mark.parametrize(
    ("terms", "rates", "steps", "answer"),
    [
        ((14, 27, -8), ErrorRates(carry=1), "14+27=31 31-8=33", 33),
        ((14, 25, -8), ErrorRates(carry=1), "14+25=39 39-8=31", 31),
        ((52, -17), ErrorRates(carry=1), "52-17=45", 45),
        ((40, 10, -3), ErrorRates(operator=1), "40-10=30 30+3=33", 33),
        ((10, 30), ErrorRates(operator=1), "10-30=20", 20),
        ((90, -30), ErrorRates(operator=1), "90+30=20", 20),
        ((52, 17), ErrorRates(carry=1, operator=1), "52-17=45", 45),
    ],
)
def test_mistakes_by_hand(
    terms: tuple[int, ...], rates: ErrorRates, steps: str, answer: int
) -> None:
    problem = Problem(question="", terms=terms, answer=sum(terms))
    written = f"<reasoning>{steps}</reasoning><answer>{answer}</answer>"
    assert solution(problem, Random(0), rates) == written


def test_splits_are_disjoint_and_the_same_bytes_on_every_machine(tmp_path: Path) -> None:
    files = task.write_splits(tmp_path, seed=0, train=20, validation=5, test=5)
    rows = {file.stem: list(map(json.loads, file.read_text().splitlines())) for file in files}
    assert {name: len(split) for name, split in rows.items()} == {
        "train": 20, "validation": 5, "test": 5,
    }  # fmt: skip
    assert all(row.keys() == {"question", "answer"} for split in rows.values() for row in split)
    digest = hashlib.sha256((tmp_path / "train.jsonl").read_bytes()).hexdigest()
    assert digest == "9cfd33e160dd4893368ed0579bbd8cb4867ed5441ed1d4ef6b1c82c88c130721"
    problems = [one for split in task.make_splits(3).values() for one in split]
    assert len({one.terms for one in problems}) == len(problems)
    assert len({one.question for one in problems}) == len(problems)


def test_demonstrations_are_correct_answers_to_training_problems(tmp_path: Path) -> None:
    file = task.write_demonstrations(tmp_path, seed=0, count=50)
    answers = {p.question: p.answer for p in task.make_splits(0)["train"]}
    for row in map(json.loads, file.read_text().splitlines()):
        assert row["completion"].endswith(f"<answer>{answers[row['question']]}</answer>")
    committed = (PROJECT / "launch/demo/data/demonstrations.jsonl").read_text().splitlines()
    assert committed[:50] == file.read_text().splitlines()


# --- the base


TEXT = (
    "<start_of_turn>user\ntom has 14 apples<end_of_turn>\n"
    "<reasoning>14+27=41</reasoning><answer>41</answer>"
)
PIECES = (
    "<start_of_turn> user \n tom ▁has ▁ 1 4 ▁apples <end_of_turn> \n "
    "<reasoning> 1 4 + 2 7 = 4 1 </reasoning> <answer> 4 1 </answer>"
)


def test_the_tokenizer_has_gemmas_ids_whole_words_and_single_digits(tmp_path: Path):
    write_tokenizer(tmp_path, seed=0)
    made = tmp_path / "tokenizer.model"
    assert made.read_bytes() == (BASE / "tokenizer.model").read_bytes()
    processor = sentencepiece.SentencePieceProcessor(model_file=str(made))
    pieces = [processor.id_to_piece(id_) for id_ in range(112)]
    assert pieces[:7] == ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "[multimodal]", "<unused0>"]
    assert pieces[104:] == ["<unused98>", "<start_of_turn>", "<end_of_turn>", "\n", *TAGS]
    assert processor.vocab_size() == 512
    assert [processor.pad_id(), processor.eos_id(), processor.bos_id()] == [0, 1, 2]
    assert processor.unk_id() == 3
    assert processor.encode(TEXT, out_type=str) == PIECES.split(" ")


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
