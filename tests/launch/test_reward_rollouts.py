"""`launch.reward --rollouts`: recorded rollouts are scored again and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.reward import main
from tests.launch.small_run import write_rows

PLANTED = Path(__file__).with_name("planted_rewards.py")
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


def test_steps_are_chosen_and_errors_fail(run: Path):
    failing = CLOSENESS.replace(" }", ", args = { scale = 0.0 } }")
    figures = rescored(run, failing, "--steps=2:", status=1)
    assert figures["steps"] == [2]
    (error,) = figures["errors"]
    assert (error["part"], error["cause"], error["count"]) == ("close", "raised", 3)
    assert "ZeroDivisionError" in error["first"]
    assert "planted_rewards.py:" in error["first"]
