"""Tries reward functions offline: on probes of the training data, or on recorded rollouts.

    python -m launch.reward CONFIG.toml [--rows N] [--cases FILE] [--table.key VALUE ...]
    python -m launch.reward CONFIG.toml --rollouts RUN_DIR [--steps A:B]

Needs no model, no devices, no JAX and no Ray.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from configs.cli import parse
from configs.errors import MistakeCollector
from configs.load import load_config
from launch.exits import EXIT_FAILED, exit_status, print_lines
from launch.flags import add_json, command_flags, json_file, output_file, write_figures

DESCRIPTION = """\
Try reward functions offline. They score completions of which it is known how they must compare:
reference answers, near misses, empty text, known reward hacks and cases of yours. With --rollouts
they score the recorded rollouts of a run again, which are compared with the recorded rewards.
Exit status: 0 done, 1 the reference is not on top, a case differs, or a function has errors, 2 a
mistake in the request, 130 after Ctrl-C."""

_ROWS = 32


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status(lambda: _run(argv))


def _flags() -> argparse.ArgumentParser:
    flags = command_flags()
    flags.add_argument(
        "--rows",
        metavar="N",
        type=int,
        help=f"rows of the training data (default: {_ROWS})",
    )
    flags.add_argument(
        "--form",
        metavar="TEXT",
        help="how a right completion looks, with the words REASONING and ANSWER, e.g. "
        "'REASONING \\boxed{ANSWER}' (default: the tags of [prompt])",
    )
    flags.add_argument(
        "--cases",
        metavar="FILE",
        help='also check completions of yours, one JSON object a line: {"completion": TEXT, '
        '"row": NUMBER or COLUMNS, "expect": NUMBER or {PART: NUMBER} or {"above": NAME}}',
    )
    flags.add_argument(
        "--rollouts", metavar="RUN_DIR", help="score the recorded rollouts of a run again"
    )
    flags.add_argument(
        "--steps", metavar="A:B", help="with --rollouts: steps A to B only (A: or :B; default: all)"
    )
    flags.add_argument(
        "--log", metavar="FILE", help="append what the functions print, and tracebacks, to FILE"
    )
    add_json(flags)
    return flags


def _run(argv: Sequence[str] | None) -> int:
    prog = "python -m launch.reward"
    command = parse(argv, prog=prog, description=DESCRIPTION, flags=_flags())
    config, flags = load_config(command.path, command.overrides), command.flags
    found = MistakeCollector()
    found.attempt(_check_flags, flags)
    file = found.attempt(json_file, flags)
    log_file = None if flags.log is None else found.attempt(output_file, "--log", flags.log)
    found.raise_if_any()
    # Imported late: `--help` and configuration errors do not need these modules.
    from launch.reward_check import check
    from launch.reward_rollouts import rescore
    from rewards.processes.log import RewardLog

    log = RewardLog(log_file)
    if flags.rollouts is None:
        rows = _ROWS if flags.rows is None else flags.rows
        figures, lines = check(config, log=log, rows=rows, form=flags.form, cases=flags.cases)
    else:
        figures, lines = rescore(config, flags.rollouts, log=log, steps=flags.steps)
    print_lines([*log.notices(), *lines])
    write_figures(file, figures)
    return 0 if figures["passed"] else EXIT_FAILED


def _check_flags(flags: argparse.Namespace) -> None:
    """Refuses numbers that are too low, and flags that would have no effect.

    Raises:
        ValueError: with one line per flag.
    """
    mistakes = []
    if flags.rollouts is None and flags.steps is not None:
        mistakes.append("command line: --steps: needs --rollouts; add it, or remove this flag")
    if flags.rollouts is not None:
        mistakes += [
            f"command line: --{name}: has no effect with --rollouts; remove one of them"
            for name in ("rows", "form", "cases")
            if getattr(flags, name) is not None
        ]
    if flags.rows is not None and flags.rows < 1:
        mistakes.append(f"command line: --rows {flags.rows}: must be at least 1; nearest valid: 1")
    if flags.form is not None and "ANSWER" not in flags.form:
        mistakes.append(f"command line: --form {flags.form!r}: must contain the word ANSWER")
    if mistakes:
        raise ValueError("\n".join(mistakes))


if __name__ == "__main__":
    sys.exit(main())
