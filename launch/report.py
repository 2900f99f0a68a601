"""Writes a report of a run, or a comparison of several, as one HTML page.

    python -m launch.report RUN_DIR [RUN_DIR ...] [--out FILE]

The page loads nothing else: it can be sent, archived, and opened without a network.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.exits import exit_status
from launch.flags import Parser, output_file

DESCRIPTION = """\
Write a report of a run as one HTML page: a verdict in words, key figures, curves, where the time
went, rollouts through time, alarms and faults, plan and reality, settings. Unfinished, failed and
running runs also have one. Several runs are compared. Exit status: 0 written, 2 a mistake in the
request."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = Parser(
        prog="python -m launch.report",
        usage="python -m launch.report RUN_DIR [RUN_DIR ...] [--out FILE]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="folder of a run")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the page (default: report.html in the first folder; comparison.html for several)",
    )
    flags = parser.parse_args(argv)
    # Imported late: `--help` needs none of it.
    from configs.base import home, nearest_hint
    from pipeline.run.record_files import write_atomically
    from pipeline.run.report.comparison_page import comparison_page
    from pipeline.run.report.run_page import run_page
    from pipeline.run.report.run_records import read_run
    from pipeline.run.report.verdict import verdict

    folders = [home() / Path(one).expanduser() for one in flags.run_dirs]
    missing = [
        f"command line: RUN_DIR: no folder {folder}{nearest_hint(folder)}"
        for folder in folders
        if not folder.is_dir()
    ]
    if missing:
        raise FileNotFoundError("\n".join(missing))
    name = "report.html" if len(folders) == 1 else "comparison.html"
    out = output_file("--out", flags.out or str(folders[0] / name))
    runs = [read_run(folder) for folder in folders]
    page = run_page(runs[0]) if len(runs) == 1 else comparison_page(runs)
    # Completions may contain lone surrogates.
    write_atomically(out, page.encode("utf-8", errors="backslashreplace"))
    for run in runs:
        found = verdict(run)
        sentences = [found.learning.sentence, found.health.sentence, found.bound.sentence]
        print(f"{run.name}: {' '.join(sentences)}")
    print(f"report: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
