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

# Address, label, a mark for each enclosing loop, and the bundle; an empty bundle has no marks.
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(\w\w)?\s*:\s*(>*) *\{(.*)$")
_EXIT = re.compile(r"scmp\.ge\.s32\.totalorder %\w+, (\d+) /\* loop exit test \*/")
_FILE = re.compile(r"\d+-(.*?)(?:-\d+)?(?<!-schedule-analysis)-final_bundles\.txt")


@dataclass
class _Loop:
    """A loop while it is read: its depth, its own bundles and its trip count."""

    depth: int
    outer: _Loop | None
    bundles: int = 0
    trips: int = 1

    @property
    def runs(self) -> int:
        """Its iterations in all iterations of the enclosing loops."""
        return self.trips * (1 if self.outer is None else self.outer.runs)


def bundles(text: str) -> int:
    """Bundles that one run of an instruction executes, from the text of its final schedule."""
    here = _Loop(0, None)
    loops = [here]
    for found in filter(None, map(_BUNDLE.match, text.splitlines())):
        label, depth, code = found[1], len(found[2]), found[3]
        while (
            here.outer is not None
            and not code.startswith("}")
            and depth < here.depth + (label == "LB")
        ):
            here = here.outer
        if label == "LB":
            here = _Loop(depth, here)
            loops.append(here)
        here.bundles += 1
        if test := _EXIT.search(code):
            # One iteration more than work: it fills the pipeline of transfers and computation.
            here.trips = max(1, int(test[1]) - 1)
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
