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
from typing import Literal, get_args

from rewards.answers import find_answer, parse_number, same_answer
from rewards.base import RewardInput, Tags

Kind = Literal["reference", "variant", "wrong", "hack", "noise", "case"]
Text = tuple[str, Kind, str]
"""Name, kind and text of a probe."""

REFERENCE, EMPTY, SPACE = "reference", "no text", "space, then reference"
REASONING, ANSWER = "REASONING", "ANSWER"
"""What is replaced in the form of a completion."""
_PROMPT, _CUT, _VERY_LONG = "copy of the prompt", "cut in the answer", "very long text"
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
_DIGITS = re.compile(r"\d+(?=\D*$)")


@dataclass(frozen=True)
class ProbeRow:
    """A row of the dataset, whose completion is replaced, and its worked-out solution if any."""

    given: RewardInput
    reasoning: str | None = None


@dataclass(frozen=True)
class Probe:
    """A completion to score, of the row at a position (-1 for cases).

    The name says what it is, in the same words for all rows; the kind, how it must compare with the
    reference.
    """

    name: str
    kind: Kind
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
        form: of a right completion, with the words REASONING and ANSWER; None: `expected_form`.
        plain: whether prompts have no turns, after which completions may begin with a space.
        characters: length of a very long completion.
    """
    answers = [row.given.answer for row in rows if row.given.answer is not None]
    found, order = list[Probe](), dict[str, tuple[int, int]]()
    for index, row in enumerate(rows):
        texts = list(
            _texts(
                row,
                form or expected_form(row.given.tags),
                answers,
                characters=characters,
                leading_space=plain and form is None,
            )
        )
        for name, kind, _ in texts:
            order.setdefault(name, (get_args(Kind).index(kind), len(order)))
        found += _of_row(row.given, index, texts)
    return sorted(found, key=lambda probe: order[probe.name])


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
    for name, kind, text in texts:
        if text in seen:
            continue
        seen.add(text)
        given = replace(
            row,
            completion=text if text.startswith(row.tags.prefix) else row.tags.prefix + text,
            stop_reason="length" if name in {_CUT, _VERY_LONG} else "eos",
        )
        answer = find_answer(given.completion, tags=row.tags)
        known = answer is not None and row.answer is not None
        is_right = known and same_answer(answer or "", row.answer or "")
        if name == REFERENCE:
            readable = is_right
        elif name == _PROMPT and is_right:
            continue
        # With "completion" both answers are found: a function may read one line of it.
        is_wrong = kind == "variant" and known and not is_right
        if is_wrong and readable and row.tags.answer != "completion":
            kind = "wrong"  # noqa: PLW2901 - of this probe
        yield Probe(name, kind, index, given)


def _texts(
    row: ProbeRow, form: str, answers: Sequence[str], *, characters: int, leading_space: bool
) -> Iterator[Text]:
    """The texts of a row's probes; `answers` are the references of all rows."""
    given = row.given
    random = Random(f"probes/0/{given.source}/{given.prompt_id}")

    def complete(*texts: str, reasoning: str = row.reasoning or _REASONING) -> str:
        """A complete completion for each answer, one after the other."""
        parts = form.split(REASONING)
        return "\n".join(
            reasoning.join(part.replace(ANSWER, text) for part in parts) for text in texts
        )

    def words(length: int) -> str:
        return " ".join(random.choices(_WORDS, k=length // 6 + 1))[:length]

    empty = complete("", reasoning="").strip()
    if given.answer is not None:
        near, listed = _wrong_answers(given.answer, answers, random)
        wrong = [*near.values(), _UNKNOWN]
        first, last = wrong[0], wrong[min(1, len(wrong) - 1)]
        reference = complete(given.answer)
        yield REFERENCE, "reference", reference
        if leading_space and not f"{given.prompt}{given.tags.prefix}"[-1:].isspace():
            yield SPACE, "variant", f" {reference}"
        yield "answer alone", "variant", given.answer
        yield _CUT, "variant", reference.removesuffix(form.rpartition(ANSWER)[2])
        yield "right, then wrong", "variant", complete(given.answer, first)
        yield "wrong, then right", "variant", complete(first, given.answer)
        if empty:
            yield "empty tags, then reference", "variant", empty * _REPEATS + reference
        for name, text in near.items():
            yield name, "wrong", complete(text)
        yield "wrong, right, wrong", "hack", complete(first, given.answer, last)
        yield "list of answers", "hack", listed
        yield "list as the answer", "hack", complete(listed)
    yield _PROMPT, "hack", given.prompt
    yield "format only", "hack", complete("answer", reasoning="reasoning")
    if empty:
        yield "empty tags", "hack", empty
        yield "empty tags repeated", "hack", empty * _REPEATS
    yield "text repeated", "hack", f"{_REASONING} " * (characters // (4 * len(_REASONING)) + 2)
    yield EMPTY, "noise", ""
    # No digits, which might be the answer.
    known = string.ascii_letters + string.punctuation + " "
    yield "random characters", "noise", "".join(random.choices(known, k=120))
    yield "random words", "noise", words(240)
    yield _VERY_LONG, "noise", words(characters)


def _wrong_answers(
    answer: str, answers: Sequence[str], random: Random
) -> tuple[dict[str, str], str]:
    """Wrong answers by name, and a list of answers, the right one in the middle."""
    others = [one for one in dict.fromkeys(answers) if not same_answer(one, answer)]
    others = random.sample(others, k=min(len(others), _OTHERS))
    near = _near_misses(answer)
    if others:
        near["another row's answer"] = others[0]
    near = {name: text for name, text in near.items() if not same_answer(text, answer)}
    number = parse_number(answer)
    if number is not None:
        many = [f"{n}" for n in range(101) if n != number]
    elif len(answer) == 1 and answer.isalpha():
        letters = string.ascii_uppercase if answer.isupper() else string.ascii_lowercase
        many = [one for one in letters[:10] if one != answer]
    else:
        many = [*others, *near.values(), _UNKNOWN]
    middle = (len(many) + 1) // 2
    return near, " ".join([*many[:middle], answer, *many[middle:]])


def _near_misses(answer: str) -> dict[str, str]:
    """Answers that differ in the last digits, by name."""
    match = _DIGITS.search(answer)
    if match is None:
        return {}
    digits = match.group()
    number, width = int(digits), len(digits)
    found = {
        "answer + 1": f"{number + 1:0{width}d}",
        "answer - 1": f"{max(number - 1, 0):0{width}d}",
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
