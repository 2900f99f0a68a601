"""What a resume says of changed rewards and other hardware."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.preparation import check_same_code
from launch.resume import record_changes
from pipeline.run.run_folder import RunFolder
from tests.samples import make_config


def test_changed_code_of_a_reward_is_refused_until_it_is_accepted(tmp_path: Path):
    config = make_config(tmp_path)
    folder = RunFolder.of(config)
    folder.create(config)
    folder.close()
    old = {"correct": "a" * 64, "format": "b" * 64}
    check_same_code(folder, old, accept=())  # of a run that began without hashes: unknown
    folder.journal("started", code="", base="", data={}, rewards=old)
    new = {**old, "format": "c" * 64}
    with pytest.raises(ValueError, match="the reward functions have changed since") as caught:
        check_same_code(folder, new, accept=())
    assert str(caught.value).splitlines()[1:] == [
        '  rewards.functions.format.code: was "bbbbbbbbbbbb", now "cccccccccccc" (--accept rewards)'
    ]
    check_same_code(folder, old, accept=())
    check_same_code(folder, new, accept=["rewards"])
    (change,) = record_changes(folder, config, new, step=7)
    folder.journal("started", code="", base="", data={}, rewards=new)
    assert change == ("rewards.functions.format.code", "b" * 12, "c" * 12)
    (entry,) = folder.events("rewards_changed")
    assert (entry["after_step"], entry["changes"]) == (7, [list(change)])
    # The next start finds the accepted code.
    check_same_code(folder, new, accept=())
    assert record_changes(folder, config, new, step=9) == []


def test_a_run_continues_on_other_hardware_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = make_config(tmp_path, plan={"placement": "split", "slots": 2})
    folder = RunFolder.of(config)
    folder.create(config)
    moved = make_config(tmp_path, plan={"placement": "colocated", "slots": 4})
    folder.close()
    folder.check(moved)
    assert record_changes(folder, moved, {}, step=2) == []
    (entry,) = folder.events("hardware_changed")
    assert entry["after_step"] == 2
    assert ["plan.placement", "split", "colocated"] in entry["changes"]
    assert "other devices or sizes from step 3 on" in capsys.readouterr().out
