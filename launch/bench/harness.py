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
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeline.compute.builds import cores
from pipeline.compute.devices import malloc_environment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CPU_ONLY = {"JAX_PLATFORMS": "cpu", **malloc_environment()}
"""Environment of measurements on the CPU, the same as in a run's processes."""

Figures: TypeAlias = Mapping[str, Any]
"""Figures of a row by name, JSON values, in the order of the table's columns.

Lists are only written by `--json`.
"""

_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "google-tunix", "qwix")


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        name: unique in its section; shown in the first column.
        measure: a function of a module, called in a child process.
        arguments: its keyword arguments, JSON values.
    """

    name: str
    measure: Callable[..., Figures]
    arguments: Mapping[str, Any] = field(default_factory=dict)


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
        optional: nothing is claimed for a row without the figure; otherwise it does not hold.
    """

    key: str
    least: float = float("-inf")
    most: float = float("inf")
    rows: str = "*"
    optional: bool = False

    def __call__(self, found: Mapping[str, Figures]) -> Iterator[Claim]:
        """Returns the claim for each row."""
        bound = (
            f"at least {self.least:g}" if self.least > float("-inf") else f"at most {self.most:g}"
        )
        for name, row in found.items():
            value = row.get(self.key)
            if fnmatchcase(name, self.rows) and not (value is None and self.optional):
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
        environment: variables of the rows' processes, added to this process's.
        words: says what the figures show, in lines below the table.
        draw: makes a picture of the figures by row name, which is written beside `--json`.
    """

    name: str
    title: str
    rows: Sequence[Row]
    claims: Sequence[Claims] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: CPU_ONLY)
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
        needs_compiler: whether nothing can be measured without the TPU compiler.
        needs: packages of a peer, without which nothing can be measured.
    """

    sections: Sequence[Section]
    needs_compiler: bool = False
    needs: Sequence[str] = ()


def in_child(
    function: Callable[..., Figures],
    arguments: Mapping[str, Any],
    *,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Calls a function in a new process, isolated from the memory and settings of others.

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


def medians(runs: Mapping[str, Callable[[], Any]], *, repeats: int) -> dict[str, float]:
    """Returns the median seconds of each run; they run in turns, so that other load is shared."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def machine() -> dict[str, str]:
    """Returns date, processor, cores, and the versions of compilers and libraries."""
    about = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = [line.partition(":")[2].strip() for line in about if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    versions = [f"Python {platform.python_version()}", *map(_version, _PACKAGES)]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{processor}, {cores()} cores",
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
    function = getattr(importlib.import_module(module), name)
    print(json.dumps(function(**json.load(sys.stdin))))


if __name__ == "__main__":
    main()
