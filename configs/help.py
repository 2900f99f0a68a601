"""The settings as a text for `--help`."""

from __future__ import annotations

import textwrap

from configs.overrides import UNSET
from configs.paths import HOME_VARIABLE
from configs.settings import Setting, find_setting, settings, tables
from configs.toml_text import show_value

WIDTH = 100
_INDENT = " " * 8
_INTRODUCTION = f"""\
Settings: every key of CONFIG.toml can be given on the command line, as --table.key VALUE or
--table.key=VALUE. VALUE is written as in TOML; quotes around a string may be left out, lists are
'["a", "b"]', {UNSET} unsets what has no default, N counts from 0, the last one given wins.
Relative paths start at ${HOME_VARIABLE}, or else in the current directory.
"""


def settings_help() -> str:
    """Every setting with what it may be, its default and its meaning, grouped by table."""
    parts = [_INTRODUCTION]
    for table in tables():
        parts.append(f"{table.path}: {table.description}")
        parts += [
            _entry(setting) for setting in settings() if setting.path.startswith(f"{table.path}.")
        ]
        parts.append("")
    return "\n".join(parts)


def _entry(setting: Setting) -> str:
    body = textwrap.wrap(
        f"{setting.allowed}; {_default(setting)}. {setting.description}",
        width=WIDTH,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join([f"  --{setting.path}", *body])


def _default(setting: Setting) -> str:
    if not setting.required:
        return "optional" if setting.default is None else f"default: {show_value(setting.default)}"
    parent = setting.path.rpartition(".")[0]
    above = find_setting(parent.split("."))
    return f"required with {parent}" if above and above.optional else "required"
