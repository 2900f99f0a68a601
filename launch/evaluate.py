"""Measures base and tuned policy in one run, by the protocol of the configuration.

    python -m launch.evaluate CONFIG.toml [--checkpoint PATH | --base-only] [--json FILE]

This process never imports JAX, which would take the devices from the samplers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.cli import parse
from configs.load import AS_TRAINED, load_config
from launch.exits import exit_status

if TYPE_CHECKING:
    from launch.evaluation import Prepared

DESCRIPTION = """\
Measure the base and the tuned policy on the test split and on eval.sets, in one run and on the same
prompts, by the protocol of the configuration. CONFIG.toml may also be a run folder.
Exit status: 0 done, 1 it failed, 2 a mistake in the request, 130 / 143 after Ctrl-C / SIGTERM."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    given = sys.argv[1:] if argv is None else argv
    return exit_status(lambda: _prepare(given), _run)


def _prepare(argv: Sequence[str]) -> Prepared:
    command = parse(
        argv,
        prog="python -m launch.evaluate",
        description=DESCRIPTION,
        flags=_flags(),
    )
    config = load_config(command.path, (*AS_TRAINED, *command.overrides))
    # Imported late: `--help` and mistakes in the configuration need none of it.
    from launch.evaluation import prepare

    return prepare(
        config,
        checkpoint=command.flags.checkpoint,
        base_only=command.flags.base_only,
        json_file=command.flags.json,
    )


def _run(prepared: Prepared) -> int:
    from launch.evaluation import run

    return run(prepared)


def _flags() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument(
        "--checkpoint",
        metavar="PATH",
        help="the adapter: a run folder, one of its checkpoints, an export or a PEFT folder "
        "(default: the run that CONFIG.toml names, its best checkpoint by validation)",
    )
    flags.add_argument("--base-only", action="store_true", help="measure the base alone")
    flags.add_argument(
        "--json",
        metavar="FILE",
        help="write the result there and each answer beside it, as FILE's name.answers.jsonl "
        "(default: in the run folder's evaluations/, if there is a run)",
    )
    return flags


if __name__ == "__main__":
    sys.exit(main())
