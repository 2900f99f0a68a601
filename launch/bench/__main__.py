"""Benchmarks: measures the project's claims, with peers in the same run.

python -m launch.bench NAME [--only PATTERN] [--json FILE]
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from launch.bench.harness import Benchmark, Figures, Section, in_child, machine
from launch.exits import EXIT_FAILED, EXIT_INTERRUPTED, exit_status
from launch.flags import Parser, add_json, json_file
from pipeline.run.record_files import read_json, write_json

BENCHMARKS = {
    "balance": "the sizes that a run chooses, beside fixed ones and Tunix's recipe, on this CPU; "
    "twenty minutes",
    "chaos": "seconds that kill -9 and SIGSTOP of each process cost a small run, which must end "
    "with the undisturbed adapter, on this machine's CPU; half an hour",
    "hbm": "memory and estimated time on a v5e chip by the TPU compiler, without a TPU; an hour or "
    "more, some minutes a row",
    "latency": "milliseconds a token against batch, lengths and precision, on this device or by "
    "the TPU compiler; an hour, two minutes with --quick",
    "learner": "gradients beside Tunix's, and prompts that a group shares, on this machine's CPU; "
    "some minutes",
    "mesh": "a model on 1 to 8 devices by data, tensor and layer parallelism: tokens a second, "
    "bubble, largest model, on this machine's devices or by the TPU compiler; an hour, two minutes "
    "with --quick",
    "mismatch": "what rounding and planted faults do to the probe of sampler against learner, for "
    "any model, on the device that JAX finds",
    "plan": "the planner's memory estimates beside the TPU compiler's figures, without a TPU; an "
    "hour, or seconds with cached figures",
    "race": "accuracy against seconds of this pipeline and of Tunix's GRPOLearner on the same "
    "task, on this machine's CPU; forty minutes",
    "rates": "GRPO runs of a configuration with several learning rates, without Ray, on the device "
    "that JAX finds",
    "rollout": "the rollout engine beside Tunix's sampler: speed on this machine's CPU, memory on "
    "a v5e chip by the TPU compiler; half an hour",
    "serve": "the engine under a load of requests, simulated with step times of this device or of "
    "the TPU compiler: throughput, latencies, dollars; an hour, two minutes with --quick",
    "sizing": "rollouts and parallel passes against the batch: time, memory, knee and lumps, on "
    "this device or by the TPU compiler; hours, two minutes with --quick",
    "schedule": "time of a preset's programs by part beside the roofline, by the TPU compiler's "
    "estimates and final schedules, without a TPU; half an hour, or seconds with cached figures",
    "torch": "decoding and gradients of Gemma 3 270m and 1b beside a plain loop of PyTorch and "
    "transformers, on one GPU; some minutes a row",
}
DESCRIPTION = """\
Each row is measured in a process of its own, with peers in the same run. Progress goes to standard
error, the tables (Markdown) to standard output. With --json FILE figures are kept as they arrive,
the same command continues a run that was broken off, and pictures are written beside the file.
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
    module = importlib.import_module(f"launch.bench.{request.name}")
    own = request.name in _ARGUMENTS
    benchmark: Benchmark = module.benchmark(request) if own else module.BENCHMARK
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
    for name, what in BENCHMARKS.items():
        command = names.add_parser(
            name,
            help=what,
            prog=f"python -m launch.bench {name}",
            description=f"Measure {what}. {DESCRIPTION}",
            allow_abbrev=False,
        )
        _ARGUMENTS.get(name, lambda _: None)(command)
        command.add_argument(
            "--only",
            metavar="PATTERN",
            help="measure only rows whose SECTION/ROW contains PATTERN; * and ? are wildcards",
        )
        add_json(command)
    return parser


def _add_rates(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", metavar="CONFIG.toml", help="e.g. configs/demo.toml")
    command.add_argument("--lr", type=float, nargs="+", required=True, help="peak learning rates")
    command.add_argument("--seeds", type=int, nargs="+", default=[0], help="default: 0")
    command.add_argument("--steps", type=int, help="updates of a run; default: budget.steps")
    command.add_argument("--model", help="model folder in place of model.path")


def _add_study(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--device",
        choices=("auto", "compiler"),
        default="auto",
        help="auto: measure on the device that JAX finds; compiler: a v5e by the TPU compiler, "
        "without a TPU; default: auto",
    )
    command.add_argument("--models", nargs="+", help="shapes, such as gemma3-1b; default: all")
    command.add_argument("--quick", action="store_true", help="a small model, in two minutes")


def _add_serve(command: argparse.ArgumentParser) -> None:
    _add_study(command)
    command.add_argument(
        "--usd", type=float, default=1.2, help="dollars for an hour of the device; default: 1.2"
    )


def _add_race(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", default="configs/demo.toml", help="default: %(default)s")
    command.add_argument("--minutes", type=float, default=6, help="of each run; default: 6")
    command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    command.add_argument(
        "--lr",
        type=float,
        nargs="+",
        help="peak learning rates, of which the best of each side counts; default: learner.lr",
    )
    command.add_argument(
        "--every", type=int, default=10, help="steps between evaluated versions; default: 10"
    )


def _add_mismatch(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL_DIR", help="Hugging Face folder of a model")
    command.add_argument("--adapters", type=int, default=20, help="for rounding; default: 20")
    command.add_argument("--faulty", type=int, default=2, help="for each fault; default: 2")


def _add_torch(command: argparse.ArgumentParser) -> None:
    command.add_argument("--quick", action="store_true", help="a small model, on any device")


_ARGUMENTS = {
    "latency": _add_study,
    "mesh": _add_study,
    "mismatch": _add_mismatch,
    "race": _add_race,
    "rates": _add_rates,
    "serve": _add_serve,
    "sizing": _add_study,
    "torch": _add_torch,
}
"""Benchmarks with arguments of their own, which their function `benchmark` reads.

The others have a constant `BENCHMARK`.
"""


def _choose(sections: Sequence[Section], pattern: str | None) -> list[Section]:
    if pattern is None:
        return list(sections)
    chosen = []
    for section in sections:
        rows = [r for r in section.rows if fnmatchcase(f"{section.name}/{r.name}", f"*{pattern}*")]
        if rows:
            chosen.append(replace(section, rows=rows))
    if not chosen:
        nearest = difflib.get_close_matches(pattern, _names(sections), n=1, cutoff=0.0)[0]
        raise ValueError(f"command line: --only {pattern}: no such row; nearest: {nearest}")
    return chosen


def _names(sections: Sequence[Section]) -> list[str]:
    return [f"{section.name}/{row.name}" for section in sections for row in section.rows]


def _run(request: argparse.Namespace, benchmark: Benchmark) -> int:
    if benchmark.needs_compiler:
        from pipeline.plan.compiler import NoCompiler, require_compiler

        try:
            require_compiler()
        except NoCompiler as missing:
            print(missing, file=sys.stderr)
            return EXIT_FAILED
    if absent := [name for name in benchmark.needs if importlib.util.find_spec(name) is None]:
        print(f"the peer is missing: install {' and '.join(absent)} here", file=sys.stderr)
        return EXIT_FAILED
    sections = {section.name: dict[str, Figures]() for section in benchmark.sections}
    arguments = {
        section.name: {row.name: dict(row.arguments) for row in section.rows}
        for section in benchmark.sections
    }
    about = {"benchmark": request.name, **machine()}
    content = {**about, "arguments": arguments, "sections": sections}
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
    names, known = _names(benchmark.sections), _known(request.json, content)
    for section in benchmark.sections:
        for row in section.rows:
            name = f"{section.name}/{row.name}"
            progress, began = f"[{names.index(name) + 1}/{len(names)}] {name}", time.monotonic()
            if name in known:
                print(f"{progress}: kept from {request.json}", file=sys.stderr, flush=True)
                content["sections"][section.name][row.name] = known[name]
                continue
            print(f"{progress} ...", file=sys.stderr, flush=True)
            try:
                found = in_child(row.measure, row.arguments, environment=section.environment)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                found = {"failed": str(error).splitlines()[-1]}
            print(f"{progress}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            content["sections"][section.name][row.name] = found
            if request.json:
                write_json(request.json, content)
        if request.json and section.draw is not None:
            picture = request.json.with_suffix(f".{section.name}.png")
            section.draw(content["sections"][section.name]).savefig(picture, dpi=120)
            print(f"{picture} written", file=sys.stderr)


def _known(file: Path | None, content: Mapping[str, Any]) -> dict[str, Figures]:
    """Figures in a file of the same benchmark, machine, versions and arguments, by SECTION/ROW."""
    before = None if file is None else read_json(file)
    about = ("benchmark", "machine", "versions")
    if before is None or any(before.get(key) != content[key] for key in about):
        return {}
    now = json.loads(json.dumps(content["arguments"]))
    then = before.get("arguments", {})
    return {
        f"{section}/{row}": before["sections"][section][row]
        for section, rows in now.items()
        for row, arguments in rows.items()
        if then.get(section, {}).get(row) == arguments
        and "failed" not in before["sections"].get(section, {}).get(row, {"failed": ""})
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
