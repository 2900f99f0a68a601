"""Starts a run, resumes it, or reports that it is finished: the one way to start anything.

    python -m launch.train CONFIG.toml [--table.key VALUE ...] [--dry-run] [--extend 1h]
                                       [--accept KEY] [--no-supervise]

It is the parent of the run's process, which it starts again if it dies (`launch/supervise.py`).
This process never imports JAX, which would take the devices from the actors.
"""

from __future__ import annotations

import time

STARTED = time.monotonic()  # the budget's clock starts with the process

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from configs.cli import CommandLine, parse
from configs.errors import ConfigError, MistakeCollector
from configs.load import changed_settings, config_to_json, read_config
from configs.resume import ACCEPTED_KEYS, REWARDS, check_accept
from configs.toml_text import show_value
from launch.exits import EXIT_FAILED, EXIT_REPORTED, exit_status, say
from launch.flags import SUBMITTED, SUPERVISOR, add_json, command_flags, json_file, write_figures

if TYPE_CHECKING:
    from launch.preparation import Prepared

DESCRIPTION = """\
Train a LoRA on a Gemma with GRPO. The same command again resumes the run, or reports that it is
finished.
Exit status: 0 done, 1 it failed, 2 a mistake in the request, 75 the cluster of a submitted job is
gone (submitted again, the job continues), 130 / 143 / 129 after Ctrl-C / SIGTERM / the end of the
terminal (checkpointed)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    # Mistakes are found before the run starts; `session` handles later errors itself.
    given = sys.argv[1:] if argv is None else argv
    prog, flags = "python -m launch.train", train_flags()
    return exit_status(
        lambda: _run(parse(given, prog=prog, description=DESCRIPTION, flags=flags), given)
    )


def train_flags() -> argparse.ArgumentParser:
    """The flags of this command, which `launch.submit` also takes."""
    flags = command_flags()
    flags.add_argument(
        "--dry-run",
        action="store_true",
        help="check configuration, data, model folder, run folder and, for a run that is not "
        "submitted, the devices of this machine; try the rewards on a few rows; print a prompt, "
        "the settings that are not defaults and the verdict; start nothing",
    )
    add_json(flags, what="with --dry-run: write all settings to FILE as JSON")
    flags.add_argument(
        "--extend",
        metavar="AMOUNT",
        help="extend the budget of an existing run by steps (50) or time (1h)",
    )
    flags.add_argument(
        "--accept",
        metavar="KEY",
        action="append",
        default=[],
        help=f"resume a run with a changed setting; may be repeated: {', '.join(ACCEPTED_KEYS)}, "
        f"rewards.functions.NAME.weight, or {REWARDS}: reward functions, their arguments, weights "
        "and code; the change is journaled, and with a reward as eval.metric the search for the "
        "best version starts anew",
    )
    flags.add_argument(
        "--no-supervise",
        dest="supervise",
        action="store_false",
        help="for debuggers: run in this process, and do not start the run again where it dies or "
        "hangs; see faults.restarts",
    )
    return flags


def _run(command: CommandLine, argv: Sequence[str]) -> int:
    read = read_config(command.path, command.overrides)
    extend, accept = command.flags.extend, command.flags.accept
    found = MistakeCollector(read.mistakes)
    found.attempt(check_accept, accept)
    config = read.config
    file = json_file(command.flags)
    if file is not None and not command.flags.dry_run:
        found.add(ConfigError("command line: --json: only with --dry-run"))
    for line in read.assumed if SUPERVISOR not in os.environ else ():
        say(line, file=sys.stderr)
    if read.assumes_platform and SUBMITTED in os.environ:
        other = "for a cluster with other devices set plan.platform and plan.learner_devices"
        say(other, file=sys.stderr)
    # Imported late: `--help` needs none of it.
    from launch.fork import forked
    from launch.preparation import finished, placed, prepare
    from pipeline.run.mirror import fetch_run

    if found.is_empty and not command.flags.dry_run:
        fetch_run(config, say=say)
    config = found.attempt(forked, config) or config
    if found.is_empty:
        config = found.attempt(placed, config) or config
    message = found.attempt(finished, config, extend=extend, accept=accept)
    if message:
        found.raise_if_any()
        say(message)
        return 0
    # With mistakes it goes on in this process, which finds the others.
    if command.flags.supervise and not command.flags.dry_run and found.is_empty:
        from launch.supervise import supervise

        return supervise(argv, config)
    prepared = prepare(config, extend=extend, accept=accept, found=found)
    if command.flags.dry_run:
        return _dry_run(prepared, file)
    from launch.session import run_session

    return asyncio.run(run_session(prepared, started=STARTED))


def _dry_run(prepared: Prepared, file: Path | None) -> int:
    """Shows a prompt, the settings that are not defaults, what the rewards do, and the verdict."""
    from launch.reward_check import dry_run, prompt_lines

    config, folder = prepared.config, prepared.folder
    changed = dict(changed_settings(config))
    say("\n".join(prompt_lines(prepared)))
    say("settings that are not defaults (--json FILE writes all):")
    for key, value in changed.items():
        say(f"    {key} = {show_value(value)}")
    status = dry_run(prepared)
    valid, begun = status == 0, "resume" if folder.holds_run else "start"
    prompts = {name: len(split.prompts) for name, split in prepared.data.splits()}
    whole = json.loads(config_to_json(config))
    write_figures(file, {"valid": valid, "prompts": prompts, "changed": changed, "config": whole})
    if valid:
        say(f"the request is valid: without --dry-run it {begun}s the run in {folder.path}")
    else:
        say("the run is refused: a reward has no score for any completion", file=sys.stderr)
    return status


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
