from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.clock import PhaseClock
from pipeline.progress import Progress
from pipeline.protocols import ProcessUse
from pipeline.run.meter import Hardware, RunMeter, speeds
from pipeline.run.run_folder import RunFolder
from tests.run_process import FakeClock

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
