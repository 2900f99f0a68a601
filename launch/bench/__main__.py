"""Measures what this project claims, its peers in the same run.

    python -m launch.bench NAME [--only PATTERN] [--json FILE]

This process imports nothing heavy: each row is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from launch.bench.child import in_child
from launch.bench.machine import machine
from launch.bench.table import Benchmark, Figures, Section
from launch.exits import exit_status

BENCHMARKS = {
    "hbm": "memory and estimated time on a v5e chip, by the TPU compiler; no TPU needed; an hour "
    "or more, each row some minutes",
    "learner": "vocabulary, top k and packing on this machine's CPU; some minutes",
    "rollout": "the rollout engine beside Tunix's sampler: speed on this machine's CPU, memory of "
    "a v5e chip by the TPU compiler; half an hour",
}
DESCRIPTION = """\
Measure what README claims, peers in the same run, each row in a process of its own. Progress goes
to standard error, the tables (Markdown) to standard output.
Exit status: 0 everything was measured and shows what it is to show, 1 something failed or does not,
2 a mistake in the request, 130 after Ctrl-C."""

Plan = tuple[argparse.Namespace, Sequence[Section]]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"command line: {message}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    given = sys.argv[1:] if argv is None else argv
    return exit_status(lambda: _prepare(given), lambda plan: _run(*plan))


def _prepare(argv: Sequence[str]) -> Plan:
    """The request, and the rows that it asks for.

    Raises:
        ValueError: what is wrong with the request, one line.
    """
    parser = _Parser(
        prog="python -m launch.bench",
        usage="python -m launch.bench NAME [options]",
        description=DESCRIPTION,
        epilog="benchmarks:\n" + "\n".join(f"  {n:<10}{what}" for n, what in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="which benchmark")
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        help="measure only rows whose SECTION/ROW has this in it; * and ? match anything",
    )
    parser.add_argument("--list", action="store_true", help="show the rows, measure nothing")
    parser.add_argument("--json", metavar="FILE", help="write there what the tables show")
    request, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ValueError(f"command line: {unknown[0]}: unknown; there are --only, --list, --json")
    names = ", ".join(BENCHMARKS)
    if request.name is None:
        raise ValueError(f"command line: NAME is missing; there are {names}")
    if request.name not in BENCHMARKS:
        raise ValueError(f"command line: {request.name}: no such benchmark; there are {names}")
    if request.json and not Path(request.json).absolute().parent.is_dir():
        raise ValueError(
            f"command line: --json {request.json}: its folder does not exist; nearest valid: "
            f"{Path(request.json).name}"
        )
    if request.json and Path(request.json).is_dir():
        raise ValueError(f"command line: --json {request.json}: is a folder; a file is wanted")
    benchmark: Benchmark = importlib.import_module(f"launch.bench.{request.name}").BENCHMARK
    return request, _chosen(benchmark.sections, request.only)


def _chosen(sections: Sequence[Section], pattern: str | None) -> list[Section]:
    if pattern is None:
        return list(sections)
    chosen = []
    for section in sections:
        rows = [r for r in section.rows if fnmatchcase(f"{section.name}/{r.name}", f"*{pattern}*")]
        if rows:
            chosen.append(
                Section(section.name, section.title, section.columns, rows, section.claims)
            )
    if not chosen:
        known = [f"{section.name}/{row.name}" for section in sections for row in section.rows]
        nearest = difflib.get_close_matches(pattern, known, n=1, cutoff=0.0)[0]
        raise ValueError(f"command line: --only {pattern}: no such row; nearest: {nearest}")
    return chosen


def _run(request: argparse.Namespace, sections: Sequence[Section]) -> int:
    if request.list:
        print(
            "\n".join(f"{section.name}/{row.name}" for section in sections for row in section.rows)
        )
        return 0
    found: dict[str, dict[str, Figures]] = {section.name: {} for section in sections}
    what = machine()
    good = True
    interrupted = False
    try:
        for place, row, figures in _measured(sections):
            found[place][row] = figures
            good &= "failed" not in figures
            if request.json:
                _write(Path(request.json), {"benchmark": request.name, **what, "sections": found})
    except KeyboardInterrupt:
        interrupted = True
    print("\n".join(f"{key}: {value}" for key, value in what.items()))
    for section in sections:
        print(f"\n{section.title}\n\n{section.table(found[section.name])}\n")
        for claim in () if interrupted else section.claims(found[section.name]):
            print(f"{'shown' if claim.holds else 'NOT SHOWN'}: {claim.text}")
            good &= claim.holds
    if interrupted:
        print("\ninterrupted: rows that are not there were not measured")
        return 130
    return 0 if good else 1


def _measured(sections: Sequence[Section]) -> Iterator[tuple[str, str, Figures]]:
    """Section, row and figures, one after another."""
    total = sum(len(section.rows) for section in sections)
    count = 0
    for section in sections:
        for row in section.rows:
            count += 1
            began = time.monotonic()
            print(f"[{count}/{total}] {section.name}/{row.name} ...", file=sys.stderr, flush=True)
            try:
                figures: Figures = in_child(
                    row.function, row.arguments, environment=row.environment
                )
            except RuntimeError as error:
                print(error, file=sys.stderr)
                figures = {"failed": str(error).splitlines()[-1]}
            seconds = time.monotonic() - began
            print(f"[{count}/{total}] {seconds:.0f} s", file=sys.stderr, flush=True)
            yield section.name, row.name, figures


def _write(path: Path, content: Any) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
