"""Starts a run, resumes it, or reports that it is finished: the one way to start anything.

    python -m launch.train CONFIG.toml [--table.key VALUE ...] [--dry-run] [--extend 1h]
                                       [--no-supervise]
    python -m launch.train CONFIG.toml --rehearse [--random-weights] [--json FILE]

It is the parent of the run's process, which it starts again if it dies (`launch/supervise.py`).
This process never imports JAX, which would take the devices from the actors.
"""

from __future__ import annotations

import time

STARTED = time.monotonic()  # the budget's clock starts with the process

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from configs.cli import CommandLine, parse
from configs.errors import MistakeCollector
from configs.load import config_to_json, read_config
from configs.resume import REWARDS
from configs.schema import Config
from launch.exits import EXIT_FAILED, EXIT_REPORTED, exit_status, say
from launch.flags import SUPERVISOR, add_json, command_flags, json_file

DESCRIPTION = """\
Train a LoRA on a Gemma with GRPO. The same command again resumes the run, or reports that it is
finished. With --rehearse one step runs at full length, up to an export, and is compared with the
plan; an existing run of that name is not touched.
Exit status: 0 done, 1 it failed, 2 a mistake in the request, 75 the cluster of a submitted job is
gone (submitted again, the job continues), 130 / 143 / 129 after Ctrl-C / SIGTERM / the end of the
terminal (checkpointed)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    # Mistakes are found before the run starts; `session` handles later errors itself.
    given = sys.argv[1:] if argv is None else argv
    return exit_status(lambda: _command(parse_command(given), given), int)


def parse_command(argv: Sequence[str] | None) -> CommandLine:
    """Parses the arguments of this command; see `configs.cli.parse`."""
    return parse(argv, prog="python -m launch.train", description=DESCRIPTION, flags=_flags())


def _flags() -> argparse.ArgumentParser:
    flags = command_flags()
    flags.add_argument(
        "--dry-run",
        action="store_true",
        help="check configuration, data, model folder, run folder and, for a run that is not "
        "submitted, the devices of this machine; try the rewards on a few rows; print a prompt and "
        "the settings, start nothing",
    )
    flags.add_argument(
        "--extend",
        metavar="AMOUNT",
        help="extend the budget of an existing run by steps (50) or time (1h)",
    )
    flags.add_argument(
        "--accept",
        metavar="WHAT",
        choices=[REWARDS],
        action="append",
        default=[],
        help="rewards: resume a run whose reward functions, their arguments, weights or code have "
        "changed; the change is journaled, and with a reward as eval.metric the search for the "
        "best version starts anew",
    )
    flags.add_argument(
        "--adopt",
        metavar="DIR",
        help="without a run on this host, continue the one in DIR: a copy of a run folder, or the "
        "mirror of a run (MIRROR/NAME), a folder or a URL; it is only read",
    )
    flags.add_argument(
        "--rehearse",
        action="store_true",
        help="run one step at full length on this machine, show time and memory beside the "
        "plan's, and keep only compiled programs and measured speeds in the cache",
    )
    flags.add_argument(
        "--random-weights",
        action="store_true",
        help="with --rehearse: use random weights of the model's shapes; needs only a tokenizer "
        "and a config.json or a known model name",
    )
    flags.add_argument(
        "--no-supervise",
        dest="supervise",
        action="store_false",
        help="for debuggers: run in this process, and do not start the run again where it dies or "
        "hangs; see faults.restarts",
    )
    add_json(flags, only_with="--rehearse")
    return flags


def _check_flags(flags: argparse.Namespace) -> None:
    """Refuses flags that would have no effect.

    Raises:
        ValueError: with one line per flag.
    """
    if flags.rehearse:
        excluded = {
            "--dry-run": flags.dry_run,
            "--extend": flags.extend is not None,
            "--accept": bool(flags.accept),
            "--adopt": flags.adopt is not None,
        }
        problem = "has no effect with --rehearse; remove one of them"
    else:
        excluded = {"--random-weights": flags.random_weights, "--json": flags.json is not None}
        problem = "needs --rehearse; add it, or remove this flag"
    mistakes = [f"command line: {flag}: {problem}" for flag, given in excluded.items() if given]
    if mistakes:
        raise ValueError("\n".join(mistakes))


def _command(command: CommandLine, argv: Sequence[str]) -> int:
    return _rehearse(command) if command.flags.rehearse else _run(command, argv)


def _rehearse(command: CommandLine) -> int:
    read, flags = read_config(command.path, command.overrides), command.flags
    found = MistakeCollector(read.mistakes)
    found.attempt(_check_flags, flags)
    found.raise_if_any()
    config = read.config
    assert config is not None
    from launch.preparation import placed
    from launch.rehearsal import rehearse

    return rehearse(placed(config), random_weights=flags.random_weights, json_file=json_file(flags))


def _run(command: CommandLine, argv: Sequence[str]) -> int:
    read = read_config(command.path, command.overrides)
    extend, accept = command.flags.extend, command.flags.accept
    found = MistakeCollector(read.mistakes, read.invalid)
    found.attempt(_check_flags, command.flags)
    config = read.config
    if config is None:
        found.raise_if_any()
    assert config is not None
    # Imported late: `--help` needs none of it.
    from launch.fork import forked
    from launch.preparation import finished, in_force, placed, prepare
    from launch.submission import waited_s

    _fetch(config, command.flags, found)
    if found.intact("run", "lora.start"):
        config = found.attempt(forked, config) or config
    if found.intact("run.dir", "run.name"):
        config = found.attempt(in_force, config) or config
    if found.is_empty:
        config = found.attempt(placed, config) or config
    if found.intact("run.dir", "run.name", "budget"):
        message = found.attempt(finished, config, extend=extend, accept=accept)
        if message:
            found.raise_if_any()
            say(message)
            return 0
    # With mistakes it goes on in this process, which finds the others.
    if command.flags.supervise and not command.flags.dry_run and found.is_empty:
        from launch.supervise import supervise

        return supervise(argv, config)
    queued_s = None
    if found.intact("budget"):
        queued_s = found.attempt(waited_s, config.budget, started=STARTED)
    prepared = prepare(config, extend=extend, accept=accept, waited_s=queued_s or 0.0, found=found)
    if command.flags.dry_run:
        from launch.reward_check import dry_run, prompt_lines

        say("\n".join([*prompt_lines(prepared), config_to_json(prepared.config)]))
        return dry_run(prepared)
    from launch.session import run_session

    return asyncio.run(run_session(prepared, started=STARTED))


def _fetch(config: Config, flags: argparse.Namespace, found: MistakeCollector) -> None:
    """Fetches the run if this host has none; with --dry-run only `--adopt` is checked."""
    from pipeline.run.mirror import adopted, check_adopt, fetch_run

    if not flags.dry_run and found.is_empty:
        adopt = adopted(flags.adopt)
        found.attempt(fetch_run, config, adopt=adopt, accept=flags.accept, say=say)
        found.raise_if_any()
    elif flags.dry_run and found.intact("run.dir", "run.name"):
        found.attempt(check_adopt, config, flags.adopt, accept=flags.accept)


if __name__ == "__main__":
    status = main()
    if status == EXIT_FAILED and SUPERVISOR in os.environ:
        status = EXIT_REPORTED
    with suppress(OSError):  # the terminal is gone
        sys.stdout.flush()
        sys.stderr.flush()
    # Without Ray's exit handlers: they wait a minute for a cluster that is gone, and then change
    # the status.
    os._exit(status)
