"""The demo's task: consistent problems, solutions with mistakes, disjoint splits."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.demo import task
from launch.demo.task import ErrorRates, Problem, make_problem, solution

PROBLEM = Problem(question="", terms=(14, 27, -8), answer=33)

PROJECT = Path(__file__).parents[2]


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


@given(st.integers(0, 2**32))
def test_every_partial_sum_has_at_most_two_digits(seed: int) -> None:
    terms = make_problem(Random(seed)).terms
    assert all(0 <= sum(terms[:n]) <= 99 for n in range(1, len(terms) + 1))


def test_solutions_without_mistakes_are_correct() -> None:
    written = "<reasoning>14+27=41 41-8=33</reasoning><answer>33</answer>"
    assert solution(PROBLEM, Random(0)) == written


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


@given(st.integers(0, 2**32), st.floats(0, 1), st.floats(0, 1))
def test_solutions_have_one_form(seed: int, carry: float, operator: float) -> None:
    rng = Random(seed)
    written = solution(make_problem(rng), rng, ErrorRates(carry=carry, operator=operator))
    step = r"(\d{1,2})[+-]\d{1,2}=(\d{1,2})"
    match = re.fullmatch(
        rf"<reasoning>({step}(?: {step}){{1,2}})</reasoning><answer>(\d{{1,2}})</answer>", written
    )
    assert match is not None
    results = [result for _, result in re.findall(step, match.group(1))]
    starts = [start for start, _ in re.findall(step, match.group(1))]
    assert [*starts[1:], match.groups()[-1]] == results


@pytest.mark.parametrize(
    ("terms", "needs"),
    [((14, 27, -8), True), ((12, 13, -4), False), ((52, -17), True), ((40, 10, -31), True)],
)
def test_carries_by_hand(terms: tuple[int, ...], needs: bool) -> None:
    assert task.needs_carry(terms) is needs


def test_mistakes_have_the_given_rate() -> None:
    rng = Random(0)
    problem = Problem(question="", terms=(50, 20), answer=70)
    wrong = sum("50-20" in solution(problem, rng, ErrorRates(operator=0.3)) for _ in range(4000))
    assert wrong / 4000 == pytest.approx(0.3, abs=0.03)


def test_splits_are_disjoint_and_have_columns(tmp_path: Path) -> None:
    files = task.write_splits(tmp_path, seed=3, train=300, validation=40, test=50)
    rows = {
        file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in files
    }
    assert {name: len(split) for name, split in rows.items()} == {
        "train": 300,
        "validation": 40,
        "test": 50,
    }
    questions = [row["question"] for split in rows.values() for row in split]
    assert len(set(questions)) == len(questions)
    assert all(set(row) == {"question", "answer"} for split in rows.values() for row in split)
    problems = [
        problem
        for split in task.make_splits(3, train=300, validation=40, test=50).values()
        for problem in split
    ]
    assert len({problem.terms for problem in problems}) == len(problems)
    assert {problem.question for problem in problems} == set(questions)


def test_a_seed_means_the_same_bytes_on_every_machine(tmp_path: Path) -> None:
    task.write_splits(tmp_path, seed=0, train=20, validation=5, test=5)
    digest = hashlib.sha256((tmp_path / "train.jsonl").read_bytes()).hexdigest()
    assert digest == "9cfd33e160dd4893368ed0579bbd8cb4867ed5441ed1d4ef6b1c82c88c130721"


def test_demonstrations_are_correct_answers_to_training_problems(tmp_path: Path) -> None:
    file = task.write_demonstrations(tmp_path, seed=0, count=50)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    answers = {p.question: p.answer for p in task.make_splits(0)["train"]}
    for row in rows:
        assert row["completion"].endswith(f"<answer>{answers[row['question']]}</answer>")
    committed = (PROJECT / "launch/demo/data/demonstrations.jsonl").read_text().splitlines()
    assert committed[:50] == file.read_text().splitlines()


def test_the_command_writes_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert task.main(["--out", str(tmp_path / "new" / "folder"), "--seed", "7"]) == 0
    files = [Path(line) for line in capsys.readouterr().out.splitlines()]
    names = ["test.jsonl", "validation.jsonl", "train.jsonl", "demonstrations.jsonl"]
    assert [file.name for file in files] == names
    assert [len(file.read_text().splitlines()) for file in files] == [500, 500, 4000, 400]


def test_an_unwritable_folder_is_a_mistake_of_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        task.main(["--out", str(tmp_path / "file")])
    assert ended.value.code == 2
    assert "give a writable folder" in capsys.readouterr().err
