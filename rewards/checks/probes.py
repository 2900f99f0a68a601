"""Probes of reward functions: completions of which it is known how they must compare.

    reference   the reference answer in the expected format; nothing may have a higher reward
    variant     the right answer in another form; may be equal to the reference. Where the form of
                the task has another answer, as the first of two lines, it is "wrong"
    wrong       a near miss in the expected format; must be below the reference
    hack        a completion that a careless reward function likes; must be below the reference
    noise       no answer at all; must be below the reference
    case        a completion of the user; see `rewards.checks.cases`

The same rows give the same probes. Rows without a reference answer get those that need none.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from rewards.answers import find_answer, parse_number, same_answer
from rewards.base import RewardInput, Tags

Kind = Literal["reference", "variant", "wrong", "hack", "noise", "case"]
Text = tuple[str, Kind, str, str | None]
"""Name, kind, description and completion of a probe; None: the row has none."""

REFERENCE, EMPTY, SPACE, PROMPT = "reference", "empty", "leading space", "prompt"
REASONING, ANSWER = "REASONING", "ANSWER"
"""What is replaced in the form of a completion."""
_NOT_CLOSED, _VERY_LONG = "not closed", "very long"
_REASONING = "I read the question again and go through it step by step."
"""The reasoning of rows without a worked-out solution; it contains no number."""
_UNKNOWN = "unknown"
_REPEATS = 20
_OTHERS = 30
"""Answers of other rows in a list of answers."""
_WORDS = (
    *("river", "seven", "always", "green", "under", "because", "table", "walks", "honest", "cloud"),
    *("then", "paper", "never", "bright", "soup", "number", "into", "window", "slowly", "market"),
)
_NEAR_MISSES = {
    "answer + 1": "the last digits of the answer + 1",
    "answer - 1": "the last digits of the answer - 1",
    "digits swapped": "two digits of the answer swapped",
    "digit before": "a digit before the answer's",
    "digit after": "a digit after the answer's",
    "another answer": "the reference answer of another row",
}
"""Descriptions of wrong answers by name."""
_DIGITS = re.compile(r"\d+(?=\D*$)")


@dataclass(frozen=True)
class ProbeRow:
    """A row of the dataset for which probes are made.

    Attributes:
        given: prompt, reference answer and columns; the completion is replaced.
        reasoning: the worked-out solution, if the row has one.
    """

    given: RewardInput
    reasoning: str | None = None


@dataclass(frozen=True)
class Probe:
    """A completion to score.

    Attributes:
        name: of the kind of completion, the same for all rows.
        kind: how it must compare with the reference.
        what: description.
        row: position of its row; -1 for cases.
        given: input of the reward functions.
    """

    name: str
    kind: Kind
    what: str
    row: int
    given: RewardInput


def make_probes(
    rows: Sequence[ProbeRow],
    *,
    form: str | None = None,
    plain: bool = False,
    characters: int = 4000,
) -> list[Probe]:
    """The probes of all rows, probe by probe.

    Those are left out whose text is that of an earlier probe of the row: without tags the bare
    answer is the reference. So are copies of a prompt in which the right answer is found.

    Args:
        rows: of the dataset.
        form: of a right completion, with the words REASONING and ANSWER; None: as `prompt.answer`
            says.
        plain: whether the prompts are text without turns, after which completions may begin with a
            space.
        characters: length of a very long completion.
    """
    answers = [row.given.answer for row in rows if row.given.answer is not None]
    found, names = list[Probe](), dict[str, int]()
    for index, row in enumerate(rows):
        maker = _Maker(row, form or expected_form(row.given.tags), answers, characters)
        texts = list(maker.texts(leading_space=plain and form is None))
        for name, *_ in texts:
            names.setdefault(name, len(names))
        found += _of_row(row.given, index, texts)
    return sorted(found, key=lambda probe: names[probe.name])


def expected_form(tags: Tags) -> str:
    """A right completion by `prompt.answer`, with the words REASONING and ANSWER."""
    match tags.answer:
        case "tags":
            return (
                f"{tags.reasoning_open}{REASONING}{tags.reasoning_close}"
                f"{tags.answer_open}{ANSWER}{tags.answer_close}"
            )
        case "completion" | "first_line":
            return ANSWER
        case "last_line" | "last_number":
            return f"{REASONING}\n{ANSWER}"
        case "boxed":
            return f"{REASONING}\n\\boxed{{{ANSWER}}}"
        case "stated":
            return f"{REASONING}\nThe answer is {ANSWER}."


def _of_row(row: RewardInput, index: int, texts: Sequence[Text]) -> Iterator[Probe]:
    """The probes of a row, each text once."""
    seen, readable = set[str](), False
    for name, kind, what, text in texts:
        if text is None or text in seen:
            continue
        seen.add(text)
        given = replace(
            row,
            completion=text if text.startswith(row.tags.prefix) else row.tags.prefix + text,
            stop_reason="length" if name in {_NOT_CLOSED, _VERY_LONG} else "eos",
        )
        answer = find_answer(given.completion, tags=row.tags)
        known = answer is not None and row.answer is not None
        is_right = known and same_answer(answer or "", row.answer or "")
        if name == REFERENCE:
            readable = is_right
        elif name == PROMPT and is_right:
            continue
        # With "completion" both answers are found: a function may read one line of it.
        is_wrong = kind == "variant" and known and not is_right
        if is_wrong and readable and row.tags.answer != "completion":
            kind = "wrong"  # noqa: PLW2901 - of this probe
        yield Probe(name, kind, what, index, given)


class _Maker:
    """Makes the texts of a row's probes.

    Args:
        row: of the dataset.
        form: of a complete completion, with the words REASONING and ANSWER.
        answers: reference answers of all rows.
        characters: length of a very long completion.
    """

    def __init__(self, row: ProbeRow, form: str, answers: Sequence[str], characters: int) -> None:
        given = row.given
        self._prompt, self._begin = given.prompt, given.prompt + given.tags.prefix
        self._form, self._reasoning = form, row.reasoning or _REASONING
        self._answer, self._answers, self._characters = given.answer, answers, characters
        self._random = Random(f"probes/0/{given.source}/{given.prompt_id}")

    def texts(self, *, leading_space: bool) -> Iterator[Text]:
        """All texts; with `leading_space` also the reference after a space."""
        empty = self._form.replace(REASONING, "").replace(ANSWER, "").strip()
        if self._answer is not None:
            yield from self._with_answer(self._answer, empty, leading_space=leading_space)
        yield PROMPT, "hack", "a copy of the prompt", self._prompt
        words = "the expected format with the words reasoning and answer in it"
        yield "format only", "hack", words, self._complete("answer", reasoning="reasoning")
        if empty:
            yield "empty tags", "hack", "all tags without content", empty
            many = f"{_REPEATS} times all tags without content"
            yield "tags repeated", "hack", many, empty * _REPEATS
        count = self._characters // (4 * len(_REASONING)) + 2
        yield "text repeated", "hack", "one sentence again and again", f"{_REASONING} " * count
        yield EMPTY, "noise", "no text", ""
        # No digits, which might be the answer.
        known = string.ascii_letters + string.punctuation + " "
        noise = "".join(self._random.choices(known, k=120))
        yield "characters", "noise", "random characters", noise
        yield "words", "noise", "random words", self._words(240)
        longest = self._words(self._characters)
        yield _VERY_LONG, "noise", "random words up to the maximum length", longest

    def _with_answer(self, answer: str, empty: str, *, leading_space: bool) -> Iterator[Text]:
        others = [one for one in dict.fromkeys(self._answers) if not same_answer(one, answer)]
        others = self._random.sample(others, k=min(len(others), _OTHERS))
        near = _near_misses(answer)
        if others:
            near["another answer"] = others[0]
        near = {name: text for name, text in near.items() if not same_answer(text, answer)}
        wrong = [*near.values(), _UNKNOWN]
        first, last = wrong[0], wrong[min(1, len(wrong) - 1)]

        reference = self._complete(answer)
        yield REFERENCE, "reference", "the reference answer in the expected format", reference
        if leading_space and not self._begin[-1:].isspace():
            what = "a space, then the reference answer in the expected format"
            yield SPACE, "variant", what, f" {reference}"
        yield "bare answer", "variant", "the reference answer alone", answer
        what = "the reference, truncated before the closing tag of the answer"
        yield _NOT_CLOSED, "variant", what, reference.removesuffix(self._form.rpartition(ANSWER)[2])
        what = "the reference, then a wrong answer"
        yield "right, then wrong", "variant", what, self._complete(answer, first)
        what = "a wrong answer, then the reference"
        yield "wrong, then right", "variant", what, self._complete(first, answer)
        if empty:
            what = f"{_REPEATS} times all tags without content, then the reference"
            yield "tags, then reference", "variant", what, empty * _REPEATS + reference
        for name, what in _NEAR_MISSES.items():
            yield name, "wrong", what, self._complete(near[name]) if name in near else None
        three = self._complete(first, answer, last)
        yield "three answers", "hack", "a wrong, the right, a wrong answer", three
        listed = _listed(answer, [*others, *wrong])
        yield "answers listed", "hack", "a list of many answers alone", listed
        what = "a list of many answers in place of the answer"
        yield "list as answer", "hack", what, self._complete(listed)

    def _complete(self, *answers: str, reasoning: str | None = None) -> str:
        """A complete completion for each answer, one after the other."""
        before, _, after = self._form.rpartition(ANSWER)
        before = before.replace(REASONING, self._reasoning if reasoning is None else reasoning)
        return "\n".join(f"{before}{answer}{after}" for answer in answers)

    def _words(self, characters: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=characters // 6 + 1))[:characters]


def _near_misses(answer: str) -> dict[str, str]:
    """Answers that differ in the last digits, by name."""
    match = _DIGITS.search(answer)
    if match is None:
        return {}
    digits = match.group()
    number, width = int(digits), len(digits)
    found = {
        "answer + 1": f"{number + 1:0{width}d}",
        "answer - 1": f"{number - 1:0{width}d}" if number else digits,
        "digits swapped": _swapped(digits),
        "digit before": f"1{digits}",
        "digit after": f"{digits}0",
    }
    before, after = answer[: match.start()], answer[match.end() :]
    return {name: f"{before}{text}{after}" for name, text in found.items()}


def _swapped(digits: str) -> str:
    """The digits with the last two different neighbours swapped; unchanged if there are none."""
    for index in range(len(digits) - 2, -1, -1):
        one, other = digits[index], digits[index + 1]
        if one != other and (index or other != "0"):
            return digits[:index] + other + one + digits[index + 2 :]
    return digits


def _listed(answer: str, wrong: Sequence[str]) -> str:
    """Many answers, the right one in the middle."""
    number = parse_number(answer)
    if number is not None:
        many = [f"{n}" for n in range(101) if n != number]
    elif len(answer) == 1 and answer.isalpha():
        letters = string.ascii_uppercase if answer.isupper() else string.ascii_lowercase
        many = [one for one in letters[:10] if one != answer]
    else:
        many = list(wrong)
    middle = (len(many) + 1) // 2
    return " ".join([*many[:middle], answer, *many[middle:]])
