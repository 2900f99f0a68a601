"""Benchmarks: measures the project's claims, with peers in the same run.

python -m launch.bench NAME [--device DEVICE] [--quick] [--only PATTERN] [--json FILE]
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from launch.bench.harness import DEVICES, Benchmark, Figures, Row, Section, in_child, machine
from launch.exits import EXIT_FAILED, EXIT_INTERRUPTED, exit_status
from launch.flags import Parser, add_json, json_file
from pipeline.run.record_files import read_json, write_json


def _rates_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", metavar="CONFIG.toml", help="e.g. configs/demo.toml")
    command.add_argument("--lr", type=float, nargs="+", required=True, help="peak learning rates")
    command.add_argument("--seeds", type=int, nargs="+", default=[0], help="default: 0")
    command.add_argument("--steps", type=int, help="updates of a run; default: budget.steps")
    command.add_argument("--model", help="model folder in place of model.path")


def _serve_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--usd", type=float, default=1.2, help="dollars for an hour of the device; default: 1.2"
    )


def _race_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", default="configs/demo.toml", help="default: %(default)s")
    command.add_argument("--minutes", type=float, help="of each run; default: 6, quick: 3")
    command.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2, quick: 0")
    command.add_argument(
        "--lr",
        type=float,
        nargs="+",
        help="peak learning rates, of which the best of each side counts; default: learner.lr",
    )
    command.add_argument(
        "--every", type=int, default=10, help="steps between evaluated versions; default: 10"
    )


@dataclass(frozen=True)
class Command:
    """A benchmark on the command line; `launch.bench.NAME.benchmark` reads its request.

    Attributes:
        what: it measures.
        devices: that `--device` can name, the default first.
        quick: whether it has `--quick`.
        add_options: adds its own options.
    """

    what: str
    devices: Sequence[str] = ("auto", "cpu")
    quick: bool = True
    add_options: Callable[[argparse.ArgumentParser], None] = lambda _: None


_STUDY = ("auto", "cpu", "compiler")
BENCHMARKS: Mapping[str, Command] = {
    "balance": Command("the sizes that a run chooses beside fixed ones", devices=["cpu"]),
    "chaos": Command(
        "seconds that kill -9 and SIGSTOP of each process cost a small run, which must end with "
        "the undisturbed adapter",
        devices=["cpu"],
    ),
    "hbm": Command(
        "memory and estimated time of the learner on a v5e chip, beside Tunix's",
        devices=["compiler"],
        quick=False,
    ),
    "latency": Command(
        "milliseconds a token against batch, lengths and precision",
        devices=_STUDY,
    ),
    "learner": Command("gradients beside Tunix's, and prompts that a group shares"),
    "mesh": Command(
        "data, tensor and layer parallelism on 1 to 8 devices: tokens a second, the bubble of a "
        "pipeline, and the largest model",
        devices=_STUDY,
    ),
    "race": Command(
        "accuracy against seconds of this pipeline and of Tunix's GRPOLearner on the same task",
        devices=["auto"],
        add_options=_race_options,
    ),
    "rates": Command(
        "GRPO runs of a configuration with several learning rates, without Ray",
        quick=False,
        add_options=_rates_options,
    ),
    "rollout": Command("the rollout engine beside Tunix's sampler: speed, and greedy text"),
    "serve": Command(
        "the engine under a load of requests, simulated with measured or compiled step times: "
        "throughput, latencies, dollars",
        devices=_STUDY,
        add_options=_serve_options,
    ),
    "sizing": Command(
        "rollouts and parallel passes against the batch: time, memory, knee and lumps",
        devices=_STUDY,
    ),
    "techniques": Command(
        "what each technique saves of a step's seconds and bytes, of a start, and of accuracy",
        devices=_STUDY,
    ),
    "torch": Command(
        "decoding and gradients of Gemma 3 270m and 1b beside a plain loop of PyTorch and "
        "transformers",
        devices=["auto"],
    ),
}
DESCRIPTION = """\
Each row is measured in a process of its own, with peers in the same run. Progress, which begins
with the expected time, goes to standard error, the tables (Markdown) to standard output. Each row
says how its figures were found: measured, on which device, compiled or simulated. With --json FILE
figures are kept as they arrive, the same command continues a run that was broken off, and pictures
are written beside the file.
Exit status: 0 everything was measured and all claims hold, 1 a row failed or a claim does not hold,
2 a mistake in the request, 130 after Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    given = sys.argv[1:] if argv is None else argv
    return exit_status(lambda: _run(*prepare(given)))


def prepare(argv: Sequence[str]) -> tuple[argparse.Namespace, Benchmark]:
    """Returns the request, and the benchmark with the requested rows.

    Raises:
        ValueError: for a mistake in the request, one line.
        FileNotFoundError: for a configuration or a model that is missing.
    """
    request = _parser().parse_args(argv)
    request.json = json_file(request)
    if request.quick and request.device == "compiler":
        raise ValueError("command line: --quick measures a small case; remove --device compiler")
    module = importlib.import_module(f"launch.bench.{request.name}")
    benchmark: Benchmark = module.benchmark(request)
    return request, replace(benchmark, sections=_choose(benchmark.sections, request.only))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m launch.bench",
        usage="python -m launch.bench NAME [options]",
        description=f"Measure the claims of docs/benchmarks.md.\n{DESCRIPTION}",
        epilog="python -m launch.bench NAME --help lists the options of a benchmark.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    names = parser.add_subparsers(dest="name", metavar="NAME", title="benchmarks", required=True)
    for name, benchmark in BENCHMARKS.items():
        command = names.add_parser(
            name,
            help=benchmark.what,
            prog=f"python -m launch.bench {name}",
            description=f"Measure {benchmark.what}. {DESCRIPTION}",
            allow_abbrev=False,
        )
        benchmark.add_options(command)
        command.add_argument(
            "--device",
            choices=benchmark.devices,
            default=benchmark.devices[0],
            help="auto: what JAX finds; cpu: the CPU; compiler: a v5e by the TPU compiler, without "
            "a TPU; default: %(default)s",
        )
        command.set_defaults(quick=False)
        if benchmark.quick:
            command.add_argument("--quick", action="store_true", help="a small case, in minutes")
        command.add_argument(
            "--only",
            metavar="PATTERN",
            help="measure only rows whose SECTION/ROW contains PATTERN; * and ? are wildcards",
        )
        add_json(command)
    return parser


def _choose(sections: Sequence[Section], pattern: str | None) -> list[Section]:
    if pattern is None:
        return list(sections)
    chosen = []
    for section in sections:
        rows = [r for r in section.rows if fnmatchcase(f"{section.name}/{r.name}", f"*{pattern}*")]
        if rows:
            chosen.append(replace(section, rows=rows))
    if not chosen:
        names = [f"{section.name}/{row.name}" for section in sections for row in section.rows]
        nearest = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)[0]
        raise ValueError(f"command line: --only {pattern}: no such row; nearest: {nearest}")
    return chosen


def _run(request: argparse.Namespace, benchmark: Benchmark) -> int:
    if request.device == "compiler":
        from pipeline.plan.compiler import NoCompiler, require_compiler

        try:
            require_compiler()
        except NoCompiler as missing:
            print(missing, file=sys.stderr)
            return EXIT_FAILED
    if absent := [name for name in benchmark.needs if importlib.util.find_spec(name) is None]:
        print(f"the peer is missing: install {' and '.join(absent)} here", file=sys.stderr)
        return EXIT_FAILED
    content: dict[str, Any] = {
        "benchmark": request.name,
        "device": request.device,
        **machine(benchmark.needs),
        "arguments": {
            section.name: {row.name: dict(row.arguments) for row in section.rows}
            for section in benchmark.sections
        },
        "sections": {section.name: {} for section in benchmark.sections},
    }
    try:
        _measure(request, benchmark, content)
    except KeyboardInterrupt:
        _report(benchmark, content, claim=False)
        print("\ninterrupted: missing rows were not measured")
        return EXIT_INTERRUPTED
    return 0 if _report(benchmark, content, claim=True) else EXIT_FAILED


def _measure(request: argparse.Namespace, benchmark: Benchmark, content: dict[str, Any]) -> None:
    """Adds the rows' figures to the content of `--json`, which is written after each of them.

    Rows that the file has already, of a run that was broken off, are kept. A row that could not be
    measured has `failed`, with the error.
    """
    before = _same_study(request.json, content)
    known = _known(before, content)
    content["sections"].update(known)
    left = [
        (section, row)
        for section in benchmark.sections
        for row in section.rows
        if row.name not in known[section.name]
    ]
    _say(f"{_expected(benchmark, [row for _, row in left])}{_kept(request.json, known)}")
    for number, (section, row) in enumerate(left, 1):
        progress, began = f"[{number}/{len(left)}] {section.name}/{row.name}", time.monotonic()
        _say(f"{progress} ...")
        environment = {**DEVICES[request.device], **section.environment}
        try:
            found = in_child(row.measure, row.arguments, environment=environment)
        except RuntimeError as error:
            _say(str(error))
            found = {"failed": str(error).splitlines()[-1]}
        _say(f"{progress}: {time.monotonic() - began:.0f} s")
        content["sections"][section.name][row.name] = found
        if request.json:
            kept = {
                key: {
                    name: before[key].get(name, {}) | content[key].get(name, {})
                    for name in before[key] | content[key]
                }
                for key in ("arguments", "sections")
                if before
            }
            write_json(request.json, content | kept)
    for section in benchmark.sections if request.json else ():
        if section.draw is not None:
            picture = request.json.with_suffix(f".{section.name}.png")
            section.draw(content["sections"][section.name]).savefig(picture, dpi=120)
            _say(f"{picture} written")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _expected(benchmark: Benchmark, rows: Sequence[Row]) -> str:
    """How long these rows are expected to take, in words."""
    programs = sum(row.programs for row in rows)
    compiled = f", {programs} programs by the TPU compiler" if programs else ""
    minutes = sum(row.expected_s for row in rows) / 60
    return f"{len(rows)} rows{compiled}: about {minutes:.0f} minutes on {benchmark.expected_on}"


def _kept(file: Path | None, known: Mapping[str, Mapping[str, Figures]]) -> str:
    count = sum(map(len, known.values()))
    return f"; {count} rows are kept from {file}" if count else ""


def _same_study(file: Path | None, content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file of the same benchmark, device, machine and versions; {}: none."""
    before = (None if file is None else read_json(file)) or {}
    about = ("benchmark", "device", "machine", "versions")
    return before if all(before.get(key) == content[key] for key in about) else {}


def _known(before: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, dict[str, Figures]]:
    """Figures by section and row that a file has for rows with the same arguments.

    Args:
        before: content of the file.
        content: what it will have, without figures.
    """
    now = json.loads(json.dumps(content["arguments"]))
    then, figures = before.get("arguments", {}), before.get("sections", {})
    return {
        section: {
            row: figures[section][row]
            for row, arguments in rows.items()
            if then.get(section, {}).get(row) == arguments
            and "failed" not in figures[section].get(row, {"failed": ""})
        }
        for section, rows in now.items()
    }


def _report(benchmark: Benchmark, content: dict[str, Any], *, claim: bool) -> bool:
    """Prints tables and claims; returns whether nothing failed and all claims hold."""
    print("\n".join(f"{key}: {content[key]}" for key in ("date", "machine", "versions")))
    success = True
    for section in benchmark.sections:
        found = content["sections"][section.name]
        success &= not any("failed" in figures for figures in found.values())
        print(f"\n{section.title}\n\n{section.table(found)}\n")
        if section.words is not None:
            print("\n".join(section.words(found)))
        for one in (one for claims in section.claims for one in claims(found)) if claim else ():
            print(f"{'holds' if one.holds else 'DOES NOT HOLD'}: {one.text}")
            success &= one.holds
    return success


if __name__ == "__main__":
    sys.exit(main())
