"""Measures what this project claims, its peers in the same run.

    python -m launch.bench NAME [--only PATTERN] [--json FILE] [--plot FILE]

This process imports nothing heavy: each row is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from launch.bench.child import in_child
from launch.bench.machine import machine
from launch.bench.table import Benchmark, Figures, Row, Section
from launch.exits import exit_status

BENCHMARKS = {
    "balance": "sizes that calibration finds beside fixed ones and Tunix's recipe, on this "
    "machine's CPU; twenty minutes",
    "hbm": "memory and estimated time on a v5e chip, by the TPU compiler; no TPU needed; an hour "
    "or more, each row some minutes",
    "learner": "vocabulary, top k and packing on this machine's CPU; some minutes",
    "plan": "the planner's estimates of memory beside the TPU compiler's; no TPU needed; an hour, "
    "seconds where the compiler's answers are kept",
    "rollout": "the rollout engine beside Tunix's sampler: speed on this machine's CPU, memory of "
    "a v5e chip by the TPU compiler; half an hour",
    "sweep": "rollouts against slots, a v5e chip by the TPU compiler, this machine measured; also "
    "drawn; an hour or more",
}
DESCRIPTION = """\
Measure what README claims, peers in the same run, each row in a process of its own. Progress goes
to standard error, the tables (Markdown) to standard output.
Exit status: 0 everything was measured and shows what it is to show, 1 something failed or does not,
2 a mistake in the request, 130 after Ctrl-C."""

Plan = tuple[argparse.Namespace, Benchmark]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"command line: {message}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    given = sys.argv[1:] if argv is None else argv
    return exit_status(lambda: _prepare(given), lambda plan: _run(*plan))


def _prepare(argv: Sequence[str]) -> Plan:
    """The request, and the rows that it asks for, with the file of their picture.

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
    parser.add_argument("--plot", metavar="FILE", help="draw there, as PNG, where NAME draws")
    request, unknown = parser.parse_known_args(argv)
    if unknown:
        there = "--only, --list, --json, --plot"
        raise ValueError(f"command line: {unknown[0]}: unknown; there are {there}")
    names = ", ".join(BENCHMARKS)
    if request.name is None:
        raise ValueError(f"command line: NAME is missing; there are {names}")
    if request.name not in BENCHMARKS:
        raise ValueError(f"command line: {request.name}: no such benchmark; there are {names}")
    request.json = _output("--json", request.json)
    request.plot = _output("--plot", request.plot)
    benchmark: Benchmark = importlib.import_module(f"launch.bench.{request.name}_bench").BENCHMARK
    if request.plot and benchmark.draw is None:
        raise ValueError(f"command line: --plot: {request.name} draws nothing; sweep does")
    chosen = replace(
        benchmark,
        sections=_chosen(benchmark.sections, request.only),
        picture=request.plot or benchmark.picture,
    )
    return request, chosen


def _output(flag: str, file: str | None) -> str | None:
    """The absolute path of what a flag names.

    Raises:
        ValueError: if it cannot be written.
    """
    if file is None:
        return None
    # Imported late: nothing else here needs the configuration.
    from launch.output_file import output_file

    return str(output_file(flag, file))


def _chosen(sections: Sequence[Section], pattern: str | None) -> list[Section]:
    if pattern is None:
        return list(sections)
    chosen = []
    for section in sections:
        rows = [r for r in section.rows if fnmatchcase(f"{section.name}/{r.name}", f"*{pattern}*")]
        if rows:
            chosen.append(replace(section, rows=rows))
    if not chosen:
        known = [f"{section.name}/{row.name}" for section in sections for row in section.rows]
        nearest = difflib.get_close_matches(pattern, known, n=1, cutoff=0.0)[0]
        raise ValueError(f"command line: --only {pattern}: no such row; nearest: {nearest}")
    return chosen


def _run(request: argparse.Namespace, benchmark: Benchmark) -> int:
    sections = benchmark.sections
    if request.list:
        print(
            "\n".join(f"{section.name}/{row.name}" for section in sections for row in section.rows)
        )
        return 0
    found: dict[str, dict[str, Figures]] = {section.name: {} for section in sections}
    what = machine()
    content = {"benchmark": request.name, **what, "sections": found}
    absent: dict[str, Figures] = {}
    good, interrupted, count = True, False, 0
    try:
        for section in sections:
            absent[section.name] = _absent(section)
            good &= "failed" not in absent[section.name]
            for row in () if absent[section.name] else section.rows:
                count += 1
                progress = f"[{count}/{sum(len(one.rows) for one in sections)}]"
                figures = _measured(f"{section.name}/{row.name}", row, progress=progress)
                found[section.name][row.name] = figures
                good &= "failed" not in figures
                if request.json:
                    _write(Path(request.json), content)
            good &= _drawn(benchmark, content)
    except KeyboardInterrupt:
        interrupted = True
    print("\n".join(f"{key}: {value}" for key, value in what.items()))
    for section in sections:
        print(f"\n{section.title}\n\n{section.table(found[section.name])}\n")
        for why in absent.get(section.name, {}).values():
            print(f"not measured: {why}\n")
        for claim in () if interrupted else section.claims(found[section.name]):
            print(f"{'shown' if claim.holds else 'NOT SHOWN'}: {claim.text}")
            good &= claim.holds
    if interrupted:
        print("\ninterrupted: rows that are not there were not measured")
        return 130
    return 0 if good else 1


def _absent(section: Section) -> Figures:
    """Why no row can be measured, as `absent` or, where that cannot be told, `failed`."""
    if section.needs is None:
        return {}
    try:
        return in_child(section.needs, {}, environment=section.rows[0].environment)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return {"failed": str(error).splitlines()[-1]}


def _measured(name: str, row: Row, *, progress: str) -> Figures:
    began = time.monotonic()
    print(f"{progress} {name} ...", file=sys.stderr, flush=True)
    try:
        figures = in_child(row.function, row.arguments, environment=row.environment)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        figures = {"failed": str(error).splitlines()[-1]}
    print(f"{progress} {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return {**row.known, **figures}


def _drawn(benchmark: Benchmark, content: Mapping[str, Any]) -> bool:
    """Draws what was found so far, if this benchmark does; whether nothing failed."""
    if benchmark.draw is None:
        return True
    arguments = {"file": benchmark.picture, "content": content}
    try:
        if in_child(benchmark.draw, arguments, environment={})["written"]:
            print(f"drawn: {benchmark.picture}", file=sys.stderr, flush=True)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return False
    return True


def _write(path: Path, content: Any) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
