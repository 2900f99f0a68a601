"""What of a journal holds after resumes."""

from __future__ import annotations

from pipeline.run.history import rewards_version


def test_rewards_are_numbered():
    changed, resumed = {"event": "rewards_changed"}, {"event": "resumed", "step": 5}
    assert rewards_version([resumed]) == 0
    assert rewards_version([changed, resumed, changed]) == 2
