"""The task of `make gemma`: who stands after somebody in a queue, from a seeded generator.

    Queue: Emma, Paul, Ruth, Jack.
    Who stands after Paul? Ruth

The splits share no name: who is asked about in the test occurs nowhere in training.

    python -m launch.demo.queues --out DIR [--seed 0]      # writes the splits
    python -m launch.demo.queues --answers RUN_DIR         # kinds of answers, before and after
    python -m launch.demo.queues --template 8              # a template with eight solved examples
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from launch.exits import Failure, exit_status

PEOPLE = 4
"""People in a queue."""
# Each is one token of Gemma's vocabulary.
NAMES = {
    "train": "Adam Alice Amy Andrew Angela Arthur Ben Bill Brian Bruce Carl Chris Clara Daniel "
    "David Donald Dylan Edward Emily Eric Ethan Frank Gary George Grace Harry Helen Isaac James "
    "Jane Jason Jerry John Julia Karen Keith Laura Leo Linda Lucy",
    "validation": "Anna Beth Craig Diana Ellen Fred Henry Jack Joan Lewis",
    "test": "Carol Eva Greg Howard Jean Jim Kate Kevin Lisa Mark Maria Martin Nancy Oliver Oscar "
    "Peter Ruth Simon Susan Walter",
}
"""Who stands in the queues of each split."""
SIZES = {"train": 2000, "validation": 100, "test": 300}


def make_rows(split: str, *, count: int, seed: int) -> list[dict[str, str]]:
    """Generates `count` different questions of a split: `queue`, `name`, and `answer`."""
    rng, rows = Random(seed), dict[tuple[str, str], dict[str, str]]()
    while len(rows) < count:
        people = rng.sample(NAMES[split].split(), PEOPLE)
        place = rng.randrange(PEOPLE - 1)
        queue, name = ", ".join(people), people[place]
        rows[queue, name] = {"queue": queue, "name": name, "answer": people[place + 1]}
    return list(rows.values())


def template(examples: int) -> str:
    """The prompt with solved examples, as `prompt.template`; their names are training's."""
    solved = [
        f"Queue: {row['queue']}.\nWho stands after {row['name']}? {row['answer']}\n\n"
        for row in make_rows("train", count=examples, seed=77)
    ]
    return "".join(solved) + "Queue: {queue}.\nWho stands after {name}?"


def write_splits(folder: Path, *, seed: int) -> list[Path]:
    """Writes `train.jsonl`, `validation.jsonl` and `test.jsonl`: the same bytes for a seed."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, (split, count) in enumerate(SIZES.items()):
        rows = make_rows(split, count=count, seed=10 * seed + number)
        files.append(folder / f"{split}.jsonl")
        text = "".join(json.dumps(row) + "\n" for row in rows)
        files[-1].write_text(text, encoding="utf-8")
    return files


def kind_of(answer: str, row: Mapping[str, str]) -> str:
    """What an answer is: "right", "another of the queue", "another name" or "no name"."""
    if answer == row["answer"]:
        return "right"
    if answer in row["queue"].split(", "):
        return "another of the queue"
    return "another name" if answer in " ".join(NAMES.values()).split() else "no name"


def kinds_of_answers(run: Path) -> dict[str, Counter[str]]:
    """Counts the kinds of the test's answers of a run on this task, before and after training."""
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    rows = _read(Path(config["data"]["test"]["path"]))
    return {
        when: Counter(
            kind_of(one["found"] or "", rows[one["prompt_id"] - 1])
            for one in _read(run / "rollouts" / f"test_{when}.jsonl")
        )
        for when in ("before", "after")
    }


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the splits or the template, or counts answers."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.demo.queues",
        description="Who stands after somebody in a queue: the task of `make gemma`.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="DIR", help="write the splits to this folder")
    what.add_argument("--answers", type=Path, metavar="RUN_DIR", help="kinds of a run's answers")
    what.add_argument("--template", type=int, metavar="N", help="template with N solved examples")
    parser.add_argument("--seed", default=0, type=int, help="of the splits (default 0)")
    return exit_status(lambda: _run(parser.parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    if options.template is not None:
        print(template(options.template))
    elif options.out is not None:
        try:
            print("\n".join(map(str, write_splits(options.out, seed=options.seed))))
        except OSError as error:
            raise Failure(f"--out {options.out} cannot be written: {error.strerror}") from error
    else:
        for when, kinds in kinds_of_answers(options.answers).items():
            total = kinds.total()
            shares = (f"{kind} {count / total:.1%}" for kind, count in kinds.most_common())
            print(f"{when}: {', '.join(shares)} of {total}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
