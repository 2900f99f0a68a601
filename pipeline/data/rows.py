"""Dataset rows, the checks that find malformed ones, and the report on excluded rows.

Independent of files, hubs and templates.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Literal

SHOWN_ROWS = 10
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "developer": "system",
}
"""Other names of roles in chat format: those of ShareGPT, Gemma and OpenAI."""
_TOOL_ROLES = ("tool", "function", "function_call", "observation")


@dataclass(frozen=True)
class Row:
    """A valid row.

    Attributes:
        number: number of the row, from 1; in a JSONL or CSV file the line number.
        values: values by column; those of required columns are text.
        messages: the turns of a prompt in chat format, each with "role" and "content": "system" at
            most first, then "user" and "assistant" in turns, "user" last; None for other rows.
        reply: the assistant's turn after them; None if there is none.
    """

    number: int
    values: Mapping[str, object]
    messages: tuple[Mapping[str, str], ...] | None = None
    reply: str | None = None


@dataclass(frozen=True)
class Malformed:
    """A malformed row: its number, from 1, and the reason."""

    row: int
    reason: str


@dataclass(frozen=True)
class TooLong:
    """An overlong row, which is excluded: its number, from 1, and its length in tokens."""

    row: int
    tokens: int


def clean_row(row: Row, *, columns: Sequence[str], chat: str | None = None) -> Row | Malformed:
    """The row with the values of `columns` as text, and the messages of the column `chat`, if any.

    Malformed if one of them is absent or invalid.
    """
    texts = {}
    for column in columns:
        value = row.values.get(column)
        if value is None:
            return _absent(row, column)
        if not isinstance(value, str | int | float | Decimal):
            what = f"column {column!r} is {kind_of(value)}, not text or a number"
            return Malformed(row.number, what)
        if isinstance(value, float | Decimal) and not math.isfinite(value):
            return Malformed(row.number, f"column {column!r} is {value}, not a number")
        texts[column] = _text_of(value)
        problem = _text_problem(texts[column])
        if problem:
            return Malformed(row.number, f"column {column!r} {problem}")
    cleaned = Row(row.number, {**row.values, **texts})
    if chat is None:
        return cleaned
    if row.values.get(chat) is None:
        return _absent(row, chat)
    try:
        messages = parse_messages(row.values[chat])
    except ValueError as problem:
        return Malformed(row.number, f"column {chat!r} {problem}")
    replied = messages[-1]["role"] == "assistant"
    return replace(
        cleaned,
        messages=messages[:-1] if replied else messages,
        reply=messages[-1]["content"] if replied else None,
    )


def is_chat(value: object) -> bool:
    """Whether a value is in chat format: a list that begins with a turn's role."""
    return isinstance(value, list) and any(
        isinstance(one, Mapping) and ("role" in one or "from" in one) for one in value[:1]
    )


def chat_of_text(value: object) -> object:
    """The list of turns that a text writes; other values as they are."""
    found = _written(value, "[")
    return found if is_chat(found) else value


def _written(value: object, start: str) -> object:
    """What a text that begins with `start` writes, as JSON or, as pandas in CSV files, as Python.

    Other values as they are.
    """
    if isinstance(value, str) and value.lstrip().startswith(start):
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                return read(value.strip())
    return value


def value_at(values: Mapping[str, object], column: str) -> object:
    """The value of a column; of a column `a.b` that does not exist, the key `b` in column `a`.

    None if there is neither.
    """
    if column in values or "." not in column:
        return values.get(column)
    first, _, rest = column.partition(".")
    inner = _written(values.get(first), "{")
    return value_at(inner, rest) if isinstance(inner, Mapping) else None


def parse_messages(value: object) -> tuple[dict[str, str], ...]:
    """The turns of a value in chat format, with their roles and texts alone.

    A turn has `role` and `content`, or `from` and `value`, or as Gemini's `role` and `parts`. The
    parts of a content that is a list of texts are joined; an empty text of the system is left out.

    Raises:
        ValueError: saying which turn is invalid; the message follows the name of the column.
    """
    if not isinstance(value, list):
        raise ValueError(f"is {kind_of(value)}, not a list of messages")
    messages = list[dict[str, str]]()
    for number, message in enumerate(value, start=1):
        where, last = f"has in message {number}", messages[-1]["role"] if messages else None
        if not isinstance(message, Mapping):
            raise ValueError(f"{where} {kind_of(message)}, not a role and a content")
        named = message.get("role") or message.get("from")
        role = _ROLES.get(named.lower(), named.lower()) if isinstance(named, str) else named
        if role in _TOOL_ROLES or message.get("tool_calls"):
            what = f"the role {named!r}" if role in _TOOL_ROLES else "tool calls"
            raise ValueError(f"{where} {what}; tools are not supported yet")
        expected = {None: ["system", "user"], "user": ["assistant"]}.get(last, ["user"])
        if role not in expected:
            raise ValueError(f"{where} the role {named!r} instead of {' or '.join(expected)}")
        given = (message.get(key) for key in ("content", "value", "parts"))
        content = next((one for one in given if one is not None), None)
        if role == "system" and content is None:
            continue
        content = _joined(content, where)
        if role == "system" and not content.strip():
            continue
        problem = _text_problem(content)
        if problem:
            raise ValueError(f"{where} a text that {problem}")
        messages.append({"role": role, "content": content})
    if not any(message["role"] == "user" for message in messages):
        raise ValueError("has no message of the user")
    return tuple(messages)


def _joined(content: object, where: str) -> str:
    """The text of a turn's content: a text, or a list of parts that are texts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        kind = "no content" if content is None else kind_of(content)
        raise ValueError(f"{where} {kind}, not text")
    texts = []
    for part in content:
        given = part if isinstance(part, Mapping) else {"text": part}
        form, text = given.get("type"), given.get("text")
        if form not in (None, "text") or not isinstance(text, str):
            what = kind_of(part) if form is None else f"a part of type {form!r}"
            raise ValueError(f"{where} {what}; only text is supported")
        texts.append(text)
    return "".join(texts)


def _text_of(value: str | float | Decimal) -> str:
    """The text of a value; numbers in digits: 0.00001, not 1e-05."""
    return f"{Decimal(str(value)):f}" if isinstance(value, float | Decimal) else str(value)


def _absent(row: Row, column: str) -> Malformed:
    state = "null" if column in row.values else "missing"
    return Malformed(row.number, f"column {column!r} is {state}")


def _text_problem(text: str) -> str | None:
    if not text.strip():
        return "is empty"
    return None if is_unicode(text) else "contains a lone surrogate"


def refuse_malformed(
    malformed: Sequence[Malformed], *, path: str, where: str, policy: Literal["refuse", "skip"]
) -> None:
    """Refuses malformed rows unless `policy` is to skip them.

    Raises:
        ValueError: with the first 10 malformed rows.
    """
    if malformed and policy == "refuse":
        rows = "row is" if len(malformed) == 1 else "rows are"
        lines = [
            f"{where}: {len(malformed)} {rows} malformed in {path}:",
            *list_rows(malformed),
            'fix them, or exclude them with data.malformed = "skip"',
        ]
        raise ValueError("\n".join(lines))


def list_rows(malformed: Sequence[Malformed]) -> Iterator[str]:
    """A line for each of the first 10 malformed rows, and one with the number of the others."""
    for bad in malformed[:SHOWN_ROWS]:
        yield f"  row {bad.row}: {bad.reason}"
    if len(malformed) > SHOWN_ROWS:
        yield f"  and {len(malformed) - SHOWN_ROWS} more"


def kind_of(value: object) -> str:
    """The type of a value, for messages."""
    return f"a value of type {type(value).__name__}"


def is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
