"""The settings of a run's end: after how many steps, how much time, or when."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field, model_validator

from configs.base import Problem, Table, Text, parse_duration_s, refuse

_FIRST_YEAR, _LAST_YEAR = 1970, 2999
"""Of instants: what is earlier or later is a mistake, if a machine knows it at all."""


class Budget(Table):
    """How long the run goes on: a number of steps, a time, or until when; one of them."""

    steps: int | None = Field(None, ge=1, description="end after this many steps")
    time: Text | None = Field(
        None,
        description="end within this time, evaluation and export included, e.g. 9h or 1h30m; time "
        "used before a resume counts, and a resume may be given another one",
    )
    until: Text | None = Field(
        None,
        description="end before then, evaluation and export included, e.g. 2026-11-22T18:00+01:00; "
        "local time where no offset is given",
    )
    from_submission: bool = Field(
        False,
        description="time counts from when launch/submit.sh submitted the job, not its start, and "
        "waiting for devices counts, too",
    )

    @model_validator(mode="after")
    def _one_of_three(self) -> Budget:
        problems: list[Problem] = []
        given = [key for key in ("steps", "time", "until") if getattr(self, key) is not None]
        if not given:
            what = 'needs steps, time or until, e.g. steps = 60 or time = "9h"'
            problems.append(("", what))
        for key in given[1:]:
            other = f"budget.{given[0]}"
            problems.append((key, f"excludes {other}; remove one, e.g. with --{other} none"))
        for key, read in (("time", parse_duration_s), ("until", parse_instant)):
            try:
                if getattr(self, key) is not None:
                    read(getattr(self, key))
            except ValueError as error:
                problems.append((key, str(error)))
        if self.from_submission and self.time is None:
            problems.append(("from_submission", "means nothing without budget.time; remove it"))
        refuse(problems)
        return self

    @property
    def time_s(self) -> int | None:
        """The time budget in seconds, if there is one."""
        return None if self.time is None else parse_duration_s(self.time)

    @property
    def until_s(self) -> float | None:
        """When the run has to have ended, in seconds since 1970, if that is what was given."""
        return None if self.until is None else parse_instant(self.until).timestamp()


def parse_instant(text: str) -> datetime:
    """The instant that an ISO 8601 date and time names; local time where it has no offset.

    Raises:
        ValueError: if `text` is not of that form, or not in years that clocks and time zones know.
    """
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or len(text) <= len("2026-11-22"):
        raise ValueError(
            f"{text!r} is not a date and time; write for example '2026-11-22T18:00+01:00'"
        )
    if not _FIRST_YEAR <= found.year <= _LAST_YEAR:
        early = found.year < _FIRST_YEAR
        nearest = f"{_FIRST_YEAR}-01-01T00:00" if early else f"{_LAST_YEAR}-12-31T23:59"
        raise ValueError(
            f"{text!r} is in no year from {_FIRST_YEAR} to {_LAST_YEAR}; nearest valid: "
            f"'{nearest}+00:00'"
        )
    return found.astimezone()
