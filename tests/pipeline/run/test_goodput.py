"""Where the time of a run goes: phases, goodput, speed, cost; and profiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.clock import PhaseClock
from pipeline.progress import Progress
from pipeline.protocols import ProcessUse
from pipeline.run.goodput import time_use
from pipeline.run.meter import Hardware, RunMeter, speeds
from pipeline.run.run_folder import RunFolder
from tests.run_process import FakeClock, Script, left_behind
from tests.samples import make_config, make_data
from tests.stub_workers import StubRun

START = {"device_wait": 4.0, "ray_start": 6.0, "loading": 10.0}
"""16 s on the run's clock, which does not count waits."""


def started(at_s: float, *, used_before_s: float = 0.0, **seconds: float) -> dict[str, Any]:
    return {
        "event": "started",
        "elapsed_s": at_s,
        "used_before_s": used_before_s,
        "seconds": seconds,
    }


def ended(at_s: float, **seconds: float) -> dict[str, Any]:
    return {"event": "ended", "elapsed_s": at_s, "seconds": seconds}


def row(step: int, at_s: float, **more: float) -> dict[str, float]:
    """A step of 10 s, with half of the slots used and a quarter of the update padding."""
    return {
        "step": step,
        "time/sample_s": 5.0,
        "time/learn_s": 4.0,
        "time/coordination_s": 1.0,
        "time/step_s": 9.0,
        "time/devices/prefill_s": 1.0,
        "time/devices/decode_s": 4.0,
        "time/devices/update_s": 4.0,
        "rollout/slots_useful": 0.5,
        "learner/padded_share": 0.25,
        "time/elapsed_s": at_s,
        **more,
    }


def test_goodput_is_scheduling_x_runtime_x_program():
    rows = [row(1, 36.0, **{"time/evaluation_s": 10.0}), row(2, 46.0)]
    use = time_use(rows, [started(16.0, **START), ended(56.0, export=10.0)])
    assert use.seconds == {
        **START,
        "sample": 10.0,
        "learn": 8.0,
        "coordination": 2.0,
        "evaluation": 10.0,
        "export": 10.0,
    }
    assert (use.wall_s, use.first_step_s, use.starts) == (60.0, 40.0, 1)
    assert use.devices == {
        "prefill": 2.0,
        "decode": 4.0,
        "update": 6.0,
        "empty slots": 4.0,
        "padding": 2.0,
        "idle": 2.0,
    }
    assert use.goodput == {
        "scheduling": pytest.approx(50 / 60),
        "runtime": 20 / 50,
        "program": 12 / 20,
        "total": 12 / 60,
    }


def test_the_work_of_killed_processes_is_lost():
    """Killed twice: 3 s into step 3, then 1 s into the same step; the checkpoint is of step 1."""
    journal = [
        started(16.0, **START),
        {"event": "resumed", "step": 1},
        started(49.0, used_before_s=39.0, loading=10.0),
        {"event": "resumed", "step": 1},
        started(70.0, used_before_s=60.0, loading=10.0),
        ended(92.0, export=2.0),
    ]
    rows = [row(1, 26.0), row(2, 80.0), row(3, 90.0)]
    use = time_use(rows, journal)
    assert use.seconds["lost"] == 10 + 3 + 10 + 1
    assert (use.wall_s, use.starts, use.first_step_s) == (96.0, 3, 30.0)
    assert use.goodput["runtime"] == 30 / 86


def test_a_process_that_ended_in_order_loses_a_step_that_did_not_end():
    journal = [
        started(16.0, **START),
        ended(29.0, sample=2.0, checkpoint=1.0),
        started(41.0, used_before_s=31.0, loading=10.0),
    ]
    use = time_use([row(1, 26.0)], journal, used_s=46.0)
    kept = {"checkpoint": 1.0, "end": 2.0, "lost": 2.0 + 5.0}
    assert {**use.seconds, **kept} == use.seconds
    assert use.wall_s == 50.0


DELAYS = {
    "learner.score": ("probe", 1.0),
    "sampler0.generate:test": ("evaluation", 2.0),
    "sampler0.generate:train": ("sample", 4.0),
    "scorer.score": ("reward", 8.0),
    "learner.update": ("learn", 16.0),
    "learner.save": ("checkpoint", 32.0),
    "learner.export": ("export", 64.0),
}
"""Phase and seconds of a call."""


def test_planted_delays_are_in_their_phases(tmp_path: Path):
    config = make_config(tmp_path, budget={"steps": 2})
    durations = {call: seconds for call, (_, seconds) in DELAYS.items()}
    script = Script(durations=durations)
    run = StubRun(config, data=make_data(), script=script)
    run.run()
    summary = run.folder.summary
    assert summary is not None
    seconds = summary["time"]["seconds"]
    for call, (phase, delay_s) in DELAYS.items():
        # Two steps; scores of a test are in the time of evaluations.
        calls = sum(name.split()[0] == call for name in script.calls)
        assert calls * delay_s == pytest.approx(seconds[phase], rel=0.01), phase
    assert sum(seconds.values()) == pytest.approx(summary["wall_s"])


# --- profiles


def profiled(folder: Path, steps: str | None, **more: Any) -> StubRun:
    return StubRun(make_config(folder, profile={"steps": steps}, budget={"steps": 4}), **more)


def test_the_named_steps_are_profiled_and_their_results_are_the_same(tmp_path: Path):
    plain, run = profiled(tmp_path / "plain", None), profiled(tmp_path / "profiled", "2-3")
    assert (plain.run(), run.run()) == ("finished", "finished")
    assert not (plain.folder.path / "profile").exists()
    assert left_behind(run.folder)["rollouts"] == left_behind(plain.folder)["rollouts"]
    assert run.worker.adapter == plain.worker.adapter
    script = Script()
    script.on["learner.update 2"] = script.stop.set
    stopped = profiled(tmp_path / "stopped", "2-4", script=script)
    assert stopped.run() == "interrupted"
    for one in (run, stopped):
        traced = sorted(path.name for path in (one.folder.path / "profile").iterdir())
        assert traced == ["learner", "sampler_0"]


# --- speed and cost


SPLIT = Hardware({"learner": 4, "samplers": 2}, 8, 1.5)
"""A learner of four chips and two samplers of two."""
ROW = {
    "time/sample_s": 30.0,
    "time/learn_s": 20.0,
    # Two samplers decode 30 s each, the learner updates 20 s.
    "time/devices/prefill_s": 0.0,
    "time/devices/decode_s": 15.0,
    "time/devices/update_s": 10.0,
    "tokens/generated": 600.0,
    "learner/tokens_trained": 540.0,
    "learner/positions": 1000.0,
    "learner/tokens_padded": 250.0,
}


def test_speeds_are_per_second_and_mfu_counts_4_operations_per_token():
    assert speeds(ROW, SPLIT, passes=2) == {
        "generated_tokens_per_s": 600 / 50,
        "trained_tokens_per_s": 540 / 50,
        "useful_tokens_per_s_chip": 540 / (50 * 8),
        "decode_tokens_per_s": 600 / 30,
        "update_tokens_per_s": 1500 / 20,
    }
    known = replace(SPLIT, parameters=1000, flops=1e6)
    assert speeds(ROW, known, passes=2)["mfu"] == pytest.approx(4 * 1000 * 1500 / (1e6 * 4 * 20))


def test_cost_needs_a_price(tmp_path: Path):
    def cost(progress: Progress, hardware: Hardware) -> dict[str, float]:
        meter = RunMeter(RunFolder(tmp_path), hardware, PhaseClock())
        return meter.cost(progress, used_s=3600.0)

    progress = Progress(tokens_generated=1_000_000, tokens_trained=500_000)
    per_million = {"usd_per_mtoken_generated": 12.0, "usd_per_mtoken_trained": 24.0}
    assert cost(progress, SPLIT) == {"usd": 12.0, **per_million}
    assert cost(progress, Hardware({"learner": 8}, 8)) == {}
    assert cost(Progress(), SPLIT) == {"usd": 12.0}


def test_the_time_of_a_start_has_its_compilation_apart(tmp_path: Path):
    now = FakeClock()
    meter = RunMeter(RunFolder(tmp_path), SPLIT, PhaseClock(now))
    with meter.phases.during("loading"):
        now.seconds = 30.0
    uses = {
        "learner": ProcessUse({"loading": 28.0, "compile": 2.0}),
        "sampler 0": ProcessUse({"loading": 5.0, "compile": 20.0}),
    }
    found = meter.start(uses, elapsed_s=37.0, used_before_s=7.0)
    assert found["seconds"] == {"loading": 10.0, "compile": 20.0}
