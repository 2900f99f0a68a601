"""Reward functions by name, and messages for unknown names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rewards.correctness import exact_answer
from rewards.resolve import resolve


def test_a_function_is_found():
    assert resolve("rewards.correctness:exact_answer") is exact_answer


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    (tmp_path / "wrong_rewards.py").write_text("def one(:\n")
    (tmp_path / "needy_rewards.py").write_text("import no_such_package.inner\n")
    (tmp_path / "leaving_rewards.py").write_text("import sys; sys.exit(0)\n")
    (tmp_path / "my_rewards.py").write_text("LIMIT = 3\ndef length(inputs): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "rewards.corectness:exact_answer",
            (
                "'rewards.corectness:exact_answer': no module 'rewards.corectness'; nearest in "
                "rewards: 'correctness'"
            ),
        ),
        (
            "rewards.correctness:exact_anwser",
            (
                "'rewards.correctness:exact_anwser': rewards.correctness has no 'exact_anwser'; "
                "nearest in rewards.correctness: 'exact_answer'"
            ),
        ),
        (
            "rewardz.correctness:exact_answer",
            (
                "'rewardz.correctness:exact_answer': no module 'rewardz'; nearest in Python's "
                "path: 'rewards'"
            ),
        ),
        (
            "rewards.correctness.exact:answer",
            "'rewards.correctness.exact:answer': no module 'rewards.correctness.exact'",
        ),
        ("rewards.correctness", "'rewards.correctness' is not of the form module:function"),
        (
            "broken_rewards:one",
            (
                "'broken_rewards:one': importing broken_rewards raises ZeroDivisionError: "
                "division by zero"
            ),
        ),
        (
            "leaving_rewards:one",
            "'leaving_rewards:one': importing leaving_rewards raises SystemExit: 0",
        ),
        ("wrong_rewards:one", "'wrong_rewards:one': importing wrong_rewards raises SyntaxError"),
        (
            "needy_rewards:one",
            "'needy_rewards:one': needy_rewards needs 'no_such_package': No module named",
        ),
        ("my_rewards:LIMIT", "'my_rewards:LIMIT' is of type int, not a function"),
        ("my_rewards:lenght", "my_rewards has no 'lenght'; nearest in my_rewards: 'length'"),
    ],
)
@pytest.mark.usefixtures("user_code")
def test_an_unusable_function_is_reported(function: str, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve(function)
