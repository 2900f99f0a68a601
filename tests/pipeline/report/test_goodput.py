from __future__ import annotations

import pytest

from pipeline.report.goodput import Hardware, chip_seconds, cost, goodput, speeds
from pipeline.run.ledger import Work
from tests.fakes import make_config

SPLIT = Hardware({"learner": 4, "samplers": 2}, 8, 1.5)
SECONDS = {
    "driver": {"device_wait": 10.0, "waiting_samplers": 30.0, "waiting_learner": 20.0},
    "learner": {"device_wait": 10.0, "waiting_samplers": 30.0, "update": 15.0, "update_padding": 5},
    # Two samplers.
    "samplers": {"device_wait": 20.0, "decode": 40, "decode_idle": 20.0, "waiting_learner": 40.0},
    "rewards": {"scoring": 7.0},
}
WORK = Work(600, segments={64: 10}, trained=540, positions=2000, padded=500)


def test_goodput_is_by_chip_seconds():
    rows = chip_seconds(SECONDS, SPLIT)
    assert (rows["device_wait"], rows["decode"], rows["update"]) == (80.0, 80.0, 60.0)
    found = goodput(SECONDS, SPLIT)
    assert found == {
        "scheduling": 400 / 480,
        "runtime": 1.0,
        "program": 140 / 400,
        "total": pytest.approx(140 / 480),
    }
    assert found["total"] == pytest.approx(
        found["scheduling"] * found["runtime"] * found["program"]
    )
    assert goodput({}, SPLIT) == {}


def test_evaluations_and_checkpoints_lower_runtime_goodput():
    seconds = {"learner": {"update": 6.0, "evaluation": 3.0, "checkpoint": 1.0}}
    alone = Hardware({"learner": 8}, 8)
    assert goodput(seconds, alone) == {
        "scheduling": 1.0,
        "runtime": 0.6,
        "program": 1.0,
        "total": 0.6,
    }


def test_speeds_are_per_second_of_steps_and_of_phases():
    found = speeds(SECONDS, WORK, SPLIT)
    assert found == {
        "generated_tokens_per_s": 600 / 50,
        "trained_tokens_per_s": 540 / 50,
        "useful_tokens_per_s_chip": 540 / (50 * 8),
        "decode_tokens_per_s": 600 / 30,
        "update_tokens_per_s": 1500 / 20,
    }


def test_mfu_counts_4_operations_per_token_and_hfu_what_is_executed():
    chip = Hardware(
        {"learner": 4, "samplers": 2},
        8,
        parameters=1000,
        operations=6.0,
        flops=1e6,
        int8_flops=2e6,
        segment_s=lambda slots: slots / 64,
    )
    found = speeds(SECONDS, WORK, chip)
    assert found["mfu"] == pytest.approx(4 * 1000 * 1500 / (1e6 * 4 * 20))
    assert found["hfu"] == pytest.approx(6 * 1000 * 2000 / (1e6 * 4 * 20))
    assert found["mfu_int8"] == pytest.approx(found["mfu"] / 2)
    # Ten segments of at least 1 s on two chips, in 120 chip-seconds.
    assert found["decode_bandwidth"] == pytest.approx(10 * 2 / 120)


def test_a_colocated_run_generates_on_the_learners_chips():
    seconds = {"driver": {"waiting_samplers": 10.0}, "learner": {"decode": 5.0, "prefill": 5.0}}
    found = speeds(seconds, WORK, Hardware({"learner": 8}, 8))
    assert found["decode_tokens_per_s"] == 600 / 5


def test_cost_needs_a_price():
    tokens = {"trained": 500_000, "no_signal": 250_000, "evaluation": 250_000}
    assert cost(3600.0, tokens, SPLIT) == {
        "usd": 12.0,
        "usd_per_mtoken_generated": 12.0,
        "usd_per_mtoken_trained": 24.0,
        "tokens_per_usd": pytest.approx(500_000 / 12),
    }
    assert cost(3600.0, tokens, Hardware({"learner": 8}, 8)) == {}
    assert cost(3600.0, {}, SPLIT) == {"usd": 12.0}


def test_limits_and_plan_of_a_tpu_and_of_unknown_models(tmp_path):
    config = make_config(tmp_path, plan={"platform": "tpu", "placement": "colocated", "slots": 8})
    found = Hardware.of(config)
    # The model's folder does not exist: chips and price are known.
    assert (found.chips, found.chip_hour_usd, found.flops) == ({"learner": 1}, 1.2, 0.0)
