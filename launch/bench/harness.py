"""The parts of a benchmark: rows, each measured in a process of its own, their table and claims.

    python -m launch.bench.harness MODULE FUNCTION     keyword arguments as JSON on standard input

calls a function and prints its result as JSON on the last line, see `in_child`.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from configs.machine import this_machine
from pipeline.compute.builds import cores
from pipeline.compute.devices import malloc_environment
from pipeline.plan.topology import TPU_COMPILER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CPU_ONLY = {"JAX_PLATFORMS": "cpu", **malloc_environment()}
DEVICES: Mapping[str, Mapping[str, str]] = {
    # The allocator's settings are those of a run's processes.
    "auto": malloc_environment(),
    "cpu": CPU_ONLY,
    "compiler": TPU_COMPILER,
}
"""Environment of the rows' processes by `--device`."""
COMPILE_S = 60.0
"""Seconds of the TPU compiler for a program, on two cores (gemma3-1b: 20 to 150, 2026-11-27)."""

Figures: TypeAlias = Mapping[str, Any]
"""Figures of a row by name, JSON values, in the order of the table's columns.

Lists are only written by `--json`. `how`, which `in_child` adds, says whether they were measured,
and on which device, or compiled.
"""

_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "google-tunix", "qwix")
_COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        name: unique in its section; shown in the first column.
        measure: a function of a module, called in a child process.
        arguments: its keyword arguments, JSON values.
        seconds: expected, without the TPU compiler's; see `Benchmark.expected_on`.
        programs: that the TPU compiler compiles for it.
    """

    name: str
    measure: Callable[..., Figures]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    programs: int = 0

    @property
    def expected_s(self) -> float:
        """Seconds that it is expected to take."""
        return self.seconds + COMPILE_S * self.programs


@dataclass(frozen=True)
class Claim:
    """A claim, and whether the figures support it."""

    text: str
    holds: bool


Claims: TypeAlias = Callable[[Mapping[str, Figures]], Iterable[Claim]]
"""Makes claims from the measured figures by row name."""


@dataclass(frozen=True)
class Bound:
    """Claims a bound for one figure of each row.

    Attributes:
        key: the figure.
        least: lower bound.
        most: upper bound.
        rows: pattern of the names of the rows that it is claimed for.
    """

    key: str
    least: float = float("-inf")
    most: float = float("inf")
    rows: str = "*"

    def __call__(self, found: Mapping[str, Figures]) -> Iterator[Claim]:
        """Returns the claim for each row."""
        bound = (
            f"at least {self.least:g}" if self.least > float("-inf") else f"at most {self.most:g}"
        )
        for name, row in found.items():
            value = row.get(self.key)
            if fnmatchcase(name, self.rows):
                holds = value is not None and self.least <= value <= self.most
                yield Claim(f"{name}: {self.key} {_cell(value) or 'missing'} ({bound})", holds)


@dataclass(frozen=True)
class Section:
    """Rows with one table.

    Attributes:
        name: for `--only`.
        title: what is measured, one line.
        rows: measurements.
        claims: about the figures.
        environment: variables of the rows' processes, added to those of the device.
        words: says what the figures show, in lines below the table.
        draw: makes a picture of the figures by row name, which is written beside `--json`.
    """

    name: str
    title: str
    rows: Sequence[Row]
    claims: Sequence[Claims] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    words: Callable[[Mapping[str, Figures]], Iterable[str]] | None = None
    draw: Callable[[Mapping[str, Figures]], Figure] | None = None

    def table(self, found: Mapping[str, Figures]) -> str:
        """Returns the measured rows as a Markdown table."""
        figures = [(key, value) for row in found.values() for key, value in row.items()]
        keys = list(dict.fromkeys(key for key, value in figures if not isinstance(value, list)))
        rows = [["", *(key.replace("_", " ") for key in keys)], ["---"] * (1 + len(keys))]
        rows += [[name, *(_cell(one.get(key)) for key in keys)] for name, one in found.items()]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True)
class Benchmark:
    """What one command measures.

    Attributes:
        sections: in order.
        needs: packages of a peer, without which nothing can be measured.
        expected_on: the machine of the rows' expected seconds.
    """

    sections: Sequence[Section]
    needs: Sequence[str] = ()
    expected_on: str = "two idle cores"


def in_child(
    function: Callable[..., Figures],
    arguments: Mapping[str, Any],
    *,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Calls a function in a new process, isolated from the memory and settings of others.

    Returns:
        Its figures; `how` is added unless they have it.

    Raises:
        RuntimeError: if the process failed, with the last lines of its standard error.
    """
    names = function.__module__, function.__qualname__
    done = subprocess.run(
        [sys.executable, "-m", "launch.bench.harness", *names],
        input=json.dumps(arguments),
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        tail = done.stderr.strip().splitlines()[-20:]
        raise RuntimeError("\n".join([f"{'.'.join(names)} ended with {done.returncode}:", *tail]))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def how() -> str:
    """How this process, a child, gets its figures: "measured on DEVICE" or "compiled for a v5e"."""
    if TPU_COMPILER.items() <= os.environ.items():
        return "compiled for a v5e"
    jax = sys.modules.get("jax")
    return f"measured on {jax.devices()[0].device_kind if jax else 'cpu'}"


def medians(runs: Mapping[str, Callable[[], Any]], *, repeats: int) -> dict[str, float]:
    """Returns the median seconds of each run; they run in turns, so that other load is shared."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def lines(points: Mapping[str, Sequence[Sequence[float]]], *, x: str, y: Sequence[str]) -> Figure:
    """Draws a line for each row, in a pane for each of `y`, on logarithmic axes.

    Args:
        points: of each row: x, and a value for each of `y`.
        x: name of the axis.
        y: names of the panes' axes.
    """
    # Imported late: the command's help does without matplotlib.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + 3.7 * len(y), 3.8), layout="constrained")
    for column, name in enumerate(y, 1):
        pane = figure.add_subplot(1, len(y), column)
        for label, some in points.items():
            pane.plot([p[0] for p in some], [p[column] for p in some], ".-", label=label)
        pane.set(xlabel=x, ylabel=name, xscale="log", yscale="log")
        pane.grid(alpha=0.3)
    pane.legend(fontsize="x-small")
    return figure


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Yields a list that gets one entry per compilation by XLA inside the block."""
    # Imported late: the command itself does without JAX.
    import jax

    seen: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        if event == _COMPILED:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def machine(packages: Sequence[str] = ()) -> dict[str, str]:
    """Returns date, processor, cores, accelerator, and the versions of compilers and libraries.

    Args:
        packages: of a peer, whose versions are also named.
    """
    about = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = [line.partition(":")[2].strip() for line in about if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    versions = [f"Python {platform.python_version()}", *map(_version, (*_PACKAGES, *packages))]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{processor}, {cores()} cores; {this_machine().why}",
        "versions": ", ".join(versions),
    }


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"


def main() -> None:
    """Calls the function in the child process."""
    module, name = sys.argv[1:]
    found = getattr(importlib.import_module(module), name)(**json.load(sys.stdin))
    print(json.dumps(found if "how" in found else {"how": how(), **found}))


if __name__ == "__main__":
    main()
