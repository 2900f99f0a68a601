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


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("12000", "12 000", 1),
        ("0", "12 000", 0),
        ("12{,}000", "12,000", 1),
        (r"12\,000", "12000", 1),
        ("1.5", "1 1/2", 1),
        (r"\frac{3}{2}", "1½", 1),
        ("1", "1 1/2", 0),
        ("1000", "1e3", 1),
        ("0.0015", "1.5e-3", 1),
        (r"\sqrt{4}", "2e0", 1),
        ("0.333333", "1/3", 1),
        ("0.5", "50%", 1),
        ("50", "50%", 1),
        (r"50\%", "50", 1),
        ("5000%", "50%", 0),
        ("3", "3 km", 1),
        ("5 km", "5 miles", 0),
        (r"5\text{ km}", "5 kilometers", 1),
        ("x = 5 miles", "5 km", 0),
        ("€5", "$5", 0),
        ("7k", "7000", 0),
        ("7k", "7k", 1),
        ("(7)", "7", 1),
        ("(7)", "-7", 0),
        ("7²", "49", 1),
        ("7²", "7", 0),
        ("7 or eight", "7", 0),
        ("7 is wrong", "7", 0),
        (r"7 \text{ is wrong}", "7", 0),
        (r"7 \text{ or } 8", "7", 0),
        ("$7$ or eight", "7", 0),
        (r"$\sqrt{49}$ miles", "7 km", 0),
        (r"the answer is $\sqrt{49}$", "7", 1),
        (r"x = \sqrt{49}", "7", 1),
        (r"7\cdot 10", "7", 0),
        (r"7\text{k}", "7", 0),
        ("7!", "7", 0),
        ("8 = 7", "7", 0),
        (r"\not 7", "7", 0),
        (r"\operatorname{lcm}(2, 3)", r"\operatorname{lcm}(2, 3)", 1),
    ],
)
def test_numbers_and_their_units(text: str, answer: str, right: int) -> None:
    assert score(text, answer) == right


@pytest.mark.parametrize("answer", ["seven", "12 000 x", "x + 1 1/2", "1e3 x", "1.2.3", "5 or six"])
def test_references_that_would_be_read_as_products_are_refused(answer: str) -> None:
    with pytest.raises(ValueError, match="is neither a number nor LaTeX"):
        score("5", answer)


def test_hack_words_around_an_expression_are_not_read() -> None:
    assert [score("not $x$", "x"), score("not $5$", "5")] == [1, 0]


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
