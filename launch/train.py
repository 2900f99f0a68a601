"""Starts a run, resumes it, or says that it is finished: the one way to start anything.

    python -m launch.train CONFIG.toml [--table.key VALUE ...] [--dry-run] [--extend 1h]

This process never imports JAX, which would take the devices from the actors.
"""

from __future__ import annotations

import time

STARTED = time.monotonic()  # the budget's clock starts with the process

import argparse
import asyncio
import sys
from collections.abc import Sequence

from configs.cli import parse
from configs.load import config_to_json, load_config
from configs.schema import Config

EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130
DESCRIPTION = """\
Train a LoRA on a Gemma with GRPO. The same command again resumes the run; a finished run says so.
Exit status: 0 done, 2 a mistake in the request, 130 / 143 after Ctrl-C / SIGTERM (checkpointed)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    try:
        command = parse(
            sys.argv[1:] if argv is None else argv,
            prog="python -m launch.train",
            description=DESCRIPTION,
            flags=_flags(),
        )
        config = load_config(command.path, command.overrides)
        return _run(config, dry=command.flags.dry_run, extend=command.flags.extend)
    except (ValueError, FileNotFoundError) as mistake:
        # Only what is refused before a run starts; `session` keeps later errors as they are.
        print(mistake, file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        # Before `session` listens, or a second time.
        return EXIT_INTERRUPTED


def _flags() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument(
        "--dry-run",
        action="store_true",
        help="check configuration, data and model folder, print the settings, start nothing",
    )
    flags.add_argument(
        "--extend",
        metavar="AMOUNT",
        help="give an existing run more of its budget: steps (50) or time (1h)",
    )
    return flags


def _run(config: Config, *, dry: bool, extend: str | None) -> int:
    # Imported late: `--help` and mistakes in the configuration need none of it.
    from launch.preparation import finished, prepare
    from launch.submission import waited_s

    done = finished(config, extend=extend)
    if done:
        print(done)
        return 0
    prepared = prepare(config, extend=extend, waited_s=waited_s(config.budget, started=STARTED))
    if dry:
        print(config_to_json(config))
        return 0
    from launch.session import run_session

    return asyncio.run(run_session(prepared, started=STARTED))


if __name__ == "__main__":
    sys.exit(main())
