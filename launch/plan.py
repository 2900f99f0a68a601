"""Plans a run before hardware is rented: what fits, how long it takes, what it costs.

    python -m launch.plan CONFIG.toml [--topology NAME] [--verify] [--json FILE]

Needs no accelerator, no weights and no data; `--verify` runs the TPU compiler in a child process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from configs.cli import CommandLine, parse
from configs.load import load_config, read_config
from configs.machine import GPU_NAMES
from configs.schema import Config
from launch.exits import EXIT_FAILED, exit_status, print_lines
from launch.flags import add_json, command_flags, json_file, write_figures

if TYPE_CHECKING:
    from pipeline.plan.plan_report import Planned

DESCRIPTION = """\
Plan a run: memory of each phase, slots, micro-batches and placement, seconds of a step, steps and
cost of the budget. A run takes what is printed as chosen: the configured placement, or with
plan.placement = "auto" the fastest; others are compared with it.
CONFIG.toml may also be a run folder.
Exit status: 0 it fits, 1 it does not, or no step fits the budget, 2 a mistake in the request, 130
after Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_status(lambda: _run(argv))


def _flags() -> argparse.ArgumentParser:
    flags = command_flags()
    flags.add_argument(
        "--topology",
        metavar="NAME",
        help="plan for chips other than the configuration's: v5e-1 to v5e-256, "
        f"{', '.join(GPU_NAMES)} (and h100x8), cpu",
    )
    flags.add_argument(
        "--verify",
        action="store_true",
        help="compile the plan's programs for a v5e and use the compiler's figures; "
        "compilations take minutes each, and are cached for the next time",
    )
    add_json(flags)
    return flags


def _run(argv: Sequence[str] | None) -> int:
    prog = "python -m launch.plan"
    command = parse(argv, prog=prog, description=DESCRIPTION, flags=_flags())
    config, flags = _load(command), command.flags
    # Imported late: `--help` and configuration errors do not need these modules.
    from pipeline.plan.plan_report import plan_report

    file = json_file(flags)
    planned = _plan(config, flags)
    figures, lines = plan_report(planned)
    print_lines(lines)
    write_figures(file, figures)
    return 0 if planned.plan.fits and planned.forecast.enough else EXIT_FAILED


def _load(command: CommandLine) -> Config:
    """The configuration; where this machine implies the devices, with those of `--topology`."""
    name = command.flags.topology
    read = read_config(command.path, command.overrides)
    if name is None or not (read.assumes_platform or read.assumes_gpu):
        config = load_config(command.path, command.overrides, say=_say)
        if read.assumes_platform and config.plan.platform == "cpu":
            _say("--topology NAME plans for other devices, such as v5e-8 or h100")
        return config
    from pipeline.plan.cost_model.hardware import TOPOLOGIES

    devices = list[tuple[str, str]]()
    if name in TOPOLOGIES:
        platform, count = TOPOLOGIES[name].chip.platform, TOPOLOGIES[name].chips
        if platform == "gpu":
            devices.append(("plan.gpu", name.removesuffix(f"x{count}")))
        if read.assumes_platform:
            devices += [("plan.platform", platform), ("plan.learner_devices", f"{count}")]
    return load_config(command.path, (*devices, *command.overrides))


def _plan(config: Config, flags: argparse.Namespace) -> Planned:
    """Plans the run.

    Raises:
        FileNotFoundError: if the model's folder is missing.
        ValueError: if the request is invalid.
    """
    from pipeline.data.models.find_shape import shape_of
    from pipeline.plan.cost_model.hardware import topology_of
    from pipeline.plan.forecast import forecast
    from pipeline.plan.plan_report import Planned
    from pipeline.plan.search.fitting import PlanCase, choose_placement
    from pipeline.plan.search.suggestions import suggestions

    if config.budget.until_s is not None and config.budget.until_s <= time.time():
        raise ValueError(f"budget.until = {config.budget.until} has passed; set a later one")
    topology = topology_of(config, flags.topology)
    if flags.verify and not topology.has_compiler:
        raise ValueError(
            f"command line: --verify: programs can be compiled for v5e-1, v5e-4 and v5e-8, not "
            f"for {topology.name}; omit --verify"
        )
    case = PlanCase(config, shape_of(config), topology)
    choice = choose_placement(case)
    verified = None
    if flags.verify:
        from pipeline.plan.verify import verify

        verified = verify(case, choice.chosen, say=_say)
    plan = choice.chosen if verified is None else verified.plan
    found = Planned(case, choice, forecast(case, plan), verified=verified)
    # Suggestions compare estimates with estimates.
    if found.estimated.fits != plan.fits:
        return found
    return replace(found, changes=suggestions(case, found.estimated))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
