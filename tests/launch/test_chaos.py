"""`launch.bench chaos`: which faults it plans. One run with faults is in `test_runs.py`."""

from __future__ import annotations

from launch.bench.chaos import LEAST, PHASES, ROLES, SIGNALS, STARTING, planned


def test_each_role_meets_each_phase_in_which_it_runs_and_each_phase_each_signal():
    met = {(role, name, fault.phase) for role in ROLES for name, found in planned(role).items()
           for fault in found}  # fmt: skip
    assert len(met) == sum(len(found) for role in ROLES for found in planned(role).values())
    assert len(met) > LEAST
    assert {(role, phase) for role, _, phase in met} == {
        (role, phase)
        for role in ROLES
        for phase in PHASES
        if phase not in STARTING or phase in ROLES[role].starting
    }
    assert {(name, phase) for _, name, phase in met} == {(n, p) for n in SIGNALS for p in PHASES}


def test_the_plan_is_seeded():
    assert planned("learner") == planned("learner") != planned("learner", seed=99)
