"""Benchmarks: measures the project's claims, with peers in the same run.

    python -m launch.bench NAME [--only PATTERN] [--json FILE] [--plot FILE]

This process imports nothing heavy: each row is measured in a separate process.
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
from launch.flags import add_json, json_file, output_file

BENCHMARKS = {
    "balance": "calibrated sizes beside fixed ones and Tunix's recipe, on this machine's CPU; "
    "twenty minutes",
    "hbm": "memory and estimated time on a v5e chip by the TPU compiler, without a TPU; an hour or "
    "more, some minutes a row",
    "learner": "logits, top k and packing on this machine's CPU; some minutes",
    "plan": "the planner's memory estimates beside the TPU compiler's figures, without a TPU; an "
    "hour, or seconds with cached figures",
    "rollout": "the rollout engine beside Tunix's sampler: speed on this machine's CPU, memory on "
    "a v5e chip by the TPU compiler; half an hour",
    "sweep": "rollout speed and memory by number of slots, estimated for a v5e chip and measured "
    "on this machine, with a plot; an hour or more",
}
DESCRIPTION = """\
Measure the claims of the README, with peers in the same run, each row in a separate process.
Progress goes to standard error, the tables (Markdown) to standard output.
Exit status: 0 everything was measured and all claims hold, 1 a row failed or a claim does not hold,
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
    """Returns the request, and the benchmark with the requested rows and plot file.

    Raises:
        ValueError: for a mistake in the request, one line.
    """
    parser = _Parser(
        prog="python -m launch.bench",
        usage="python -m launch.bench NAME [options]",
        description=DESCRIPTION,
        epilog="benchmarks:\n" + "\n".join(f"  {n:<10}{what}" for n, what in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="the benchmark")
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        help="measure only rows whose SECTION/ROW contains PATTERN, with * and ? as wildcards",
    )
    parser.add_argument("--list", action="store_true", help="list the rows, measure nothing")
    add_json(parser)
    parser.add_argument("--plot", metavar="FILE", help="PNG file of the plot (benchmark sweep)")
    request, unknown = parser.parse_known_args(argv)
    if unknown:
        known = "--only, --list, --json, --plot"
        raise ValueError(f"command line: {unknown[0]}: unknown; there are {known}")
    names = ", ".join(BENCHMARKS)
    if request.name is None:
        raise ValueError(f"command line: NAME is missing; there are {names}")
    if request.name not in BENCHMARKS:
        raise ValueError(f"command line: {request.name}: no such benchmark; there are {names}")
    request.json = json_file(request)
    if request.plot is not None:
        request.plot = str(output_file("--plot", request.plot))
    benchmark: Benchmark = importlib.import_module(f"launch.bench.{request.name}_bench").BENCHMARK
    if request.plot and benchmark.plot is None:
        raise ValueError(f"command line: --plot: {request.name} has no plot; sweep has one")
    chosen = replace(
        benchmark,
        sections=_choose(benchmark.sections, request.only),
        plot_file=request.plot or benchmark.plot_file,
    )
    return request, chosen


def _choose(sections: Sequence[Section], pattern: str | None) -> list[Section]:
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
    measured: dict[str, dict[str, Figures]] = {section.name: {} for section in sections}
    hardware = machine()
    content = {"benchmark": request.name, **hardware, "sections": measured}
    absent: dict[str, Figures] = {}
    success, interrupted, count = True, False, 0
    try:
        for section in sections:
            absent[section.name] = _absent(section)
            success &= "failed" not in absent[section.name]
            for row in () if absent[section.name] else section.rows:
                count += 1
                progress = f"[{count}/{sum(len(one.rows) for one in sections)}]"
                figures = _measure(f"{section.name}/{row.name}", row, progress=progress)
                measured[section.name][row.name] = figures
                success &= "failed" not in figures
                if request.json:
                    _write(request.json, content)
            success &= _plot(benchmark, content)
    except KeyboardInterrupt:
        interrupted = True
    print("\n".join(f"{key}: {value}" for key, value in hardware.items()))
    for section in sections:
        print(f"\n{section.title}\n\n{section.table(measured[section.name])}\n")
        for why in absent.get(section.name, {}).values():
            print(f"not measured: {why}\n")
        for claim in () if interrupted else section.claims(measured[section.name]):
            print(f"{'holds' if claim.holds else 'DOES NOT HOLD'}: {claim.text}")
            success &= claim.holds
    if interrupted:
        print("\ninterrupted: missing rows were not measured")
        return 130
    return 0 if success else 1


def _absent(section: Section) -> Figures:
    """Returns why no row can be measured, as `absent`, or `failed` if the check itself failed."""
    if section.needs is None:
        return {}
    try:
        return in_child(section.needs, {}, environment=section.rows[0].environment)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return {"failed": str(error).splitlines()[-1]}


def _measure(name: str, row: Row, *, progress: str) -> Figures:
    began = time.monotonic()
    print(f"{progress} {name} ...", file=sys.stderr, flush=True)
    try:
        figures = in_child(row.function, row.arguments, environment=row.environment)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        figures = {"failed": str(error).splitlines()[-1]}
    print(f"{progress} {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return {**row.known, **figures}


def _plot(benchmark: Benchmark, content: Mapping[str, Any]) -> bool:
    """Plots the rows so far, if the benchmark has a plot; returns whether nothing failed."""
    if benchmark.plot is None:
        return True
    arguments = {"file": benchmark.plot_file, "content": content}
    try:
        if in_child(benchmark.plot, arguments, environment={})["written"]:
            print(f"plot: {benchmark.plot_file}", file=sys.stderr, flush=True)
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
