"""What of a journal holds: a resume after an earlier step rolls later entries back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

RESUMED = "resumed"  # a start that resumes after a step
STARTED = "started"  # a process has started; with the hashes of what it reads
ENDED = "ended"  # a clean end, after which the summary is there
RESTARTED = "restarted"  # the run died or hung, and its parent has started it again
REWARDS_CHANGED = "rewards_changed"  # earlier scores are not comparable
SETTINGS_CHANGED = "settings_changed"  # a resume has changed others, which `--accept` named

Entry = TypeVar("Entry", bound=Mapping[str, Any])


def valid_entries(entries: Iterable[Entry], events: Collection[str]) -> list[Entry]:
    """Entries of these events, oldest first, without those that a later resume rolled back.

    An entry is rolled back if a later resume starts after an earlier `step`; one without a `step`
    never is. The events are others than `RESUMED`.
    """
    found: list[Entry] = []
    for entry in entries:
        if entry["event"] == RESUMED:
            found = [earlier for earlier in found if earlier.get("step", 0) <= entry["step"]]
        elif entry["event"] in events:
            found.append(entry)
    return found


def rewards_version(entries: Iterable[Mapping[str, Any]]) -> int:
    """The number of the current rewards: 0 at first, then one more with each change."""
    return sum(entry["event"] == REWARDS_CHANGED for entry in entries)


def provenance(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Hashes at the last start: `code`, `base`, `data` by split, `rewards` by function."""
    started = [entry for entry in entries if entry["event"] == STARTED]
    return {name: started[-1][name] for name in ("code", "base", "data", "rewards") if started}
