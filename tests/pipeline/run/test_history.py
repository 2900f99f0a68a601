"""What of a journal holds after resumes."""

from __future__ import annotations

from typing import Any

from pipeline.run.history import rewards_version


def changed(step: int, request: str | None = None) -> dict[str, Any]:
    by = {} if request is None else {"request": request}
    return {"event": "rewards_changed", "after_step": step, "changes": [], **by}


def resumed(step: int) -> dict[str, Any]:
    return {"event": "resumed", "step": step}


def test_rewards_are_numbered():
    journal: list[dict[str, Any]] = []
    found = []
    for entry in (
        changed(10, "a"),
        changed(20, "b"),
        resumed(15),  # before b
        changed(20, "b"),  # the resumed run repeats it
        resumed(5),  # before both
        changed(5),  # --accept rewards
        resumed(5),
        changed(10, "a"),
    ):
        journal.append(entry)
        found.append(rewards_version(journal))
    assert found == [1, 2, 1, 2, 0, 3, 3, 1]
