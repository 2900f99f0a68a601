"""What of a journal holds: a resume after an earlier step rolls later entries back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

from configs.steering import is_weight
from pipeline.contracts.steering import REWARDS_CHANGED, SetValue, sets_in_force

RESUMED = "resumed"
"""Journal event: a start that resumes after a step."""
STARTED = "started"
"""Journal event: a process has started; with the hashes of what it reads."""
RESTARTED = "restarted"
"""Journal event: the run died or hung, and its parent has started it again; with the reason."""
REWARDS = "rewards"
"""Journal event: the hashes of the reward functions' code."""

Entry = TypeVar("Entry", bound=Mapping[str, Any])


def valid_entries(
    entries: Iterable[Entry], events: Collection[str], *, since: str | None = None
) -> list[Entry]:
    """Entries of these events, oldest first, without those that a later resume rolled back.

    An entry is rolled back if a later resume starts after an earlier `step`; one without a `step`
    never is.

    Args:
        entries: the journal.
        events: kinds of entries, but for `RESUMED`.
        since: an event; entries before the last one are left out.
    """
    found: list[Entry] = []
    for entry in entries:
        if entry["event"] == RESUMED:
            found = [earlier for earlier in found if _holds(earlier, entry["step"])]
        elif entry["event"] in {*events, since}:
            found.append(entry)
    last = max((at for at, entry in enumerate(found) if entry["event"] == since), default=-1)
    return found[last + 1 :]


def steps_with_changed_rewards(entries: Iterable[Mapping[str, Any]]) -> list[int]:
    """Steps after which the rewards changed, ascending.

    A resume after an earlier step does not undo a change by `--accept rewards`: it then holds from
    that step on. It undoes one by `launch.control`, until the run comes to its step again.
    """
    found: list[Mapping[str, Any]] = []
    for entry in entries:
        if entry["event"] == REWARDS_CHANGED:
            found.append(entry)
        elif entry["event"] == RESUMED:
            step = entry["step"]
            kept = [earlier for earlier in found if _holds(earlier, step)]
            found = [{**one, "after_step": min(step, one["after_step"])} for one in kept]
    return sorted({entry["after_step"] for entry in found})


def rewards_version(entries: Iterable[Mapping[str, Any]]) -> int:
    """The number of the rewards in force: 0 at first, then one more with each new change.

    Rewards to which a resume comes back, or that it repeats, have the number that they had.
    """
    numbers: dict[Any, int] = {}
    in_force: list[tuple[Mapping[str, Any], int]] = []
    for at, entry in enumerate(entries):
        if entry["event"] == REWARDS_CHANGED:
            number = numbers.setdefault(entry.get("request", at), len(numbers) + 1)
            in_force.append((entry, number))
        elif entry["event"] == RESUMED:
            in_force = [one for one in in_force if _holds(one[0], entry["step"])]
    return in_force[-1][1] if in_force else 0


def unrecorded_weights(entries: Iterable[Mapping[str, Any]], *, step: int) -> list[SetValue]:
    """Weights of rewards that are in force after `step` steps, without the event of their change.

    A process was killed between the journal's entries of the request and of the changed rewards.
    """
    entries = list(entries)
    recorded = {entry.get("request") for entry in valid_entries(entries, (REWARDS_CHANGED,))}
    return [
        one
        for one in sets_in_force(entries)
        if is_weight(one.key)
        and one.step <= step
        and one.old != one.new
        and one.request not in recorded
    ]


def provenance(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Hashes at the last start: `code`, `base`, `data` by split, `rewards` by function.

    Those that an earlier version did not journal are left out.
    """
    found: dict[str, Any] = {}
    for entry in entries:
        if entry["event"] == STARTED:
            found |= {name: entry[name] for name in ("code", "base", "data") if name in entry}
        elif entry["event"] == REWARDS:
            found["rewards"] = entry["sha256"]
    return found


def _holds(entry: Mapping[str, Any], step: int) -> bool:
    """Whether a resume after `step` does not roll the entry back."""
    if entry["event"] != REWARDS_CHANGED:
        found: int = entry.get("step", 0)
        return found <= step
    return "request" not in entry or entry["after_step"] <= step
