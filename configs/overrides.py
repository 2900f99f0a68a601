"""Applies settings from the command line to those of the file."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from configs.base import home
from configs.errors import Mistake, unknown_key
from configs.settings import Setting, find_setting
from configs.short_forms import long_form
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


def _set(tree: dict[str, Any], path: tuple[str, ...], setting: Setting, text: str) -> list[Mistake]:
    at: Any = tree
    key: Any = ""
    for n, part in enumerate(path):
        if n:
            empty: Any = [] if part.isdecimal() else {}
            if isinstance(at, dict) and at.get(key) is None:
                at[key] = empty
            at = at[key]
        if isinstance(at, list) and part.isdecimal():
            key = int(part)
            if key > len(at):
                name = ".".join(path[:n])
                return [Mistake(path, f"{name} has {len(at)} elements; the next is {len(at)}")]
            if key == len(at):
                at.append({})
        elif isinstance(at, dict):
            key = part
        else:
            return []  # the file has another value in place of a table, which is its mistake
    if text != UNSET or not setting.optional:
        value = read_value(text)
        is_text = setting.type == "string" and not isinstance(value, str)
        at[key] = long_form(text if is_text else value, home(), path)
    elif setting.default is None:
        at.pop(key, None)
    else:
        at[key] = None
    return []
