"""The common command line of all commands: `CONFIG.toml [--table.key VALUE ...] [flags]`."""

from __future__ import annotations

import argparse
import difflib
import sys
import textwrap
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn

from configs.errors import ConfigError, unknown_key
from configs.load import presets_hint
from configs.overrides import UNSET, Override
from configs.settings import Setting, settings, tables
from configs.toml_text import show_value

WIDTH = 100
_INDENT = " " * 8
_INTRODUCTION = f"""\
Every key of CONFIG.toml can be set on the command line, as --table.key VALUE or --table.key=VALUE.
VALUE is TOML; quotes around a string are optional, lists are '["a", "b"]', {UNSET} unsets an
optional key, N is an index from 0, the last value of a key wins.
Relative paths of data, models, adapters and reward functions in CONFIG.toml are relative to its
folder; run.dir and paths on the command line are relative to the current folder.
"""


class CommandLine(NamedTuple):
    """A parsed command line: the arguments of `load_config`, and the command's own flags."""

    path: str
    overrides: tuple[Override, ...]
    flags: argparse.Namespace


def parse(
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    flags: argparse.ArgumentParser | None = None,
    argument: str = "CONFIG.toml",
    meaning: str = "the run's configuration",
    optional: bool = False,
) -> CommandLine:
    """Splits the arguments of a command into config file, overrides and the command's own flags.

    Overrides are the arguments with a dot in their name; `load_config` checks their keys and
    values. `--help` prints the flags, and `--help settings [TABLE]` the settings; both exit with
    status 0.

    Args:
        argv: the arguments, without the program's name; None: those of this process.
        prog: the command as called, for the usage line.
        description: what the command does.
        flags: a parser with the command's own flags, created with `add_help=False`.
        argument: how the positional argument is shown.
        meaning: its help.
        optional: whether it may be missing, without overrides; the path is then empty.

    Raises:
        ConfigError: with all syntax mistakes, one line each.
    """
    shown = f"[{argument}]" if optional else argument
    parser = _Parser(
        prog=prog,
        usage=f"{prog} {shown} [--table.key VALUE ...] [options]",
        description=description,
        epilog=_pointer(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[flags] if flags else [],
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument(
        "-h",
        "--help",
        action=_Help,
        nargs="*",
        default=argparse.SUPPRESS,
        metavar=("settings", "TABLE"),
        help="show this help, or that of the settings of all tables or of one",
    )
    parser.add_argument("path", metavar=argument, nargs="?", help=meaning)
    overrides, rest, mistakes = _split(sys.argv[1:] if argv is None else argv)
    namespace, unknown = parser.parse_known_args(rest)
    mistakes += _explain_unknown(unknown, parser.flag_names())
    path = vars(namespace).pop("path")
    if path is None and not unknown and (overrides or not optional):
        known = f"; {presets_hint()}" if argument.endswith("CONFIG.toml") else ""
        mistakes.append(f"{argument} is missing{known}")
    if mistakes:
        raise ConfigError(*(f"command line: {mistake}" for mistake in mistakes))
    return CommandLine(path or "", tuple(overrides), namespace)


class _Help(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, _: object, values: object, __: str | None = None
    ) -> NoReturn:
        words = values if isinstance(values, list) else []
        shown = settings_help(*words[1:2]) if words[:1] == ["settings"] else parser.format_help()
        with suppress(OSError):  # the reader of a pipe has closed it
            sys.stdout.write(f"{shown}\n")
            sys.stdout.flush()
        sys.exit(0)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}")

    def flag_names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]


def _split(argv: Sequence[str]) -> tuple[list[Override], list[str], list[str]]:
    """Splits into overrides, other arguments, and a line for each override without a value."""
    overrides: list[Override] = []
    rest: list[str] = []
    mistakes: list[str] = []
    remaining = deque(argv)
    while remaining:
        argument = remaining.popleft()
        name, equals, value = argument.partition("=")
        key = name.removeprefix("--")
        if key == name or "." not in key:
            rest.append(argument)
        elif equals:
            overrides.append((key, value))
        elif remaining and not remaining[0].startswith("--"):
            overrides.append((key, remaining.popleft()))
        else:
            mistakes.append(_no_value(key))
    return overrides, rest, mistakes


def _no_value(key: str) -> str:
    return f"--{key}: needs a value, --{key} VALUE; write --{key}=VALUE for a value with leading --"


def _explain_unknown(arguments: Sequence[str], flags: Sequence[str]) -> Iterator[str]:
    """A line for each unknown argument; the argument after an unknown option is its value."""
    after_option = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if argument.startswith("-"):
            close = difflib.get_close_matches(name, flags, n=1, cutoff=0.7)
            mistake = unknown_key((name.lstrip("-"),), "--")
            yield f"{name}: unknown; did you mean {close[0]}?" if close else f"--{mistake}"
        elif not after_option:
            yield f"{argument}: unexpected; expected one CONFIG.toml and --table.key VALUE"
        after_option = argument.startswith("-") and not equals


def _pointer() -> str:
    names = ", ".join(table.path for table in tables())
    text = (
        "Every setting of CONFIG.toml is also an option, --table.key VALUE. --help settings "
        f"explains all of them, --help settings TABLE those of {names}."
    )
    return "\n".join(textwrap.wrap(text, width=WIDTH))


def settings_help(table: str = "") -> str:
    """Every setting with its allowed values, default and description, grouped by table.

    Args:
        table: only this table or key.

    Raises:
        ConfigError: if there is no such table or key.
    """
    shown = [one for one in settings() if f"{one.path}.".startswith(f"{table}." if table else "")]
    if not shown:
        raise ConfigError(f"command line: --help settings {unknown_key(tuple(table.split('.')))}")
    parts = [] if table else [_INTRODUCTION]
    for group in tables():
        entries = [_entry(one) for one in shown if one.path.startswith(f"{group.path}.")]
        if entries:
            parts += [f"{group.path}: {group.description}", *entries, ""]
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
    default = setting.default
    if setting.required:
        return "required"
    if "implied" in setting.node:
        return f"default: {setting.node['implied']}"
    if isinstance(default, dict) and "short" in setting.node:
        default = {key: value for key, value in default.items() if value}
    return "optional" if default is None else f"default: {show_value(default)}"
