"""`launch.reward`: each planted mistake is named, with real reward processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import train
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


def finding(figures: Figures, kind: str) -> Figures:
    (found,) = [one for one in figures["findings"] if one["kind"] == kind]
    return found


FORM = r"--form=REASONING So it is \boxed{ANSWER}."
PLAIN = ("--prompt.answer=first_line", "--prompt.turn=plain")


@pytest.mark.parametrize(
    ("part", "arguments", "status", "found"),
    [
        ("any_number", (), 1, {"hack": ["'list of answers'", "'wrong, right, wrong'"]}),
        ("length_credit", (), 1, {"noise": ["'random words'"]}),
        ("boxed", (), 1, {"constant": [], "constant_part": []}),
        ("boxed", (FORM,), 0, {}),
        ("contains", PLAIN, 1, {"wrong_answer": [], "hack": []}),
        ("bare", PLAIN, 0, {"leading_space": []}),
    ],
)
def test_a_planted_mistake_is_named(
    check: Check, part: str, arguments: tuple[str, ...], status: int, found: dict[str, list[str]]
):
    figures = check(functions(part), *arguments, status=status)
    kinds = {one["kind"] for one in figures["findings"]}
    assert kinds >= found.keys() if found else not kinds
    for kind, names in found.items():
        examples = " ".join(finding(figures, kind)["examples"])
        assert [name for name in names if name not in examples] == []


def test_errors_and_parts_without_information(check: Check, capsys: pytest.CaptureFixture[str]):
    parts = ("fails_on_empty", "never", "always_one", "style", "named")
    figures = check(functions(*parts), "--log", "log.txt", status=1)
    told = finding(figures, "errors")["what"]
    assert told.startswith("'fails_on_empty': 12 of 284 completions have no score (raised), first ")
    assert "'no text': raised IndexError: string index out of range (planted_rewards.py:" in told
    assert "Traceback" in Path("log.txt").read_text(encoding="utf-8")
    assert "'never' is None" in finding(figures, "always_none")["what"]
    assert "'always_one' has the same value" in finding(figures, "constant_part")["what"]
    empty = next(probe for probe in figures["probes"] if probe["name"] == "no text")
    assert empty["columns"]["fails_on_empty"]["errors"] == 12
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
    chat = {"question": [{"role": "user", "content": "?"}], "answer": "5"}
    wrong = [
        *(*lines, "[]", case("row", "", 1, row=99), case("part", "", {"closenes": 1})),
        case("chat", "", 1, row=chat),
    ]
    write_rows(config.parent / "cases.jsonl", wrong)
    capsys.readouterr()
    assert main([str(config), functions("closeness"), "--cases=cases.jsonl"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "cases.jsonl:5: Input should be an object",
        "cases.jsonl:6: row: there is no row 99 in the training data; nearest: 12",
        "cases.jsonl:7: expect: no part is named 'closenes'; nearest: 'closeness'",
        (
            "cases.jsonl:8: row: column 'question' is a value of type list, not text; for chat "
            "messages give the number of a row in the training data"
        ),
    ]


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
    for parts, status, told in (
        (functions("closeness"), 0, "nothing is wrong"),
        (functions("any_number"), 0, "warning: known reward hacks have at least the reward of the"),
        (functions("misnamed"), 2, "the parameter of a function of one completion is named comple"),
    ):
        assert train.main([str(request_path), parts, "--dry-run"]) == status
        assert told in capsys.readouterr().err
    assert everything_below(request_path.parent) == before


# --- launch.reward --rollouts: recorded rollouts are scored again and compared


CLOSENESS = f'{{ name = "close", function = "{PLANTED}:closeness" }}'
NEGATED = CLOSENESS.replace(" }", ", weight = -1.0 }")


def record(step: int, sample: int, answer: int, reward: float | None) -> dict[str, Any]:
    """A recorded rollout whose reference answer is 7 in step 1 and 5 in step 2."""
    reference = {1: "7", 2: "5"}[step]
    return {
        "prompt_id": 30 + step,
        "sample": sample,
        "step": step - 1,
        "prompt": f"Which number is {reference}?",
        "answer": reference,
        "row": {"question": "?", "answer": reference},
        "text": f"<reasoning>hm</reasoning><answer>{answer}</answer>",
        "num_tokens": 7,
        "stop_reason": "eos",
        "rewards": {"correct": reward},
        "reward": reward,
    }


@pytest.fixture
def run(moved: Path) -> Path:
    """The folder of a run with rollouts of two steps."""
    first = [record(1, 0, 7, 1.0), record(1, 1, 8, 0.0), record(1, 2, 90, 0.0)]
    write_rows(moved / "rollouts/step_000001.jsonl", first)
    second = [record(2, 0, 3, 0.0), record(2, 1, 90, 0.0), record(2, 2, 3, None)]
    write_rows(moved / "rollouts/step_000002.jsonl", second)
    return moved


def rescored(run: Path, part: str, *arguments: str, status: int = 0) -> dict[str, Any]:
    command = ["small.toml", f"--rewards.functions=[{part}]", "--rollouts", str(run)]
    assert main([*command, *arguments, "--json", "figures.json"]) == status
    found: dict[str, Any] = json.loads(Path("figures.json").read_text(encoding="utf-8"))
    return found


def test_distributions_signal_and_ranks(run: Path):
    figures = rescored(run, CLOSENESS)
    assert (figures["rollouts"], figures["groups"], figures["steps"]) == (6, 2, [1, 2])
    # Distances 0, 1, 83 and 2, 85, 2; the reward is 10 / (10 + distance).
    values = [1.0, 10 / 11, 10 / 93, 10 / 12, 10 / 95, 10 / 12]
    after = figures["parts"]["close"]["after"]
    assert after["mean"] == pytest.approx(sum(values) / 6)
    assert (after["n"], after["highest"], after["q50"]) == (6, 1.0, pytest.approx(10 / 12))
    assert figures["parts"]["close"]["before"] == {"n": 0}
    before = figures["parts"]["correct"]["before"]
    assert (before["n"], before["mean"], before["std"]) == (5, 0.2, pytest.approx(0.4))
    assert (before["q95"], before["highest"]) == (pytest.approx(0.8), 1.0)
    assert list(figures["parts"]) == ["close", "correct", "weighted sum"]
    assert figures["groups_with_signal"] == {"before": 0.5, "after": 1.0}
    # Ranks 3, 1.5, 1.5 and 3, 2, 1.
    assert figures["rank_correlation"] == {"mean": pytest.approx(3**0.5 / 2), "groups": 1}


def test_best_worst_and_wrong_rollouts(run: Path, capsys: pytest.CaptureFixture[str]):
    figures = rescored(run, NEGATED)
    assert (figures["best"][0]["step"], figures["best"][0]["sample"]) == (2, 1)
    assert (figures["worst"][0]["step"], figures["worst"][0]["sample"]) == (1, 0)
    wrong = figures["wrong"]
    assert (wrong["count"], wrong["high"], wrong["median_of_right"]) == (5, 5, -1.0)
    assert wrong["samples"][0]["extracted"] == "90"
    assert len(wrong["samples"]) == len(figures["best"]) == 3
    shown = capsys.readouterr().out
    assert "lowest reward: step 1, prompt 31, sample 0: 1 before, -1 after (close 1)" in shown
    assert "  extracted answer '90', reference '5'\n" in shown
    assert "  prompt:\n    'Which number is 7?'\n" in shown
    rescored(run, NEGATED, "--steps=2:")
    assert "\n3 rollouts have a wrong answer, none has a right one\n" in capsys.readouterr().out


def test_steps_are_chosen_and_errors_fail(run: Path):
    failing = CLOSENESS.replace(" }", ", args = { scale = 0.0 } }")
    figures = rescored(run, failing, "--steps=2:", status=1)
    assert figures["steps"] == [2]
    (error,) = figures["errors"]
    assert (error["part"], error["cause"], error["count"]) == ("close", "raised", 3)
    assert "ZeroDivisionError" in error["first"]
    assert "planted_rewards.py:" in error["first"]
