"""Lists runs and their checkpoints.

python -m launch.runs [RUNS_FOLDER | RUN_DIR]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.exits import exit_status, print_lines
from launch.flags import Parser, add_json, json_file, write_figures

DESCRIPTION = """\
List the runs of a folder, the latest first, or the checkpoints of one run: their step, when they
were complete, and why they are kept.

To begin another run from a checkpoint, with its optimizer state, give launch.train --run.fork
RUN_DIR@STEP and another --run.name.

Exit status: 0 done, 2 a mistake in the request (no run)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status(lambda: _show(argv))


def _show(argv: Sequence[str] | None) -> int:
    """Prints the tables; writes nothing into the folders.

    Raises:
        ValueError: if there is no run.
        FileNotFoundError: if there is no such folder.
    """
    flags = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    # Imported late: `--help` needs none of it.
    from configs.base import nearest_hint
    from pipeline.run.report.run_list import (
        RunFacts,
        checkpoint_lines,
        read_facts,
        run_folders,
        run_lines,
    )
    from pipeline.run.run_folder import RunFolder

    path, file = flags.path, json_file(flags)
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such folder{nearest_hint(path)}")
    is_run = RunFolder(path).holds_run
    paths = [path] if is_run else run_folders(path)
    if not paths:
        raise ValueError(f"{path}: neither a run folder nor a folder of runs: no config.json")
    facts, unreadable = list[RunFacts](), list[str]()
    for one in paths:
        try:
            facts.append(read_facts(one))
        except (ValueError, OSError) as error:
            unreadable.append(str(error))
    if is_run and unreadable:
        raise ValueError(*unreadable)
    facts.sort(key=lambda run: run.last_activity, reverse=True)
    print_lines([*(checkpoint_lines(facts[0]) if is_run else run_lines(facts)), *unreadable])
    runs = [one.to_json() for one in facts]
    write_figures(file, {"runs": runs, "unreadable": unreadable})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m launch.runs",
        usage="%(prog)s [RUNS_FOLDER | RUN_DIR] [--json FILE]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "path",
        metavar="RUNS_FOLDER | RUN_DIR",
        nargs="?",
        type=Path,
        default=Path("runs"),
        help="a folder of runs or a run folder (default: runs)",
    )
    add_json(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
