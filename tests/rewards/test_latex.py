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
    ("text", "answer", "right"),
    [
        (r"\frac{2}{4}", "0.5", 1),
        (r"$\frac{2}{4}$", "1/2", 1),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1),
        ("(x+1)^2", "x^2+2x+1", 1),
        ("x = 5", "5", 1),
        ("1,234", "1234", 1),
        (r"50\%", "0.5", 1),
        (r"\{2, 1\}", r"\{1, 2\}", 1),
        ("[1, 2)", "[1, 2)", 1),
        ("(1, 2)", "(1,2)", 1),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
        ("1 < x < 2", "1<x<2", 1),
        ("the answer is $5$", "5", 1),
        # Different, or not parsed.
        *((text, "5", 0) for text in ("6", "", "hello")),
        (r"\frac{1", "1", 0),
        ("(1, 2]", "[1, 2)", 0),
        ("x", "y", 0),
        # Numbers and their units.
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
        # Thousands and roots.
        *(("12000x", answer, 1) for answer in ("12{,}000x", r"12,\!000x", "12,000x", r"12\,000x")),
        *(("12x", answer, 0) for answer in ("12{,}000x", r"12,\!000x", "12,000x", r"12\,000x")),
        ("12,000x", "12000x", 1),
        (r"1000\pi", r"1,000\pi", 1),
        (r"1,000\pi", r"1000\pi", 1),
        ("1", r"1,000\pi", 0),
        (r"10000\sqrt{2}", r"10,000\sqrt{2}", 1),
        (r"\frac{1000}{x}", r"\frac{1,000}{x}", 1),
        (r"\sqrt{1200}", r"\sqrt{1,200}", 1),
        (r"\(1200x\)", r"\[1,200x\]", 1),
        ("1234567x", "1,234,567x", 1),
        ("x = 12000", "x = 12,000", 1),
        ("12000", "x = 12,000", 1),
        ("12", "x = 12,000", 0),
        ("12000", r"12,\!000", 1),
        (r"12,\!000", "12000", 1),
        ("(1, 200)", "(1,200)", 1),
        ("(1200, 5)", "(1{,}200, 5)", 1),
        (r"\{1, 200\}", r"\{1,200\}", 1),
        ("[1, 200)", "[1,200)", 1),
        (r"x \in (1, 200)", r"x \in \left(1,200\right)", 1),
        ("1200", "(1,200)", 0),
        (r"(\sqrt{1}, 200)", r"(\sqrt{1},200)", 1),
        (r"\sqrt{2}", "√2", 1),
        ("√2", r"\sqrt{2}", 1),
        ("2√3", r"\sqrt{12}", 1),
        ("√(x+1)", r"\sqrt{x+1}", 1),
        ("√49", "7", 1),
        ("2", "√2", 0),
        (r"\frac{7}{3} + x", r"2\frac{1}{3} + x", 1),
        (r"\frac{7}{3}", r"x = 2\frac13", 1),
        (r"\{2, 3\}", r"2\text{ or }3", 1),
        # Words.
        (r"\pi\text{ cm}", r"\pi \text{ cm}", 1),
        (r"\pi\text{ centimeters}", r"\pi \text{ cm}", 1),
        (r"\pi\mathrm{cm}", r"\pi \text{ cm}", 1),
        (r"\pi", r"\pi \text{ cm}", 1),
        (r"\pi\text{ cm}", r"\pi", 1),
        (r"\pi\text{ miles}", r"\pi \text{ cm}", 0),
        (r"\pi\text{ cm}^2", r"\pi \text{ cm}", 0),
        (r"\pi\text{ square cm}", r"\pi \text{ cm}^2", 1),
        (r"\sqrt{2}\text{ miles}", r"\sqrt{2}\text{ km}", 0),
        (r"\sqrt{2}\text{ km}", r"\sqrt{2}\text{ km}", 1),
        (r"\pi\text{ million}", r"\pi", 0),
        (r"\pi\text{ is wrong}", r"\pi", 0),
        (r"\pi\text{ or }4", r"\pi", 0),
        (r"\text{Monday}", r"\text{monday}", 1),
        (r"\mathrm{e}^{2}", r"\mathrm{e}^2", 1),
        (r"3 \text{ or } 2", r"2 \text{ or } 3", 1),
    ],
)
def test_equal_and_different_mathematics(text: str, answer: str, right: int) -> None:
    assert score(text, answer) == right


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (r"2\frac{1}{3}\pi", "has a mixed number before a factor"),
        (r"2\frac13\sqrt{2}", "has a mixed number before a factor"),
        (r"$3 \dfrac{1}{2} x$", "has a mixed number before a factor"),
        (r"0.\overline{3}", "has repeating decimals"),
        (r"0.1\overline{6}", "has repeating decimals"),
        ("0.(3)", "has repeating decimals"),
        ("4210_5", "has digits with an index"),
        (r"1011_{2}", "has digits with an index"),
        (r"2 \text{ hours } 30 \text{ minutes}", "has a number after words"),
    ],
)
def test_references_that_would_be_read_as_something_else_are_refused(answer: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        score("5", answer)


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
