"""`launch.reward`: each planted mistake is named, with real reward processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import data, train
from launch.reward import main
from tests.launch.small_run import CONFIG, everything_below, rows, write_rows

PROJECT = Path(__file__).parents[2]
PLANTED = Path(__file__).with_name("planted_rewards.py")

Figures = dict[str, Any]
Check = Callable[..., Figures]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration with data and without a model, in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GEMMA_GRPO_HOME", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    write_rows(tmp_path / "train.jsonl", rows(10, 12))
    write_rows(tmp_path / "test.jsonl", rows(100, 4))
    path = tmp_path / "small.toml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


def functions(*parts: str) -> str:
    """The setting of reward functions: names in planted_rewards.py, or TOML tables."""
    tables = [
        part
        if part.startswith("{")
        else f'{{ name = "{part}", function = "{PLANTED}:{part.partition(".")[0]}" }}'
        for part in parts
    ]
    return f"--rewards.functions=[{', '.join(tables)}]"


@pytest.fixture
def check(config: Path) -> Check:
    """Runs the check; returns its figures, after comparing the exit status."""

    def run(*arguments: str, status: int) -> Figures:
        file = config.parent / "figures.json"
        assert main([str(config), *arguments, "--json", str(file)]) == status
        figures: Figures = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
        return figures

    return run


def kinds(figures: Figures) -> set[str]:
    return {finding["kind"] for finding in figures["findings"]}


def finding(figures: Figures, kind: str) -> Figures:
    (found,) = [one for one in figures["findings"] if one["kind"] == kind]
    return found


def examples(figures: Figures, kind: str) -> set[str]:
    """The names of the completions that show a finding."""
    return {text.split("'")[1] for text in finding(figures, kind)["examples"]}


def test_hacks_are_named(check: Check):
    figures = check(functions("any_number"), status=1)
    assert examples(figures, "hack") >= {"list of answers", "wrong, right, wrong"}
    assert finding(figures, "hack")["fails"]
    figures = check(functions("length_credit"), status=1)
    assert "random words" in examples(figures, "noise")
    assert finding(figures, "noise")["fails"]


PLAIN = """
from rewards.answers import find_answer, same_answer

def library(completion, *, answer, tags):
    return float(same_answer(find_answer(completion, tags=tags) or "", answer))
def contains(completion, *, answer):
    return float(answer in completion)
def empty(completion, *, answer):
    return float(completion in {answer, ""})
def bare(completion, *, answer):
    return float(completion.split("\\n")[0] == answer)
"""


@pytest.mark.parametrize(
    ("reward", "wrong"),
    [
        ("library", set()),
        ("contains", {"wrong_answer", "hack"}),
        ("empty", {"noise"}),
        ("bare", set()),
    ],
)
def test_rewards_of_a_task_without_tags(config: Path, check: Check, reward: str, wrong: set[str]):
    (config.parent / "plain.py").write_text(PLAIN, encoding="utf-8")
    part = f'{{ name = "r", function = "{config.parent}/plain.py:{reward}" }}'
    plain = ("--prompt.answer=first_line", "--prompt.turn=plain")
    figures = check(functions(part), *plain, status=1 if wrong else 0)
    assert {one["kind"] for one in figures["findings"] if one["fails"]} == wrong
    if reward == "bare":
        told = finding(figures, "leading_space")["what"]
        assert told.endswith("12 of 12 rows: 1 without, 0 with it")
    else:
        assert wrong or figures["findings"] == []


def test_the_form_of_a_right_completion_can_be_given(check: Check):
    boxed = functions("boxed")
    assert kinds(check(boxed, status=1)) == {"constant", "constant_part"}
    form = r"--form=REASONING So it is \boxed{ANSWER}."
    assert check(boxed, form, status=0)["findings"] == []


def test_errors_and_parts_without_information(check: Check, capsys: pytest.CaptureFixture[str]):
    parts = ("fails_on_empty", "never", "always_one", "style", "named")
    figures = check(functions(*parts), "--log", "log.txt", status=1)
    lines = PLANTED.read_text(encoding="utf-8").splitlines()
    line = lines.index("    return float(ord(completion[0]))") + 1
    assert finding(figures, "errors")["what"] == (
        "'fails_on_empty': 12 of 284 completions have no score (raised), first 'no text': raised "
        f"IndexError: string index out of range (planted_rewards.py:{line})"
    )
    assert "Traceback" in Path("log.txt").read_text(encoding="utf-8")
    assert "'never' is None" in finding(figures, "always_none")["what"]
    assert "'always_one' has the same value" in finding(figures, "constant_part")["what"]
    empty = next(probe for probe in figures["probes"] if probe["name"] == "no text")
    assert empty["columns"]["fails_on_empty"] == {
        "mean": None, "min": None, "max": None, "errors": 12,
    }  # fmt: skip
    assert empty["columns"]["named/dots"]["mean"] == 0.0
    assert empty["columns"]["weighted sum"]["mean"] is None
    assert "  - 12 errors  " in capsys.readouterr().out


def test_cases_are_compared(config: Path, check: Check, capsys: pytest.CaptureFixture[str]):
    def case(name: str, completion: str, expect: object, **more: object) -> dict[str, object]:
        return {"name": name, "completion": completion, "expect": expect, **more}

    lines = [
        case("right", "<answer>12</answer>", 1, row=3),
        case("own", "<answer>5</answer>", {"closeness": 1}, row={"question": "?", "answer": "5"}),
        case("near", "<answer>11</answer>", {"above": "far"}),
        case("far", "<answer>90</answer>", 0.25),
    ]
    write_rows(config.parent / "cases.jsonl", lines)
    figures = check(functions("closeness"), "--cases=cases.jsonl", status=1)
    # The first row has the answer 10: 1 / (1 + 80 / 10).
    assert finding(figures, "case")["what"] == (
        "case 'far': the weighted sum is 0.111111, expected 0.25"
    )
    wrong = [
        *("[]", case("row", "", 1, row=99), case("part", "", {"closenes": 1})),
        case("key", "", 1, xyz=1),
    ]
    write_rows(config.parent / "cases.jsonl", [*lines, *wrong])
    capsys.readouterr()
    assert main([str(config), functions("closeness"), "--cases=cases.jsonl"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "cases.jsonl:5: Input should be an object",
        "cases.jsonl:6: row: there is no row 99 in the training data; nearest: 12",
        "cases.jsonl:7: expect: no part is named 'closenes'; nearest: 'closeness'",
        "cases.jsonl:8: xyz: Extra inputs are not permitted",
    ]


def test_data_without_reference_answers(
    config: Path, check: Check, capsys: pytest.CaptureFixture[str]
):
    for name in ("train", "test"):
        write_rows(config.parent / f"{name}.jsonl", [{"question": f"{name} {n}"} for n in range(3)])
    figures = check(functions("style"), status=0)
    assert (figures["has_references"], figures["findings"]) == (False, [])
    assert "the rows have no reference answers: what compares" in capsys.readouterr().out
    assert main([str(config)]) == 2
    assert "'correct' needs reference answers: data.train" in capsys.readouterr().err


def test_mistakes_are_lines_with_status_2(config: Path, capsys: pytest.CaptureFixture[str]):
    def refused(*arguments: str) -> list[str]:
        assert main([str(config), *arguments]) == 2
        return capsys.readouterr().err.splitlines()

    assert refused("--form=<answer>") == [
        "command line: --form '<answer>': must contain the word ANSWER"
    ]
    assert refused("--rows=0", "--steps=1:2") == [
        "command line: --steps: needs --rollouts; add it, or remove this flag",
        "command line: --rows 0: must be at least 1; nearest valid: 1",
    ]
    typos = refused(functions("closenes", "styl"))
    assert [line.partition("; ")[0] for line in typos] == [
        f"rewards.functions: {PLANTED}:closenes: {PLANTED} has no 'closenes'",
        f"rewards.functions: {PLANTED}:styl: {PLANTED} has no 'styl'",
    ]
    (line,) = refused(functions(f'{{ name = "n", function = "{PLANTED}:waits" }}'))
    assert line.startswith("rewards.functions: 'n' needs 'fifo': data.train has no such column")
    assert refused("--cases=none.jsonl") == ["command line: --cases: no file none.jsonl"]


def test_a_check_loads_neither_jax_nor_ray_and_writes_nothing(config: Path):
    before = everything_below(config.parent)
    code = f"""
import sys
from launch.reward import main
status = main(['{config}', '--rows=2'])
print(status, [name for name in ('jax', 'ray', 'flax', 'wandb') if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
    assert everything_below(config.parent) == before


def test_a_dry_run_warns_of_what_fails(request_path: Path, capsys: pytest.CaptureFixture[str]):
    before = everything_below(request_path.parent)
    assert train.main([str(request_path), "--dry-run"]) == 0
    shown = capsys.readouterr()
    note, tried, result = shown.err.splitlines()
    assert note.startswith("note: answers are the last answer block, but no training prompt")
    assert tried.startswith("rewards, tried on 1")
    assert result == "nothing is wrong"
    parts = functions("any_number", "fails_on_empty", "short_is_good")
    assert train.main([str(request_path), parts, "--dry-run"]) == 0
    shown = capsys.readouterr()
    warnings = [line for line in shown.err.splitlines() if line.startswith("warning")]
    assert warnings[0].startswith("warning: 'fails_on_empty': 6 of 1")
    assert "warning: known reward hacks have at least the reward of the reference" in warnings
    assert not any("no text has a higher reward" in line for line in warnings)
    assert everything_below(request_path.parent) == before


def test_solutions_as_reference_answers_are_noticed_by_all_commands(
    request_path: Path, capsys: pytest.CaptureFixture[str]
):
    lines = [
        {"question": f"tom has {n} apples.", "answer": f"{n}=<<{n}={n}>>{n}\n#### {n}"}
        for n in range(10, 20)
    ]
    write_rows(request_path.parent / "train.jsonl", lines)
    write_rows(request_path.parent / "test.jsonl", [{"question": "5?", "answer": "#### 5"}])
    for command, words, noticed in (
        (data.main, [], True),
        (data.main, ["--data.answer_pattern=#### (.+)"], False),
        (main, [], True),
        (train.main, ["--dry-run"], True),
    ):
        assert command([str(request_path), *words]) == 0
        shown = capsys.readouterr()
        assert ("set answer_pattern = '#### (.+)'" in shown.out + shown.err) is noticed
