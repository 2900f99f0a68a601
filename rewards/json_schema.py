"""Rewards for JSON that a schema accepts, with `jsonschema`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonschema import exceptions, validators
from referencing import Registry

from rewards.answers import find_answer
from rewards.base import Tags

_FENCED = re.compile(r"```[^\S\n]*(?:(?:json|JSON)[^\S\n]*)?\n(.*?)```", re.DOTALL)


class JsonSchema:
    """1 if the completion's JSON is valid by a schema, else 0.

    The JSON is the completion's answer by `prompt.answer`, or the whole completion if it has none;
    if that has a fenced block of code, the last one.

    >>> schema = {"type": "object", "required": ["age"], "properties": {"age": {"type": "integer"}}}
    >>> score = JsonSchema(schema)
    >>> score('<answer>{"age": 3}</answer>', tags=tags)
    1.0
    >>> score('{"age": "three"}', tags=tags)
    0.0

    Known hacks:
        the smallest value that the schema accepts: `{}`, if nothing is required, and [] or "" for
        everything without a minimum; write `required`, `minItems`, `minLength` and
        `additionalProperties = false`.
        the schema or its example, copied from the prompt: scores 1 if it is valid; combine this
        part with one for the content.

    Args:
        schema: the schema as a table, or the absolute path of its file. `$ref` finds parts of the
            schema only; nothing is downloaded. "format" is not checked.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is no JSON, or the schema is invalid.
    """

    def __init__(self, schema: Mapping[str, Any] | str) -> None:
        found = json.loads(Path(schema).read_bytes()) if isinstance(schema, str) else schema
        validator = validators.validator_for(found, default=validators.Draft202012Validator)
        try:
            validator.check_schema(found)
        except exceptions.SchemaError as error:
            where = "/".join(map(str, error.absolute_path)) or "its root"
            raise ValueError(f"schema: {error.message} at {where}") from None
        # An empty registry: the default one downloads what $ref names.
        self._validator = validator(found, registry=Registry())

    def __call__(self, completion: str, *, tags: Tags) -> float:
        """The score of a completion, 0 or 1."""
        answer = find_answer(completion, tags=tags)
        text = completion if answer is None else answer
        blocks = _FENCED.findall(text)
        try:
            value = json.loads(
                blocks[-1] if blocks else text,
                object_pairs_hook=_unique,
                parse_constant=_refuse,
            )
            return float(self._validator.is_valid(value))
        except (ValueError, RecursionError):  # too deep, or an integer of thousands of digits
            return 0.0


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key is repeated")
    return dict(pairs)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
