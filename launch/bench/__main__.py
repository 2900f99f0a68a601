"""Benchmarks: measures the project's claims, with peers in the same run.

python -m launch.bench NAME [--device DEVICE] [--quick] [--only PATTERN] [--json FILE]
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from launch.bench.harness import CPU_ONLY, DEVICES, Found, Row, Section, in_child, machine
from launch.exits import EXIT_FAILED, Failure, exit_status
from launch.flags import Parser, add_json, json_file
from pipeline.run.record_files import read_json, write_json

BENCHMARKS: Mapping[str, str] = {
    "balance": "the sizes that a run chooses beside fixed ones",
    "chaos": "seconds that kill -9 and SIGSTOP of each process cost a run, and its adapter then",
    "hbm": "memory and estimated time of the learner on a v5e chip, beside Tunix's",
    "latency": "milliseconds a token against batch, lengths and precision",
    "learner": "gradients beside Tunix's, and prompts that a group shares",
    "mesh": "data, tensor and layer parallelism on 1 to 8 devices, and the largest model",
    "race": "accuracy against seconds beside Tunix's GRPOLearner on the same task",
    "rollout": "the rollout engine beside Tunix's sampler: speed, and greedy text",
    "serve": "the engine under a load of requests, simulated: throughput, latencies, dollars",
    "sizing": "rollouts and parallel passes against the batch: time, memory, knee and lumps",
    "techniques": "what each technique saves of a step, of a start, and of accuracy",
    "torch": "decoding and gradients of Gemma 3 beside a plain loop of PyTorch and transformers",
}
"""What each measures; `launch.bench.NAME.sections` reads its request."""
_STUDY = ("auto", "cpu", "compiler")
_DEVICES: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("balance", "chaos"), ("cpu",)),
    **dict.fromkeys(("latency", "mesh", "serve", "sizing", "techniques"), _STUDY),
    **dict.fromkeys(("race", "torch"), ("auto",)),
    "hbm": ("compiler",),
}
"""What `--device` can name, the default first, if it is not auto and cpu."""
COMPILE_S = 60.0
"""Seconds of the TPU compiler for a program, on two cores (gemma3-1b: 20 to 150, 2026-11-27)."""
DESCRIPTION = """\
Each row is measured in a process of its own, with peers in the same run. Progress, which begins
with the expected time, goes to standard error, the tables (Markdown) to standard output. Each row
says how its figures were found: measured, on which device, compiled or simulated. With --json FILE
figures are kept as they arrive, the same command continues a run that was broken off, and pictures
are written beside the file.
Exit status: 0 everything was measured and all claims hold, 1 a row failed or a claim does not hold,
2 a mistake in the request, 130 after Ctrl-C or SIGTERM."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    given = sys.argv[1:] if argv is None else argv
    return exit_status(lambda: _run(*prepare(given)))


def prepare(argv: Sequence[str]) -> tuple[argparse.Namespace, list[Section]]:
    """Returns the request, and its sections with the requested rows.

    Raises:
        ValueError: for a mistake in the request, one line.
        FileNotFoundError: for a configuration or a model that is missing.
    """
    request = _parser().parse_args(argv)
    request.json = json_file(request)
    if request.quick and request.device == "compiler":
        raise ValueError("command line: --quick measures a small case; remove --device compiler")
    module = importlib.import_module(f"launch.bench.{request.name}")
    return request, _choose(module.sections(request), request.only)


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
        devices = _DEVICES.get(name, ("auto", "cpu"))
        command = names.add_parser(
            name,
            help=what,
            prog=f"python -m launch.bench {name}",
            description=f"Measure {what}. {DESCRIPTION}",
            allow_abbrev=False,
        )
        command.add_argument(
            "--device",
            choices=devices,
            default=devices[0],
            help="auto: what JAX finds; cpu: the CPU; compiler: a v5e by the TPU compiler, without "
            "a TPU; default: %(default)s",
        )
        command.set_defaults(quick=False)
        if name != "hbm":
            command.add_argument("--quick", action="store_true", help="a small case, in minutes")
        command.add_argument(
            "--only",
            metavar="PATTERN",
            help="measure only rows whose SECTION/ROW contains PATTERN; * and ? are wildcards",
        )
        add_json(command)
    race, serve = names.choices["race"], names.choices["serve"]
    race.add_argument("--config", default="configs/demo.toml", help="default: %(default)s")
    race.add_argument("--minutes", type=float, help="of each run; default: 6, quick: 3")
    every = "steps between evaluated versions; default: %(default)s"
    race.add_argument("--every", type=int, default=10, help=every)
    race.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2, quick: 0")
    rates = "peak learning rates, of which the best of each side counts; default: learner.lr"
    race.add_argument("--lr", type=float, nargs="+", help=rates)
    race.add_argument("--tunix-lr", type=float, nargs="+", help="those of Tunix; default: --lr")
    price = "dollars for an hour of the device; default: %(default)s"
    serve.add_argument("--usd", type=float, default=1.2, help=price)
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


def _run(request: argparse.Namespace, sections: Sequence[Section]) -> int:
    if request.device == "compiler":
        from pipeline.plan.compiler import NoCompiler, require_compiler

        try:
            require_compiler()
        except NoCompiler as missing:
            raise Failure(missing) from None
    about = {"benchmark": request.name, "device": request.device, **machine()}
    content = _content(request.json, about)
    _measure(request, sections, content)
    return 0 if _report(sections, content) else EXIT_FAILED


def _content(file: Path | None, about: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `--json`: arguments and figures of rows by section, and their origin.

    Figures that the file has of the same benchmark, device, machine and versions are kept.
    """
    before = (None if file is None else read_json(file)) or {}
    same = all(before.get(key) == about[key] for key in about if key != "date")
    return {"arguments": {}, "sections": {}} | (before if same else {}) | dict(about)


def _measure(
    request: argparse.Namespace, sections: Sequence[Section], content: dict[str, Any]
) -> None:
    """Adds the figures of `_left` to the content of `--json`, which is written after each row.

    A row that could not be measured has `failed`, with the error.
    """
    left = _left(sections, content)
    expected_s, compiled = sum(row.seconds for _, row in left), ""
    if request.device == "compiler":
        programs = sum(row.programs for _, row in left)
        expected_s, compiled = COMPILE_S * programs, f", {programs} programs by the TPU compiler"
    for_gpu = request.name == "torch" or _DEVICES.get(request.name) == _STUDY
    only_cpu = all(section.environment == CPU_ONLY for section, _ in left)
    on_cores = request.quick or compiled or not for_gpu or only_cpu
    machine = "two idle cores" if on_cores else "one H100 (estimated)"
    kept = sum(len(section.rows) for section in sections) - len(left)
    from_file = f"; {kept} rows are kept from {request.json}" if kept else ""
    minutes = f"about {expected_s / 60:.0f} minutes on {machine}"
    _say(f"{len(left)} rows{compiled}: {minutes}{from_file}")
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
            write_json(request.json, content)
    for section in sections if request.json else ():
        if section.draw is not None:
            picture = request.json.with_suffix(f".{section.name}.png")
            section.draw(_found(section, content)).savefig(picture, dpi=120)
            _say(f"{picture} written")


def _left(sections: Sequence[Section], content: dict[str, Any]) -> list[tuple[Section, Row]]:
    """The rows without figures for their arguments; notes their arguments in the content."""
    left = []
    for section in sections:
        arguments = content["arguments"].setdefault(section.name, {})
        figures = content["sections"].setdefault(section.name, {})
        for row in section.rows:
            now = json.loads(json.dumps(row.arguments))
            failed = "failed" in figures.get(row.name, {"failed": "not measured"})
            if failed or arguments.get(row.name) != now:
                figures.pop(row.name, None)
                arguments[row.name] = now
                left.append((section, row))
    return left


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _found(section: Section, content: Mapping[str, Any]) -> Found:
    """The figures of the section's rows, of those that have some."""
    figures = content["sections"][section.name]
    return {row.name: figures[row.name] for row in section.rows if row.name in figures}


def _report(sections: Sequence[Section], content: Mapping[str, Any]) -> bool:
    """Prints tables and claims; returns whether nothing failed and all claims hold."""
    print("\n".join(f"{key}: {content[key]}" for key in ("date", "machine", "versions")))
    success = True
    for section in sections:
        found = _found(section, content)
        success &= not any("failed" in figures for figures in found.values())
        print(f"\n{section.title}\n\n{section.table(found)}\n")
        for line in section.words(found):
            print(line)
        for text, holds in (one for claims in section.claims for one in claims(found)):
            print(f"{'holds' if holds else 'DOES NOT HOLD'}: {text}")
            success &= holds
    return success


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
