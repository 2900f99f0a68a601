"""Extracts the answer of a completion and compares answers.

The comparison is strict: no arithmetic and no units; `33 apples` does not equal `33`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import get_args

from configs.task import AnswerPlace
from rewards.base import Tags

_MINUS = str.maketrans("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-" * 7)
_CURRENCY = r"(?:US)?\\?\$|[€£¥₹]"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s?(?P<currency>{_CURRENCY})?\s?(?P<inner>[+-]?)"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?P<part>\.[0-9]+)?(?P<under>/[0-9]+)?"
    rf"(?:\s?(?P<trailing>{_CURRENCY}))?\.?"
)
_LONGEST_NUMBER = 100
_BOXED = re.compile(r"\\f?boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is none
_STATED = re.compile(r"\banswer(?:\s+is\b|\s*[:=])", re.IGNORECASE)
_MARKUP = " \t\r\n*_`"
_SENTENCE_END = re.compile(r"[.;!?](?:\s|$)")
_RUN = re.compile(r"-?[$0-9.,]+")


def find_answer(
    completion: str, *, tags: Tags, extraction: AnswerPlace | None = None
) -> str | None:
    r"""The answer of a completion, stripped; None if there is none.

    Args:
        completion: the text.
        tags: its form.
        extraction: where the answer is; None: as `prompt.answer` says.
            tags: the last answer block, see `extract_answer`;
            completion: all of the text but `prompt.answer_prefix` and a stop string at its end,
            with what its last token adds, as `7END.` with the stop string `END`;
            first_line, last_line: the first or last line of that which is not empty;
            boxed: the content of the last `\boxed{...}`, see `boxed_answer`;
            stated: what follows the last "answer is" or "answer:", see `stated_answer`;
            last_number: the last number, see `last_number`.

    Raises:
        ValueError: if there is no such extraction.
    """
    text = _before_stop(completion.removeprefix(tags.prefix), tags.stops)
    match extraction or tags.answer:
        case "tags":
            return extract_answer(completion, tags)
        case "completion":
            return text.strip() or None
        case "first_line":
            return text.strip().partition("\n")[0].strip() or None
        case "last_line":
            return text.strip().rpartition("\n")[2].strip() or None
        case "boxed":
            return boxed_answer(completion)
        case "stated":
            return stated_answer(completion)
        case "last_number":
            return last_number(completion)
    raise ValueError(f"extraction = {extraction!r} is none of {', '.join(get_args(AnswerPlace))}")


def extract_answer(completion: str, tags: Tags) -> str | None:
    """The text of the last complete answer block, stripped; None if there is none.

    A complete block is an opening tag, text without answer tags, and a closing tag.
    """
    opens, closes = re.escape(tags.answer_open), re.escape(tags.answer_close)
    blocks = re.findall(f"{opens}((?:(?!{opens}|{closes}).)*){closes}", completion, re.DOTALL)
    return blocks[-1].strip() if blocks else None


def last_number(text: str) -> str | None:
    """The last number in the text, as `flexible-extract` of lm-evaluation-harness extracts it.

    A number is a run of the characters 0-9, `.`, `,` and `$` that contains a digit, with a
    directly preceding minus sign: the last number of `5-10` is `-10`. Currency signs, commas and
    trailing periods are removed. If the rest is not a number (`1.2.3`), the answer is wrong, and no
    earlier number is searched. Unlike there, runs without digits (`...`) are skipped, U+2212 is a
    minus sign, and answers are compared as numbers: `72.0` equals `72`.
    """
    runs = [run for run in _RUN.findall(text.replace("\u2212", "-")) if re.search("[0-9]", run)]
    return re.sub("[$,]", "", runs[-1]).rstrip(".") if runs else None


def boxed_answer(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, stripped; None if there is none.

    Braces are matched. A box that is never closed, e.g. of a truncated completion, is ignored, and
    so is everything before it. Boxes within boxes count as one.

    >>> boxed_answer(r"so $\boxed{\frac{1}{2}}$")
    '\\frac{1}{2}'
    """
    content, end = None, 0
    for match in _BOXED.finditer(text):
        if match.start() >= end:
            closed = _closing_brace(text, match.end())
            if closed is None:
                return None
            content, end = text[match.end() : closed].strip(), closed + 1
    return content


def stated_answer(text: str) -> str | None:
    """What follows the last "answer is", "answer:" or "answer =", to the end of the sentence.

    None if there is none. Markdown's emphasis is removed.

    >>> stated_answer("The answer is 4? No: the final answer is **12 km**.")
    '12 km'
    """
    ends = [match.end() for match in _STATED.finditer(text)]
    if not ends:
        return None
    line = text[ends[-1] :].lstrip(_MARKUP + ":=").partition("\n")[0]
    return _SENTENCE_END.split(line, maxsplit=1)[0].strip(_MARKUP)


def parse_number(text: str) -> Fraction | None:
    r"""Parses `text` as a number; None if it is not a number.

    Accepts signs (including Unicode minus signs and hyphens), decimals, thousands separators at
    valid positions, a currency sign (`$ € £ ¥ ₹`, also `US$` and `\$`) before or after it, one
    trailing period, and fractions of integers: `-3`, `1,234.50`, `$12.00`, `5 €`, `12.`, `1/2`.
    """
    amount = _parse_amount(text)
    return None if amount is None else amount[0]


def same_answer(one: str, other: str) -> bool:
    """Whether two answers are equal: as numbers if both are numbers, else as text.

    Two currencies must be equal; a missing one is accepted. The text comparison ignores case, the
    amount of white space and a trailing period.
    """
    first, second = _parse_amount(one), _parse_amount(other)
    if first is None or second is None:
        return _plain(one) == _plain(other)
    return first[0] == second[0] and (first[1] == second[1] or not (first[1] and second[1]))


def answer_key(text: str) -> Fraction | str:
    """The key by which a majority vote groups answers: the number, else the normalized text.

    The number has no currency, because `5` equals `$5`, and `€5`.
    """
    number = parse_number(text)
    return _plain(text) if number is None else number


def is_correct(
    completion: str, *, answer: str, tags: Tags, extraction: AnswerPlace | None = None
) -> bool:
    """Whether the completion's answer equals `answer`; used by rewards and evaluation."""
    found = find_answer(completion, tags=tags, extraction=extraction)
    return found is not None and same_answer(found, answer)


def _before_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string that no word follows.

    The token that completes a stop string ends the completion and may have more text. A stop string
    that words follow did not end the completion.
    """
    words = text.rsplit(maxsplit=1)
    last_word = len(text.rstrip()) - len(words[-1]) if words else 0
    found = (text.find(stop, max(0, last_word - len(stop))) for stop in stops)
    return text[: min((start for start in found if start >= 0), default=len(text))]


def _parse_amount(text: str) -> tuple[Fraction, str] | None:
    """A number as `parse_number` parses it, and its currency sign."""
    text = text.translate(_MINUS).strip()
    match = _NUMBER.fullmatch(text) if len(text) <= _LONGEST_NUMBER else None
    if match is None:
        return None
    whole, part, under = match["whole"], match["part"] or "", match["under"] or ""
    if not (whole or part) or (match["sign"] and match["inner"]) or (under and part):
        return None
    if under and (not whole or int(under[1:]) == 0):
        return None
    if match["currency"] and match["trailing"]:  # "$5$" is LaTeX
        return None
    currency = re.sub(r"US|\\", "", match["currency"] or match["trailing"] or "")
    value = Fraction(f"{(whole or '0').replace(',', '')}{part}{under}")
    return -value if "-" in match["sign"] + match["inner"] else value, currency


def _closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one before `start`; None if there is none."""
    depth = 1
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return None


def _plain(text: str) -> str:
    return " ".join(text.translate(_MINUS).casefold().split()).removesuffix(".")
