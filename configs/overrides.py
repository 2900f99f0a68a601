"""Applies settings from the command line to those of the file."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from configs.errors import Mistake, Path, unknown_key
from configs.settings import Setting, find_setting
from configs.toml_text import read_value

Override = tuple[str, str]
"""A dotted key and its text."""

UNSET = "none"
"""Text that unsets an optional setting."""


def apply_overrides(
    tree: Mapping[str, Any], overrides: Sequence[Override]
) -> tuple[dict[str, Any], list[Mistake]]:
    """Applies overrides to a copy of `tree`; the last override of a key wins.

    A text is parsed as a TOML value. It is a string if it is not valid TOML, or if the setting is a
    string and the value is not. `none` unsets an optional setting (`"none"` is the string). Values
    are not validated here.

    Returns:
        The new tree, and a mistake for each unknown key; unknown keys are not applied.
    """
    result = copy.deepcopy(dict(tree))
    mistakes = []
    for key, text in overrides:
        path = tuple(key.split("."))
        setting = find_setting(path)
        if setting is None:
            mistakes.append(unknown_key(path, "--"))
        elif path[-1].isdecimal() and setting.type != "object":
            whole = ".".join(path[:-1])
            mistakes.append(Mistake(path, f"set the whole list: --{whole} '[...]'"))
        else:
            mistakes += _set(result, path, setting, text)
    return result, mistakes


def _set(tree: dict[str, Any], path: Path, setting: Setting, text: str) -> list[Mistake]:
    at: Any = tree
    key: Any = ""
    for i, part in enumerate(path):
        if isinstance(at, list) and not str(part).isdecimal():
            return []  # the file has a list in place of a table, which is reported as its mistake
        key = int(part) if isinstance(at, list) else part
        if isinstance(at, list):
            if key > len(at):
                name = ".".join(map(str, path[:i]))
                return [Mistake(path, f"{name} has {len(at)} elements; the next is {len(at)}")]
            if key == len(at):
                at.append({})
        elif not isinstance(at, dict):
            # The file has a plain value in place of a table, which is reported as its mistake.
            return []
        if i < len(path) - 1:
            at = at[key] if isinstance(at, list) else at.setdefault(key, _empty(path[: i + 1]))
    if text == UNSET and setting.optional:
        at.pop(key, None)
    else:
        at[key] = _read(text, setting)
    return []


def _empty(path: Path) -> object:
    setting = find_setting(path)
    return [] if setting and setting.type == "array" else {}


def _read(text: str, setting: Setting) -> object:
    value = read_value(text)
    return text if setting.type == "string" and not isinstance(value, str) else value
