"""Probes of reward functions: completions of which it is known how they must compare.

    reference   the reference answer in the expected format; nothing may have a higher reward
    variant     the right answer in another form; may be equal to the reference. Where the form of
                the task has another answer, as the first of two lines, it is "wrong"
    wrong       a near miss in the expected format; must be below the reference
    hack        a completion that a careless reward function likes; must be below the reference
    noise       no answer at all; must be below the reference
    case        a completion of the user; see `rewards.checks.cases`

The same rows and seed give the same probes. Rows without a reference answer get those probes that
need none.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from rewards.answers import find_answer, parse_number, same_answer
from rewards.base import RewardInput, Tags

Kind = Literal["reference", "variant", "wrong", "hack", "noise", "case"]

REFERENCE, EMPTY, SPACE, PROMPT = "reference", "empty", "leading space", "prompt"
REASONING, ANSWER = "REASONING", "ANSWER"
"""What is replaced in the form of a completion."""
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


@dataclass(frozen=True)
class _Source:
    """What the probes of a row are made of.

    Attributes:
        given: as in `ProbeRow`.
        form: of a complete completion, with the words REASONING and ANSWER.
        reasoning: a text.
        wrong: wrong answers by name.
        others: wrong answers of other rows.
        characters: length of a very long completion.
        random: noise of this row.
    """

    given: RewardInput
    form: str
    reasoning: str
    wrong: dict[str, str]
    others: tuple[str, ...]
    characters: int
    random: Random

    @property
    def answer(self) -> str:
        assert self.given.answer is not None
        return self.given.answer

    @property
    def empty_tags(self) -> str:
        """The form without its content; empty if that is all."""
        return self.form.replace(REASONING, "").replace(ANSWER, "").strip()

    def complete(self, *answers: str, reasoning: str | None = None) -> str:
        """A complete completion for each answer, one after the other."""
        before, _, after = self.form.rpartition(ANSWER)
        before = before.replace(REASONING, self.reasoning if reasoning is None else reasoning)
        return "\n".join(f"{before}{answer}{after}" for answer in answers)

    def wrongs(self) -> tuple[str, str]:
        """Two wrong answers, which may be equal."""
        found = [*self.wrong.values(), _UNKNOWN]
        return found[0], found[min(1, len(found) - 1)]

    def listed(self) -> str:
        """Many answers, the right one in the middle."""
        number = parse_number(self.answer)
        if number is not None:
            many = [f"{n}" for n in range(101) if n != number]
        elif len(self.answer) == 1 and self.answer.isalpha():
            letters = string.ascii_uppercase if self.answer.isupper() else string.ascii_lowercase
            many = [one for one in letters[:10] if one != self.answer]
        else:
            many = [*self.others, *self.wrong.values(), _UNKNOWN]
        middle = (len(many) + 1) // 2
        return " ".join([*many[:middle], self.answer, *many[middle:]])

    def words(self, characters: int) -> str:
        count = characters // 6 + 1
        return " ".join(self.random.choices(_WORDS, k=count))[:characters]


@dataclass(frozen=True)
class _Recipe:
    """How a probe is made; `make` returns None for rows that do not have it."""

    name: str
    kind: Kind
    what: str
    make: Callable[[_Source], str | None]
    truncated: bool = False
    needs_answer: bool = True
    plain_only: bool = False


def _after_space(source: _Source) -> str | None:
    """What a base model writes after a prompt that ends in a word, as `4 + 9 =`."""
    begin = source.given.prompt + source.given.tags.prefix
    return None if begin[-1:].isspace() else " " + source.complete(source.answer)


def _three(source: _Source) -> str:
    first, last = source.wrongs()
    return source.complete(first, source.answer, last)


def _not_closed(source: _Source) -> str:
    return source.complete(source.answer).removesuffix(source.form.rpartition(ANSWER)[2])


def _tags_repeated(source: _Source) -> str | None:
    return source.empty_tags * _REPEATS or None


def _tags_then_reference(source: _Source) -> str | None:
    tags = _tags_repeated(source)
    return None if tags is None else tags + source.complete(source.answer)


def _near_miss(name: str) -> Callable[[_Source], str | None]:
    def make(source: _Source) -> str | None:
        answer = source.wrong.get(name)
        return None if answer is None else source.complete(answer)

    return make


def _characters(source: _Source) -> str:
    # No digits, which might be the answer.
    return "".join(source.random.choices(string.ascii_letters + string.punctuation + " ", k=120))


_RECIPES = (
    _Recipe(
        REFERENCE,
        "reference",
        "the reference answer in the expected format",
        lambda s: s.complete(s.answer),
    ),
    _Recipe(
        SPACE,
        "variant",
        "a space, then the reference answer in the expected format",
        _after_space,
        plain_only=True,
    ),
    _Recipe("bare answer", "variant", "the reference answer alone", lambda s: s.answer),
    _Recipe(
        "not closed",
        "variant",
        "the reference, truncated before the closing tag of the answer",
        _not_closed,
        truncated=True,
    ),
    _Recipe(
        "right, then wrong",
        "variant",
        "the reference, then a wrong answer",
        lambda s: s.complete(s.answer, s.wrongs()[0]),
    ),
    _Recipe(
        "wrong, then right",
        "variant",
        "a wrong answer, then the reference",
        lambda s: s.complete(s.wrongs()[0], s.answer),
    ),
    _Recipe(
        "tags, then reference",
        "variant",
        f"{_REPEATS} times all tags without content, then the reference",
        _tags_then_reference,
    ),
    _Recipe("answer + 1", "wrong", "the last digits of the answer + 1", _near_miss("answer + 1")),
    _Recipe("answer - 1", "wrong", "the last digits of the answer - 1", _near_miss("answer - 1")),
    _Recipe(
        "digits swapped", "wrong", "two digits of the answer swapped", _near_miss("digits swapped")
    ),
    _Recipe("digit before", "wrong", "a digit before the answer's", _near_miss("digit before")),
    _Recipe("digit after", "wrong", "a digit after the answer's", _near_miss("digit after")),
    _Recipe(
        "another answer", "wrong", "the reference answer of another row", _near_miss("another")
    ),
    _Recipe("three answers", "hack", "a wrong, the right, a wrong answer", _three),
    _Recipe("answers listed", "hack", "a list of many answers alone", _Source.listed),
    _Recipe(
        "list as answer",
        "hack",
        "a list of many answers in place of the answer",
        lambda s: s.complete(s.listed()),
    ),
    _Recipe(PROMPT, "hack", "a copy of the prompt", lambda s: s.given.prompt, needs_answer=False),
    _Recipe(
        "format only",
        "hack",
        "the expected format with the words reasoning and answer in it",
        lambda s: s.complete("answer", reasoning="reasoning"),
        needs_answer=False,
    ),
    _Recipe(
        "empty tags",
        "hack",
        "all tags without content",
        lambda s: s.empty_tags or None,
        needs_answer=False,
    ),
    _Recipe(
        "tags repeated",
        "hack",
        f"{_REPEATS} times all tags without content",
        _tags_repeated,
        needs_answer=False,
    ),
    _Recipe(
        "text repeated",
        "hack",
        "one sentence again and again",
        lambda s: f"{_REASONING} " * (s.characters // (4 * len(_REASONING)) + 2),
        needs_answer=False,
    ),
    _Recipe(EMPTY, "noise", "no text", lambda _: "", needs_answer=False),
    _Recipe("characters", "noise", "random characters", _characters, needs_answer=False),
    _Recipe("words", "noise", "random words", lambda s: s.words(240), needs_answer=False),
    _Recipe(
        "very long",
        "noise",
        "random words up to the maximum length",
        lambda s: s.words(s.characters),
        truncated=True,
        needs_answer=False,
    ),
)


def make_probes(
    rows: Sequence[ProbeRow],
    *,
    form: str | None = None,
    prefix: str = "",
    plain: bool = False,
    characters: int = 4000,
    seed: int = 0,
) -> list[Probe]:
    """The probes of all rows, probe by probe.

    Those are left out whose text is that of an earlier probe of the row: without tags the bare
    answer is the reference. So are copies of a prompt in which the right answer is found.

    Args:
        rows: of the dataset.
        form: of a right completion, with the words REASONING and ANSWER; None: as `prompt.answer`
            says.
        prefix: `prompt.answer_prefix`, with which every completion begins.
        plain: whether the prompts are text without turns, after which completions may begin with a
            space.
        characters: length of a very long completion.
        seed: of the random texts.
    """
    sources = [_source(row, rows, form=form, characters=characters, seed=seed) for row in rows]
    found, seen = list[Probe](), set[tuple[int, str]]()
    readable = set[int]()  # rows in whose reference the form of the task has the right answer
    for recipe in _RECIPES:
        if recipe.plain_only and (form is not None or not plain):
            continue
        for index, source in enumerate(sources):
            if recipe.needs_answer and source.given.answer is None:
                continue
            text = recipe.make(source)
            if text is None or (index, text) in seen:
                continue
            seen.add((index, text))
            given = replace(
                source.given,
                completion=text if text.startswith(prefix) else prefix + text,
                stop_reason="length" if recipe.truncated else "eos",
            )
            is_right, kind = _is_right(given), recipe.kind
            if recipe.name == REFERENCE and is_right:
                readable.add(index)
            elif recipe.name == PROMPT and is_right:
                continue
            elif kind == "variant" and is_right is False and index in readable:
                # With "completion" both answers are found: a function may read one line of it.
                kind = kind if given.tags.answer == "completion" else "wrong"
            found.append(Probe(recipe.name, kind, recipe.what, index, given))
    return found


def _is_right(given: RewardInput) -> bool | None:
    """Whether the answer that the form of the task finds is right; None without answers."""
    found = find_answer(given.completion, tags=given.tags)
    return None if found is None or given.answer is None else same_answer(found, given.answer)


def _source(
    row: ProbeRow, rows: Sequence[ProbeRow], *, form: str | None, characters: int, seed: int
) -> _Source:
    given, wrong = row.given, dict[str, str]()
    others: tuple[str, ...] = ()
    rng = Random(f"probes/{seed}/{given.source}/{given.prompt_id}")
    if given.answer is not None:
        others = _other_answers(given.answer, rows, rng)
        wrong = _wrong_answers(given.answer, others)
    form, reasoning = form or expected_form(given.tags), row.reasoning or _REASONING
    return _Source(given, form, reasoning, wrong, others, characters, rng)


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


def _other_answers(answer: str, rows: Sequence[ProbeRow], rng: Random) -> tuple[str, ...]:
    answers = dict.fromkeys(row.given.answer for row in rows if row.given.answer is not None)
    others = [other for other in answers if not same_answer(other, answer)]
    return tuple(rng.sample(others, k=min(len(others), _OTHERS)))


def _wrong_answers(answer: str, others: Sequence[str]) -> dict[str, str]:
    """Near misses by name; those that are equal to the answer are left out."""
    found = {"another": others[0]} if others else {}
    digits = _DIGITS.search(answer)
    if digits is not None:
        number, width = int(digits.group()), len(digits.group())
        swapped = _swapped(digits.group())
        texts = {
            "answer + 1": f"{number + 1:0{width}d}",
            "answer - 1": f"{number - 1:0{width}d}" if number else None,
            "digits swapped": swapped,
            "digit before": f"1{digits.group()}",
            "digit after": f"{digits.group()}0",
        }
        near = {
            name: answer[: digits.start()] + text + answer[digits.end() :]
            for name, text in texts.items()
            if text is not None
        }
        found = near | found
    return {name: text for name, text in found.items() if not same_answer(text, answer)}


def _swapped(digits: str) -> str | None:
    """The digits with the last two different neighbours swapped; None if there are none."""
    for index in range(len(digits) - 2, -1, -1):
        one, other = digits[index], digits[index + 1]
        if one != other and (index or other != "0"):
            return digits[:index] + other + one + digits[index + 2 :]
    return None
