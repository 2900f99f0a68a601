"""Mathematics in LaTeX through math-verify, and the hacks that `latex_answer` lists."""

from __future__ import annotations

import sys
import threading
from importlib import import_module

import pytest

from configs.schema import Prompt
from rewards.base import Tags
from rewards.latex import latex_answer

TAGS = Tags.of(Prompt())


def score(text: str, answer: str) -> float:
    return latex_answer(f"<answer>{text}</answer>", answer=answer, tags=TAGS)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\frac{2}{4}", "0.5"),
        (r"$\frac{2}{4}$", "1/2"),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}"),
        ("(x+1)^2", "x^2+2x+1"),
        ("x = 5", "5"),
        ("1,234", "1234"),
        (r"50\%", "0.5"),
        (r"\{2, 1\}", r"\{1, 2\}"),
        ("[1, 2)", "[1, 2)"),
        ("(1, 2)", "(1,2)"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        ("1 < x < 2", "1<x<2"),
        ("the answer is $5$", "5"),
    ],
)
def test_equal_mathematics(text: str, answer: str) -> None:
    assert score(text, answer) == 1


@pytest.mark.parametrize(
    ("text", "answer"),
    [("6", "5"), ("", "5"), ("hello", "5"), (r"\frac{1", "1"), ("(1, 2]", "[1, 2)"), ("x", "y")],
)
def test_different_mathematics_and_what_cannot_be_parsed(text: str, answer: str) -> None:
    assert score(text, answer) == 0


def test_other_threads_may_score() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(score("1/2", "0.5")))
    thread.start()
    thread.join()
    assert found == [1]


def test_hack_the_expression_of_the_question_equals_its_value() -> None:
    assert score("2+3", "5") == 1


@pytest.mark.parametrize("text", ["$4$ or $5$", "4, 5", r"\boxed{4}\boxed{5}", r"\{4, 5\}"])
def test_hack_several_answers_equal_none(text: str) -> None:
    assert [score(text, "4"), score(text, "5")] == [0, 0]


def test_an_error_is_not_a_zero() -> None:
    with pytest.raises(ValueError, match="the reference answer '' cannot be parsed"):
        score("5", "")


def test_the_message_without_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rewards.latex")
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ModuleNotFoundError, match="make install-rewards") as missing:
        import_module("rewards.latex")
    assert missing.value.name == "math_verify"
