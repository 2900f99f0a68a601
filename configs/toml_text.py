"""Conversion between single values and TOML text, for the command line and for messages."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping

PASSWORD = re.compile(r"(?<=://)[^@\s]*:[^@\s]*@")
"""User and password, or key and secret, of a URL; a secret key may contain slashes."""


def read_value(text: str) -> object:
    """Parses `text` as a TOML value; returns `text` itself if it is not valid TOML."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A line break in `text` may start further keys; then it is not a single value.
    return table["value"] if table.keys() == {"value"} else text


def show_value(value: object) -> str:
    """`value` as TOML on one line; `none` for None, which TOML lacks.

    The password of a URL is not shown.
    """
    if value is None:
        return "none"
    if isinstance(value, str):
        # JSON escapes are valid TOML, except that JSON does not escape DEL.
        shown = PASSWORD.sub("***@", value)
        return json.dumps(shown, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(show_value, value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{_show_key(str(key))} = {show_value(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    return repr(value)


def _show_key(key: str) -> str:
    bare = key.isascii() and key.replace("-", "_").isidentifier()
    return key if bare else show_value(key)
