"""The file `rewards.log`: what reward functions print, and the tracebacks of their errors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from rewards.base import RewardError, RewardInput, printable

_MOST_BYTES = 64 * 2**20
MOST_OUTPUT = 64 * 2**10
"""Characters of what a function prints in a call."""
_SHOWN = 3


class RewardLog:
    """Appends to the log of a run.

    Args:
        path: the file; None: nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._notices = list[str]()
        self._noticed = set[str]()

    def output(
        self, name: str, inputs: Sequence[RewardInput], text: str, *, what: str = "output"
    ) -> None:
        """Records what a function printed while it scored `inputs`; without any, at its import.

        `what` the text is, if it is not printed by the function itself.
        """
        if name not in self._noticed and what == "output" and text.strip():
            self._noticed.add(name)
            self._notices.append(f"reward {name!r} prints: {printable(text)}")
        if len(text) > MOST_OUTPUT:
            text = f"{text[:MOST_OUTPUT]}\n... further output of this call is dropped"
        self._write(name, inputs, what, text)

    def error(self, name: str, given: RewardInput, error: RewardError, trace: str = "") -> None:
        """Records an error and its traceback."""
        self._write(name, [given], f"{error.cause}: {error.message}", trace)

    def notices(self) -> list[str]:
        """A line for each function that has printed something for the first time."""
        found, self._notices = self._notices, []
        return found

    def _write(self, name: str, inputs: Sequence[RewardInput], title: str, text: str) -> None:
        if self._path is None:
            return
        ids = list(dict.fromkeys(f"{one.prompt_id}" for one in inputs))
        more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
        where = f"prompt {', '.join(ids[:_SHOWN])}{more}" if ids else "import"
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        body = "".join(f"    {line}\n" for line in text.splitlines())
        # A full disk does not end the run, nor does a run folder that does not exist.
        with (
            suppress(OSError),
            self._path.open("a", encoding="utf-8", errors="backslashreplace") as file,
        ):
            if file.tell() < _MOST_BYTES:
                file.write(f"{now} {name}, {where}: {title}\n{body}")
                if file.tell() >= _MOST_BYTES:
                    most = f"{_MOST_BYTES >> 20} MiB"
                    file.write(f"this file has {most}; nothing more is written to it\n")
