"""The process that `launch.doctor --chips` starts with some of the chips; prints its results.

    python -m launch.chips {all,half} [--platform tpu] [--devices 8] [...]

Each result is a line of JSON (`launch.chip_results`), printed as soon as it is known. Importing
this imports JAX, so `launch.chip_checks` starts it and never imports it.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import jax

from launch.chip_results import SPEED, ChipResult
from launch.chips import device_checks
from launch.chips.forms import Check, Forms
from launch.exits import EXIT_FAILED
from pipeline.compute.devices import open_mesh


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    given = _parser().parse_args(argv)
    try:
        mesh = open_mesh(platform=given.platform, count=given.devices)
    except ValueError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    chips = list(mesh.devices.flat)
    # Not the first one: operations that run on JAX's default device by mistake are then found.
    cpu = jax.devices("cpu")[-1]
    for result in results(checks(given, chips, cpu)):
        print(result.line(), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m launch.chips", description=__doc__)
    parser.add_argument("part", choices=("all", "half"))
    parser.add_argument("--platform", choices=("tpu", "cpu"), default="tpu")
    parser.add_argument("--devices", type=int, default=8, help="devices of this process")
    parser.add_argument("--rollout-weights", default="shared", help="plan.rollout_weights to check")
    return parser


def checks(
    given: argparse.Namespace, chips: Sequence[jax.Device], cpu: jax.Device
) -> Mapping[str, Check]:
    """The checks of a part, by name.

    Args:
        given: the command line.
        chips: devices of this process.
        cpu: where the results are computed again.
    """
    forms = Forms(chips, cpu)
    opened = {"chips opened": partial(device_checks.opened, chips)}
    collectives = {"collectives": partial(device_checks.collectives, chips)}
    if given.part == "half":
        return {**opened, **collectives, "log-probs": forms.log_probs}
    return {
        **opened,
        **collectives,
        **forms.checks(given.rollout_weights),
        "checkpoint": partial(device_checks.checkpoint, chips),
        SPEED: partial(device_checks.speed, chips),
    }


def results(checks: Mapping[str, Check]) -> Iterator[ChipResult]:
    """Makes checks; one that raises is a fault, and the others follow."""
    for name, check in checks.items():
        began = time.monotonic()
        try:
            result = check()
        except Exception as error:  # noqa: BLE001  # any error of a chip or a program is a finding
            traceback.print_exc()
            line = (str(error).strip() or "no message").splitlines()[0]
            result = ChipResult("fault", f"{type(error).__name__}: {line}")
        yield replace(result, check=name, seconds=round(time.monotonic() - began, 1))


if __name__ == "__main__":
    sys.exit(main())
