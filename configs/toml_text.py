"""Single values as TOML text, both ways: the command line reads them, messages show them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from datetime import date, time


def read_value(text: str) -> object:
    """The TOML value that `text` spells; `text` itself where it spells none."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A line break in `text` may start further keys: then it was not one value.
    return table["value"] if table.keys() == {"value"} else text


def show_value(value: object) -> str:
    """`value` as TOML, on one line; `none` for None, which TOML cannot write."""
    if value is None:
        return "none"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(show_value, value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{_show_key(str(key))} = {show_value(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, date | time):
        return value.isoformat()
    return repr(value)


def _show_key(key: str) -> str:
    bare = key.isascii() and key.replace("-", "_").isidentifier()
    return key if bare else show_value(key)
