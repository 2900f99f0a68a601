"""Starts a run, resumes it, or says that it is finished: the one way to start anything.

    python -m launch.train CONFIG.toml [--table.key VALUE ...] [--dry-run] [--extend 1h]
    python -m launch.train CONFIG.toml --rehearse [--random-weights] [--json FILE]

This process never imports JAX, which would take the devices from the actors.
"""

from __future__ import annotations

import time

STARTED = time.monotonic()  # the budget's clock starts with the process

import argparse
import asyncio
import sys
from collections.abc import Sequence

from configs.cli import CommandLine, parse
from configs.errors import MistakeCollector
from configs.load import config_to_json, read_config
from launch.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_MISTAKE, Failure
from launch.output_file import output_file

DESCRIPTION = """\
Train a LoRA on a Gemma with GRPO. The same command again resumes the run; a finished run says so.
With --rehearse every phase is done once, as full as it can be, and compared with the plan; a run of
that name, if there is one, is not touched.
Exit status: 0 done, 1 it failed, 2 a mistake in the request, 130 / 143 after Ctrl-C / SIGTERM
(checkpointed)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    try:
        command = parse_command(sys.argv[1:] if argv is None else argv)
        return _rehearse(command) if command.flags.rehearse else _run(command)
    except (ValueError, FileNotFoundError) as mistake:
        # Only what is refused before a run starts; `session` keeps later errors as they are.
        print(mistake, file=sys.stderr)
        return EXIT_MISTAKE
    except Failure as failure:
        print(failure, file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        # Before `session` listens, or a second time.
        return EXIT_INTERRUPTED


def parse_command(argv: Sequence[str]) -> CommandLine:
    """The arguments of this command; see `configs.cli.parse`."""
    return parse(argv, prog="python -m launch.train", description=DESCRIPTION, flags=_flags())


def _flags() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument(
        "--dry-run",
        action="store_true",
        help="check configuration, data, model folder, run folder and, for a run that is not "
        "submitted, the devices of this machine; print the settings, start nothing",
    )
    flags.add_argument(
        "--extend",
        metavar="AMOUNT",
        help="give an existing run more of its budget: steps (50) or time (1h)",
    )
    flags.add_argument(
        "--rehearse",
        action="store_true",
        help="do every phase once at full shape on this machine, tell what it takes beside what is "
        "planned, and leave nothing behind but compiled programs and measured speeds in the cache",
    )
    flags.add_argument(
        "--random-weights",
        action="store_true",
        help="with --rehearse: random weights in the model's sizes, so that only a tokenizer is "
        "needed, and a config.json or a known name",
    )
    flags.add_argument(
        "--json", metavar="FILE", help="with --rehearse: write what is shown as JSON"
    )
    return flags


def _check_flags(flags: argparse.Namespace) -> None:
    """Refuses flags that would do nothing.

    Raises:
        ValueError: with a line for each.
    """
    with_it = {"--random-weights": flags.random_weights, "--json": flags.json is not None}
    without = {"--dry-run": flags.dry_run, "--extend": flags.extend is not None}
    excluded = without if flags.rehearse else with_it
    what = "means nothing with --rehearse; remove one"
    if not flags.rehearse:
        what = "needs --rehearse; add it, or remove this"
    mistakes = [f"command line: {flag}: {what}" for flag, given in excluded.items() if given]
    if mistakes:
        raise ValueError("\n".join(mistakes))


def _rehearse(command: CommandLine) -> int:
    read, flags = read_config(command.path, command.overrides), command.flags
    found = MistakeCollector(read.mistakes)
    found.attempt(_check_flags, flags)
    found.raise_if_any()
    config = read.config
    assert config is not None
    from launch.rehearsal.command import Request, rehearse

    json_file = None if flags.json is None else output_file("--json", flags.json)
    return rehearse(Request(config, flags.random_weights, json_file, STARTED))


def _run(command: CommandLine) -> int:
    read, extend = read_config(command.path, command.overrides), command.flags.extend
    found = MistakeCollector(read.mistakes, read.invalid)
    found.attempt(_check_flags, command.flags)
    config = read.config
    if config is None:
        found.raise_if_any()
    assert config is not None
    # Imported late: `--help` needs none of it.
    from launch.preparation import finished, prepare
    from launch.submission import waited_s

    if found.intact("run.dir", "run.name", "budget"):
        done = found.attempt(finished, config, extend=extend)
        if done:
            found.raise_if_any()
            print(done)
            return 0
    waited = None
    if found.intact("budget"):
        waited = found.attempt(waited_s, config.budget, started=STARTED)
    prepared = prepare(config, extend=extend, waited_s=waited or 0.0, found=found)
    if command.flags.dry_run:
        print(config_to_json(config))
        return 0
    from launch.session import run_session

    return asyncio.run(run_session(prepared, started=STARTED))


if __name__ == "__main__":
    sys.exit(main())
