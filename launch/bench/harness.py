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
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

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

Figures: TypeAlias = Mapping[str, Any]
"""Figures of a row by name, JSON values, in the order of the table's columns, which lists have no
part in; `in_child` adds how they were found."""
Found: TypeAlias = Mapping[str, Figures]
"""Figures by name of the row."""
Name = TypeVar("Name")

_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "google-tunix", "qwix", "torch", "transformers")
_PROGRESS = "> "
"""Before a line of progress of a row's process."""
_END_S = 30.0
"""A row's process gets as many seconds to end after Ctrl-C or SIGTERM."""
_COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        name: unique in its section; shown in the first column.
        measure: a function of a module, called in a child process.
        arguments: its keyword arguments, JSON values.
        seconds: expected where it is measured.
        programs: that are compiled where the device is the TPU compiler.
    """

    name: str
    measure: Callable[..., Figures]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    programs: int = 0


class Claim(NamedTuple):
    """A claim, and whether the figures support it."""

    text: str
    holds: bool


@dataclass(frozen=True)
class Bound:
    """Claims a bound for one figure of the rows whose name matches a pattern."""

    key: str
    least: float = float("-inf")
    most: float = float("inf")
    rows: str = "*"

    def __call__(self, found: Found) -> Iterator[Claim]:
        """The claim for each row."""
        lower = self.least > float("-inf")
        bound = f"at least {self.least:g}" if lower else f"at most {self.most:g}"
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
        draw: makes a picture of the figures, which is written beside `--json`.
    """

    name: str
    title: str
    rows: Sequence[Row]
    claims: Sequence[Callable[[Found], Iterable[Claim]]] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    words: Callable[[Found], Iterable[str]] = lambda _: ()
    draw: Callable[[Found], Figure] | None = None

    def table(self, found: Found) -> str:
        """The measured rows as a Markdown table."""
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


def in_child(
    function: Callable[..., Figures],
    arguments: Mapping[str, Any],
    *,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Calls a function in a new process; its figures get `how`, unless they have it.

    What the function says by `progress` is shown at once.

    Raises:
        RuntimeError: if the process failed, with the last lines of its standard error.
    """
    names, tail = (function.__module__, function.__qualname__), deque[str](maxlen=20)
    command = [sys.executable, "-m", "launch.bench.harness", *names]
    with (
        TemporaryFile("w+") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stderr is not None
        try:
            with suppress(BrokenPipeError):  # it has ended, and says why
                child.stdin.write(json.dumps(arguments))
                child.stdin.close()
            for line in child.stderr:
                if line.startswith(_PROGRESS):
                    print(line, end="", file=sys.stderr, flush=True)
                elif line.strip():
                    tail.append(line.rstrip())
            status = child.wait()
        except BaseException:
            child.terminate()  # Ctrl-C also reaches the child, SIGTERM does not
            try:
                with suppress(subprocess.TimeoutExpired):  # it is inside compiled code
                    child.wait(_END_S)
            finally:
                child.kill()
            raise
        output.seek(0)
        printed = output.read()
    if status:
        if status < 0:
            name = signal.Signals(-status).name
            tail.append(f"killed by {name}; SIGKILL often means that memory ran out")
        raise RuntimeError("\n".join([f"{'.'.join(names)} ended with {status}:", *tail]))
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def progress(text: str) -> None:
    """Shows a line about a row that takes long; called in the row's process."""
    print(f"{_PROGRESS}{text}", file=sys.stderr, flush=True)


def how() -> str:
    """How this process, a child, gets its figures: "measured on DEVICE" or "compiled for a v5e"."""
    if TPU_COMPILER.items() <= os.environ.items():
        return "compiled for a v5e"
    jax = sys.modules.get("jax")
    return f"measured on {jax.devices()[0].device_kind if jax else 'cpu'}"


def medians(runs: Mapping[Name, Callable[[], Any]], *, repeats: int) -> dict[Name, float]:
    """Median seconds of each run; they run in turns, so that other load is shared."""
    seconds: dict[Name, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def lines(
    points: Mapping[str, Sequence[Sequence[float]]],
    columns: Sequence[str],
    panes: Sequence[tuple[int, int]],
    *,
    scale: str = "log",
    group: Callable[[str], str] = str,
) -> Figure:
    """Draws a line for each row, with a value for each column in each of its points.

    A pane has the numbers of the columns on its axes. Rows of the same `group`, by name, have the
    same colour.
    """
    # Imported late: the command's help does without matplotlib.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 + 3.7 * len(panes), 3.8), layout="constrained")
    for pane, (x, y) in zip(figure.subplots(1, len(panes), squeeze=False)[0], panes, strict=True):
        colours: dict[str, str] = {}
        for name, some in points.items():
            label = None if group(name) in colours else group(name)
            colour = colours.setdefault(group(name), f"C{len(colours)}")
            pane.plot([p[x] for p in some], [p[y] for p in some], ".-", color=colour, label=label)
        pane.set(xlabel=columns[x], ylabel=columns[y], yscale=scale)
        if scale == "log":
            pane.set_xscale(scale, base=2)
            pane.xaxis.set_major_formatter("{x:g}")
        pane.grid(alpha=0.3)
    figure.legend(*pane.get_legend_handles_labels(), loc="outside right upper", fontsize="x-small")
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


def machine() -> dict[str, str]:
    """Date, processor, cores, accelerator, and the versions of compilers and libraries."""
    about = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = [line.partition(":")[2].strip() for line in about if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{processor}, {cores()} cores; {this_machine().why}",
        "versions": ", ".join([f"Python {platform.python_version()}", *map(_version, _PACKAGES)]),
    }


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"


def _stop(_number: int, _frame: object) -> None:
    """The first signal ends the row, and a second one does not disturb its end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    """Calls the function in the child process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    module, name = sys.argv[1:]
    found = getattr(importlib.import_module(module), name)(**json.load(sys.stdin))
    print(json.dumps(found if "how" in found else {"how": how(), **found}))


if __name__ == "__main__":
    main()
