"""Settings of the run's budget: a number of steps, a duration, or a deadline."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from pydantic import ConfigDict, Field

from configs.base import FREE, Problem, Table, Text, parse_duration_s


class Budget(Table):
    """When the run ends: after a number of steps, a duration, or at a deadline; exactly one."""

    model_config = ConfigDict(json_schema_extra=FREE)

    steps: int | None = Field(
        None, ge=1, le=2**31 - 1, description="number of steps after which the run ends"
    )
    time: Text | None = Field(
        None,
        description="duration of the run, evaluation and export included, e.g. 9h or 1h30m; time "
        "used before a resume counts; a resume may set another duration",
    )
    until: Text | None = Field(
        None,
        description="deadline of the run, evaluation and export included, e.g. "
        "2026-11-22T18:00+01:00; local time without an offset",
    )

    def conflicts(self) -> Iterator[Problem]:
        """Exactly one of the three is set, in its form."""
        given = self.changed("steps", "time", "until")
        if not given:
            yield "", 'set steps, time or until, e.g. steps = 60 or time = "9h"'
        for key in given[1:]:
            both = f"--budget.{given[0]} none or --budget.{key} none"
            yield key, f"excludes budget.{given[0]}; remove one: {both}"
        for key, read in (("time", parse_duration_s), ("until", parse_instant)):
            try:
                if key in given:
                    read(getattr(self, key))
            except ValueError as error:
                yield key, str(error)

    @property
    def time_s(self) -> int | None:
        """The time budget in seconds, if there is one."""
        return None if self.time is None else parse_duration_s(self.time)

    @property
    def until_s(self) -> float | None:
        """The deadline in seconds since 1970, if `until` is set."""
        return None if self.until is None else parse_instant(self.until).timestamp()


def parse_instant(text: str) -> datetime:
    """Parses an ISO 8601 date and time; local time without an offset.

    Raises:
        ValueError: if `text` has another form.
    """
    try:
        if len(text) > len("2026-11-22"):
            return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):  # a year that no clock has
        pass
    raise ValueError(f"{text!r} is not a date and time; write for example '2026-11-22T18:00+01:00'")
