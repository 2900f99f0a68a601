"""Reads the final schedules (LLO) that libtpu dumps: the VLIW bundles of instructions. No JAX.

A bundle takes a cycle of the clock, or longer where it waits: a schedule is a lower bound. A loop
counts once per iteration, including the one that fills its pipeline only if the loop has more of
them; a loop whose trip count depends on data counts once, like every branch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FLAGS = (
    "--xla_jf_dump_to={folder}",
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=dedup|final_bundles",
    "--xla_jf_dump_use_subdirectories=true",
)
"""Flags of libtpu that write the final schedules of a process to a folder."""

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(\w\w)?\s*:\s*(>*) *\{(.*)$")
_DEFINED = re.compile(
    r"%(\w+) = (sadd\.s32|sphi|smov|scmp\.ge\.s32\.totalorder) (?:\(!?%\w+\), )?([^/;}]*)"
)
_BACK = re.compile(r"sbr\.rel \(!%(\w+)\)")
_FILE = re.compile(r"\d+-(.*?)(?:-\d+)?(?<!-schedule-analysis)-final_bundles\.txt")
_FILLS = "iteration index, stage = 1"


@dataclass
class _Loop:
    """A loop while it is read: its depth, bundles of its own, and trip count."""

    depth: int
    inside: _Loop | None
    bundles: int = 0
    trips: int = 1
    is_pipelined: bool = False

    @property
    def runs(self) -> int:
        """Iterations, with those of the enclosing loops."""
        return self.trips * (1 if self.inside is None else self.inside.runs)


def bundles(text: str) -> int:
    """Bundles that one run of an instruction executes, from the text of its final schedule."""
    top = _Loop(0, None)
    loops, here = [top], top
    defined: dict[str, tuple[str, list[str]]] = {}
    counters: dict[str, _Loop] = {}
    tests: list[str] = []
    for line in text.splitlines():
        found = _BUNDLE.match(line)
        if found is None:
            continue
        label, depth, code = found[1], len(found[2]), found[3]
        is_empty = not code.startswith(" ")  # printed without its depth
        while here.inside is not None and not is_empty and (
            depth < here.depth or (label == "LB" and depth == here.depth)
        ):
            here = here.inside
        if label == "LB":
            here = _Loop(depth, here)
            loops.append(here)
        here.bundles += 1
        here.is_pipelined |= _FILLS in code
        for name, operation, operands in _DEFINED.findall(code):
            defined[name] = operation, [part.strip().lstrip("%") for part in operands.split(",")]
            if operation == "sphi":
                counters[name] = here
        tests += _BACK.findall(code)
    for test in tests:
        _, (counter, bound) = defined.get(test, ("", ("", "")))
        operation, added = defined.get(counter, ("", []))
        phis = [name for name in added if name in counters]
        if operation == "sadd.s32" and phis and bound.isdecimal():
            loop = counters[phis[0]]
            _, (first, *_) = defined[phis[0]]
            start = defined.get(first, ("", ["0"]))[1][0]
            step = next(int(part) for part in added if part.isdecimal())
            begin = int(start) if start.isdecimal() else 0
            loop.trips = max(1, -(-(int(bound) - begin) // step) - loop.is_pipelined)
    return sum(loop.bundles * loop.runs for loop in loops)


def read_schedules(folders: Iterable[Path]) -> dict[str, int]:
    """Bundles by instruction, from the folders that libtpu wrote for one program.

    Equal instructions are scheduled once, for the first of them.
    """
    found: dict[str, int] = {}
    same: list[str] = []
    for folder in folders:
        for path in folder.glob("**/*.txt"):
            name = _FILE.fullmatch(path.name)
            if path.name.endswith("deduplication-map.txt"):
                same = path.read_text().splitlines()
            elif name is not None:
                found[name[1]] = bundles(path.read_text())
    first = ""
    for line in same:
        if line.startswith("key:"):
            first = line.removeprefix("key:")
        elif line.startswith("  ") and first in found:
            found[line.strip()] = found[first]
    return found
