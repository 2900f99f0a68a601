"""Flags that several commands share, and the files that flags name."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

SUPERVISOR = "GEMMA_GRPO_SUPERVISOR"
"""Environment variable of a run's process and of all that it starts: its parent's mark."""
SUBMITTED = "GEMMA_GRPO_SUBMITTED"
"""Environment variable, set while launch/submit.sh checks a request for another machine."""
RESTARTED_WHY = "GEMMA_GRPO_RESTARTED"
"""Environment variable of a run's process that its parent has started again: why."""


class Parser(argparse.ArgumentParser):
    """Reports a mistake as one line."""

    def error(self, message: str) -> NoReturn:
        """Raises `ValueError`, which `launch.exits.exit_status` shows."""
        raise ValueError(f"command line: {message}; --help describes the command")


def command_flags() -> argparse.ArgumentParser:
    """Returns an empty parser for a command's own flags, as `configs.cli.parse` takes it."""
    return argparse.ArgumentParser(add_help=False)


def add_json(
    parser: argparse.ArgumentParser,
    *,
    default: str = "",
    what: str = "write the figures that are shown to FILE as JSON",
) -> None:
    """Adds `--json FILE`; `default` is where the figures go without the flag, `what` its help."""
    otherwise = f" (default: {default})" if default else ""
    parser.add_argument("--json", metavar="FILE", help=f"{what}{otherwise}")


def json_file(flags: argparse.Namespace) -> Path | None:
    """Returns the path that `--json` names; None without the flag.

    Raises:
        ValueError: if the file cannot be written.
    """
    return None if flags.json is None else output_file("--json", flags.json)


def write_figures(file: Path | None, figures: Mapping[str, Any]) -> None:
    """Writes the figures that a command shows to the file of `--json`; None: nothing."""
    if file is not None:
        text = json.dumps(figures, indent=2, ensure_ascii=False) + "\n"
        # Texts of a user's reward may hold halves of surrogate pairs.
        file.write_text(text, encoding="utf-8", errors="backslashreplace")


def output_file(flag: str, file: str) -> Path:
    """Returns the path of an output file, resolved like paths in a configuration.

    Checks before the work starts that the file can be written; an existing file stays unchanged.

    Raises:
        ValueError: if it cannot be written.
    """
    # Imported late: `launch.bench` shows its help without pydantic.
    from configs.base import home, scheme_problem

    path, problem = home() / Path(file).expanduser(), scheme_problem(file)
    if problem is None and path.is_dir():
        problem = f"{path} is a folder; name a file"
    elif problem is None and not path.parent.is_dir():
        problem = f"no folder {path.parent}"
    elif problem is None and not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = f"{path} cannot be written"
    if problem is not None:
        raise ValueError(f"command line: {flag}: {problem}")
    return path
