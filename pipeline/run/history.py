"""What of a journal holds: a resume after an earlier step rolls later entries back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

RESUMED = "resumed"
"""Journal event: a start that resumes after a step."""
STARTED = "started"
"""Journal event: a process has started; with the hashes of what it reads."""
ENDED = "ended"
"""Journal event: a clean end with its summary."""
RESTARTED = "restarted"
"""Journal event: the run died or hung, and its parent has started it again; with the reason."""
REWARDS_CHANGED = "rewards_changed"
"""Journal event: the rewards have changed; earlier scores are not comparable."""
SETTINGS_CHANGED = "settings_changed"
"""Journal event: a resume has changed other settings, which `--accept` named."""

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
            found = [earlier for earlier in found if earlier.get("step", 0) <= entry["step"]]
        elif entry["event"] in {*events, since}:
            found.append(entry)
    last = max((at for at, entry in enumerate(found) if entry["event"] == since), default=-1)
    return found[last + 1 :]


def last_summary(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The summary of the last clean end; None if there was none, or the run was resumed since."""
    found = None
    for entry in entries:
        if entry["event"] in {ENDED, RESUMED}:
            found = entry.get("summary")
    return found


def rewards_changed_after(entries: Iterable[Mapping[str, Any]]) -> int:
    """The last step by other rewards than now; 0: there is none.

    A resume after an earlier step does not undo a change: it then holds from that step on.
    """
    found = 0
    for entry in entries:
        if entry["event"] == REWARDS_CHANGED:
            found = entry["after_step"]
        elif entry["event"] == RESUMED:
            found = min(entry["step"], found)
    return found


def rewards_version(entries: Iterable[Mapping[str, Any]]) -> int:
    """The number of the current rewards: 0 at first, then one more with each change."""
    return sum(entry["event"] == REWARDS_CHANGED for entry in entries)


def provenance(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Hashes at the last start: `code`, `base`, `data` by split, `rewards` by function."""
    started = [entry for entry in entries if entry["event"] == STARTED]
    return {name: started[-1][name] for name in ("code", "base", "data", "rewards") if started}
