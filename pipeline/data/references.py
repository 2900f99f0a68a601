"""Reference answers that no right answer of a model equals, and what to do about them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from configs.schema import Config
from pipeline.data.load import setting_name
from pipeline.data.splits import LoadedData
from pipeline.data.text.chat import template_columns

_SHOWN = 60
_SOLUTIONS = (
    (r"(?:^|\n)\s*#### *\S[^\n]*$", ("#### (.+)", r"####\s*(.+)")),
    (r"(?<=[^\s$])[\s$]*\\boxed\{.+\}", (r"\\boxed\{(.+)\}",)),
    (r"[Tt]he (?:final )?answer is:? \S[^\n]*$", ("answer is:? (.+)",)),
)
"""How a text ends that ends in its answer, and patterns that find the answer, strict ones first."""
_EXPONENT = re.compile(r"[+-]?\d+(?:\.\d+)?[eE][+-]?\d+")
_DECIMALS = re.compile(r"[+-]?(\d+\.\d{7,}[1-9])0*(?:[eE][+-]?\d+)?")
_MOST_DIGITS = 6
_READ_NUMBERS = {"rewards.numeric:numeric_answer", "rewards.latex:latex_answer"}


@dataclass(frozen=True)
class Notice:
    """Something about the reference answers of a split.

    Attributes:
        what: what was found, with the setting and an example.
        advice: what to do.
    """

    what: str
    advice: str


def reference_notices(config: Config, data: LoadedData) -> Iterator[Notice]:
    """A notice for each split and kind of such references, and for answers in prompts.

    Args:
        config: of the run.
        data: its data, with the references that rewards and evaluations compare with.
    """
    column = config.data.answer_column
    if column in template_columns(config.prompt.template):
        what = f"prompt.template shows the model the reference answer, {{{column}}}"
        yield Notice(what, f"remove it; for braces in the text write {{{{{column}}}}}")
    kinds = [(_is_rounded, Notice("have rounding errors of binary numbers", "round them"))]
    if not any(part.function in _READ_NUMBERS for part in config.rewards.functions):
        what = "have an exponent, which exact_answer compares as text"
        advice = "write them in digits, or use rewards.numeric:numeric_answer"
        kinds.append((_is_exponential, Notice(what, advice)))
    for name, split in data.splits():
        answers = [prompt.answer for prompt in split.prompts if prompt.answer is not None]
        for ends, patterns in _SOLUTIONS:
            compiled = re.compile(ends, re.DOTALL)
            found = [answer for answer in answers if compiled.search(answer.strip())]
            if found:
                what = "are solutions that end in the answer, which the answer alone does not equal"
                yield _notice(name, found, answers, Notice(what, _advice(patterns, found, answers)))
        for is_one, notice in kinds:
            found = [answer for answer in answers if is_one(answer)]
            if found:
                yield _notice(name, found, answers, notice)


def _notice(name: str, found: Sequence[str], answers: Sequence[str], notice: Notice) -> Notice:
    """The notice with the setting, a count and an example."""
    count = f"{len(found)} of {len(answers)} reference answers"
    what = f"{setting_name(name)}: {count} {notice.what}, as {_short(found[0])}"
    return Notice(what, notice.advice)


def _advice(patterns: Sequence[str], found: Sequence[str], answers: Sequence[str]) -> str:
    """The first pattern that finds most answers of the solutions, and how many rows it refuses."""

    def count(pattern: str, texts: Sequence[str]) -> int:
        return sum(re.search(pattern, text) is not None for text in texts)

    pattern = max(patterns, key=lambda one: count(one, found))
    others = len(answers) - count(pattern, answers)
    refuses = f"; it refuses {others} of {len(answers)} rows, which do not match" if others else ""
    source = "in [data], or for a source of its own in its table"
    return f"set answer_pattern = '{pattern}' {source}{refuses}"


def _is_exponential(answer: str) -> bool:
    return _EXPONENT.fullmatch(answer) is not None


def _is_rounded(answer: str) -> bool:
    """Whether a short number has become a long one, as 0.1 becomes 0.10000000149011612."""
    found = _DECIMALS.fullmatch(answer)
    if found is None or len(found[1].replace(".", "").lstrip("0")) <= _MOST_DIGITS:
        return False
    digits = f"{float(answer):.{_MOST_DIGITS + 1}g}".partition("e")[0].lstrip("-0.")
    return sum(map(str.isdigit, digits)) <= _MOST_DIGITS


def _short(text: str) -> str:
    half = _SHOWN // 2
    return repr(text if len(text) <= _SHOWN else f"{text[:half]} ... {text[-half:]}")
