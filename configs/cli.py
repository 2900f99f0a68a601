"""The command line that every command shares: `CONFIG.toml [--table.key VALUE ...] [flags]`."""

from __future__ import annotations

import argparse
import difflib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, NoReturn

from configs.errors import ConfigError, unknown_key
from configs.help import settings_help
from configs.load import presets
from configs.overrides import Override


class CommandLine(NamedTuple):
    """A parsed command line: what `load_config` takes, and the command's own flags."""

    path: str
    overrides: tuple[Override, ...]
    flags: argparse.Namespace


def parse(
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    flags: argparse.ArgumentParser | None = None,
    argument: Literal["CONFIG.toml", "RUN_DIR"] = "CONFIG.toml",
) -> CommandLine:
    """Splits the arguments of a command into config file, overrides and the command's own flags.

    Overrides are the arguments with a dot in their name; their keys and values are checked by
    `load_config`. `--help` prints flags and settings and exits with status 0.

    Args:
        argv: the arguments, without the program's name.
        prog: how the command is called, for the usage line.
        description: what the command does.
        flags: a parser made with `add_help=False` that has the command's own flags.
        argument: what is worked on: a configuration, or the folder of a run.

    Raises:
        ConfigError: with every mistake in the form of the arguments, one line each.
    """
    parser = _Parser(
        prog=prog,
        usage=f"{prog} {argument} [--table.key VALUE ...] [options]",
        description=description,
        epilog=settings_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[flags] if flags else [],
        allow_abbrev=False,
    )
    meaning = {"CONFIG.toml": "the run's configuration", "RUN_DIR": "the run's folder"}[argument]
    parser.add_argument("path", metavar=argument, nargs="?", help=meaning)
    overrides, rest, mistakes = _split(argv)
    namespace, unknown = parser.parse_known_args(rest)
    mistakes += _explain_unknown(unknown, parser.flag_names())
    path = vars(namespace).pop("path")
    if path is None and not unknown:
        known = f"; presets: {', '.join(presets())}" if argument == "CONFIG.toml" else ""
        mistakes.append(f"{argument} is missing{known}")
    if mistakes:
        raise ConfigError(*(f"command line: {mistake}" for mistake in mistakes))
    return CommandLine(path, tuple(overrides), namespace)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}")

    def flag_names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]


def _split(argv: Sequence[str]) -> tuple[list[Override], list[str], list[str]]:
    """Overrides, everything else, and a line for each override without a value."""
    overrides: list[Override] = []
    rest: list[str] = []
    mistakes: list[str] = []
    left = deque(argv)
    while left:
        argument = left.popleft()
        name, equals, value = argument.partition("=")
        key = name.removeprefix("--")
        if key == name or "." not in key:
            rest.append(argument)
        elif equals:
            overrides.append((key, value))
        elif left and not left[0].startswith("--"):
            overrides.append((key, left.popleft()))
        else:
            mistakes.append(_no_value(key))
    return overrides, rest, mistakes


def _no_value(key: str) -> str:
    return f"--{key}: needs a value, --{key} VALUE; a value that begins with -- goes after ="


def _explain_unknown(arguments: Sequence[str], flags: Sequence[str]) -> Iterator[str]:
    """A line for each argument that nothing takes; what follows an unknown option is its value."""
    after_option = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if argument.startswith("-"):
            close = difflib.get_close_matches(name, flags, n=1, cutoff=0.7)
            meant = unknown_key((name.lstrip("-"),), "--")
            yield f"{name}: unknown; did you mean {close[0]}?" if close else f"--{meant}"
        elif not after_option:
            yield f"{argument}: unexpected; one CONFIG.toml, and settings as --table.key VALUE"
        after_option = argument.startswith("-") and not equals
