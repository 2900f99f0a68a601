"""Writes a run's policy in the formats of others.

    python -m launch.export RUN_DIR --out DIR [--format hf|peft|orbax ...] [--checkpoint best]

This process never imports JAX, which would take the devices from the exporter.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.cli import parse
from configs.load import load_config
from launch.exits import exit_status

if TYPE_CHECKING:
    from launch.exporting import Prepared

FORMATS = ("hf", "peft", "orbax")
DESCRIPTION = """\
Write a run's policy: hf, the merged model as a Hugging Face folder; peft, the adapter in adapter/;
orbax, the merged model as a flax checkpoint in flax/. Each is loaded back and compared with the
policy before it is put in place. It takes one device of the run's kind (--plan.platform cpu: none).
Exit status: 0 done, 1 it failed or the export is not the policy, 2 a mistake in the request,
130 / 143 after Ctrl-C / SIGTERM."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    given = sys.argv[1:] if argv is None else argv
    return exit_status(lambda: _prepare(given), _run)


def _prepare(argv: Sequence[str]) -> Prepared:
    command = parse(
        argv,
        prog="python -m launch.export",
        description=DESCRIPTION,
        flags=_flags(),
        argument="RUN_DIR",
    )
    flags = command.flags
    named = [("export.dtype", flags.dtype), ("export.shard_gib", flags.shard_gib)]
    given = tuple((key, value) for key, value in named if value is not None)
    config = load_config(command.path, (*command.overrides, *given))
    # Imported late: `--help` and mistakes in the configuration need none of it.
    from launch.exporting import prepare

    return prepare(
        config,
        run_dir=command.path,
        out=flags.out,
        formats=flags.format,
        checkpoint=flags.checkpoint,
        verify=not flags.no_verify,
    )


def _run(prepared: Prepared) -> int:
    from launch.exporting import run

    return run(prepared)


def _flags() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument(
        "--out", metavar="DIR", required=True, help="where to; must be empty or not there"
    )
    flags.add_argument(
        "--format",
        nargs="+",
        choices=FORMATS,
        default=["hf", "peft"],
        help="what is written (default: hf peft)",
    )
    flags.add_argument(
        "--checkpoint",
        metavar="WHICH",
        help="best (by validation), last, or a step (default: the best if one was kept, or last)",
    )
    flags.add_argument("--dtype", help="of the merged weights, as export.dtype")
    flags.add_argument("--shard-gib", metavar="GIB", help="largest file, as export.shard_gib")
    flags.add_argument("--no-verify", action="store_true", help="do not load back what was written")
    return flags


if __name__ == "__main__":
    sys.exit(main())
