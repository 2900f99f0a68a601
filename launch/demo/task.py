"""The demo's task: integer arithmetic in words, checked by its answer, from a seeded generator.

Also writes solutions with a given rate of mistakes, on which the tiny model is pretrained. Knows
nothing about models, tokenizers or prompts; needs only the standard library.

    python -m launch.demo.task --out DIR [--seed 0]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random

LARGEST = 99
EASY_DROPPED = 0.6
"""Share of the problems without any carry that is rejected; otherwise they are over half."""

PEOPLE = {"tom": "he", "ben": "he", "max": "he", "ann": "she", "sue": "she", "eva": "she"}
THINGS = ("apples", "books", "cards", "coins", "cups", "eggs", "nuts", "pens")
GAINS = ("buys {} more", "finds {} more", "gets {} more", "makes {} more", "wins {} more")
LOSSES = ("drops {}", "gives {} away", "loses {}", "sells {}", "uses {}")
OPENINGS = ("{name} has {n} {things}", "{name} starts with {n} {things}")
QUESTIONS = ("how many {things} does {name} have now?", "how many {things} are left?")

Terms = tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """A question and its solution.

    Attributes:
        question: in words.
        terms: the first number and the signed changes to it, in order.
        answer: their sum; it and every partial sum lie in 0..99.
    """

    question: str
    terms: Terms
    answer: int


@dataclass(frozen=True)
class ErrorRates:
    """Probability of a mistake in a step of a solution, by kind; zero: always correct.

    Attributes:
        carry: the carry or borrow is forgotten, in steps that have one.
        operator: addition and subtraction are swapped.
    """

    carry: float = 0.0
    operator: float = 0.0


CORRECT = ErrorRates()


def make_problem(rng: Random) -> Problem:
    """Generates a problem of two or three changes; two thirds need a carry or a borrow."""
    terms = _make_terms(rng, changes=rng.randint(2, 3))
    while not needs_carry(terms) and rng.random() < EASY_DROPPED:
        terms = _make_terms(rng, changes=rng.randint(2, 3))
    return Problem(question=_make_question(rng, terms=terms), terms=terms, answer=sum(terms))


def make_problems(rng: Random, *, count: int, taken: set[Terms]) -> list[Problem]:
    """Generates `count` problems whose terms are not in `taken`, and adds their terms to it."""
    problems: list[Problem] = []
    while len(problems) < count:
        problem = make_problem(rng)
        if problem.terms not in taken:
            taken.add(problem.terms)
            problems.append(problem)
    return problems


def solution(problem: Problem, rng: Random, rates: ErrorRates = CORRECT) -> str:
    """Writes a solution: `<reasoning>14+27=41 41-8=33</reasoning><answer>33</answer>`.

    After a mistake the solution continues with the wrong number. Results outside of 0..99 are
    replaced by their absolute value modulo 100, so every result has at most two digits and each
    step has the given probability of a mistake.
    """
    total, steps = problem.terms[0], []
    for term in problem.terms[1:]:
        written, result = _attempt(total, term, rng, rates)
        steps.append(f"{total}{written:+d}={result}")
        total = result
    return f"<reasoning>{' '.join(steps)}</reasoning><answer>{total}</answer>"


def make_splits(seed: int) -> dict[str, list[Problem]]:
    """Generates the splits; no two problems in them have equal terms or questions."""
    rng, taken = Random(seed), set[Terms]()
    sizes = {"test": 500, "validation": 500, "train": 4000}
    return {name: make_problems(rng, count=size, taken=taken) for name, size in sizes.items()}


def write_splits(folder: Path, *, seed: int) -> list[Path]:
    """Writes `train.jsonl`, `validation.jsonl` and `test.jsonl`: the same bytes for the same seed.

    Each line has a `question` and an `answer`, both strings. Returns the files.
    """
    return [
        _write(
            folder / f"{name}.jsonl",
            [{"question": p.question, "answer": str(p.answer)} for p in problems],
        )
        for name, problems in make_splits(seed).items()
    ]


def write_demonstrations(folder: Path, *, seed: int) -> Path:
    """Writes `demonstrations.jsonl` for the SFT phase: training problems with correct solutions.

    Each line has a `question` and a `completion`, both strings. Returns the file.
    """
    problems, rng = make_splits(seed)["train"][:400], Random(seed)
    rows = [{"question": p.question, "completion": solution(p, rng)} for p in problems]
    return _write(folder / "demonstrations.jsonl", rows)


def _write(file: Path, rows: Sequence[dict[str, str]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def needs_carry(terms: Terms) -> bool:
    """Whether any step has a carry or a borrow."""
    totals = accumulate(terms[:-1])
    steps = zip(totals, terms[1:], strict=True)
    return any(_without_carry(total, change) != total + change for total, change in steps)


def _make_terms(rng: Random, *, changes: int) -> Terms:
    total = rng.randint(2, LARGEST)
    terms = [total]
    for _ in range(changes):
        gains = total < LARGEST and (total == 0 or rng.random() < 0.5)
        change = rng.randint(1, LARGEST - total) if gains else -rng.randint(1, total)
        terms.append(change)
        total += change
    return tuple(terms)


def _make_question(rng: Random, *, terms: Terms) -> str:
    name, things = rng.choice(list(PEOPLE)), rng.choice(THINGS)
    opening, question = rng.choice(OPENINGS), rng.choice(QUESTIONS)
    changes = [rng.choice(GAINS if t > 0 else LOSSES).format(abs(t)) for t in terms[1:]]
    sentences = [
        opening.format(name=name, n=terms[0], things=things),
        f"{PEOPLE[name]} {changes[0]} and {changes[1]}",
        *(f"then {PEOPLE[name]} {change}" for change in changes[2:]),
        question.format(name=name, things=things),
    ]
    return ". ".join(sentences)


def _attempt(total: int, term: int, rng: Random, rates: ErrorRates) -> tuple[int, int]:
    """Solves one step, possibly with mistakes; returns the change as written and the result."""
    # Both random numbers are always generated: mistakes do not change the random stream.
    wrong_operator = rng.random() < rates.operator
    wrong_carry = rng.random() < rates.carry
    written = -term if wrong_operator else term
    result = _without_carry(total, written) if wrong_carry else total + written
    return written, abs(result) % (LARGEST + 1)


def _without_carry(total: int, change: int) -> int:
    """Returns the sum of two numbers without carry or borrow."""
    sign = 1 if change > 0 else -1
    tens, units = divmod(abs(change), 10)
    return 10 * (total // 10 + sign * tens) + (total % 10 + sign * units) % 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the demo's dataset."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.demo.task",
        description="Write the demo's data as JSONL: train, validation, test and demonstrations.",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write to")
    parser.add_argument("--seed", default=0, type=int, help="same seed, same bytes (default 0)")
    options = parser.parse_args(arguments)
    try:
        files = write_splits(options.out, seed=options.seed)
        files.append(write_demonstrations(options.out, seed=options.seed))
    except OSError as error:
        parser.error(f"--out {options.out} cannot be written: {error.strerror}")
    print("\n".join(map(str, files)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
