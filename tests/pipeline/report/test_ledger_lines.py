from __future__ import annotations

from typing import Any

from pipeline.report.ledger_lines import ledger_lines

MEASURED: dict[str, Any] = {
    "ledger": {
        "wall_s": 100.0,
        "first_step_s": 41.0,
        "processes": 3,
        "seconds": {
            "driver": {"waiting_learner": 60.0, "evaluation": 40.0},
            "learner": {"update": 45.0, "update_padding": 15.0, "evaluation": 39.9, "sync": 0.1},
            "samplers": {"waiting_learner": 60.0, "evaluation": 40.0},
        },
        "tokens": {"trained": 750, "no_signal": 250},
    },
    "goodput": {"scheduling": 1.0, "runtime": 0.6, "program": 0.375, "total": 0.225},
    "speed": {"useful_tokens_per_s_chip": 12.5, "mfu": 0.31, "hfu": 0.47},
    "cost": {"usd": 0.25, "usd_per_mtoken_generated": 250.0, "usd_per_mtoken_trained": 333.3333},
}


def test_rows_by_kind_of_process_with_shares_of_all_seconds():
    assert list(ledger_lines(MEASURED)) == [
        "where the time went: 1m40s x 3 processes; first optimizer step done after 41s",
        "  seconds               driver   learner  samplers    share",
        "  update                            45.0              15.0%",
        "  update padding                    15.0               5.0%",
        "  waiting learner         60.0                60.0    40.0%",
        "  evaluation              40.0      39.9      40.0    40.0%",
        (
            "tokens: 1,000 generated, evaluations and repeated work included: 75.0% trained, "
            "25.0% no signal"
        ),
        "goodput: 22.5% = 100.0% scheduling x 60.0% runtime x 37.5% program",
        (
            "speed: 12.5 trained tokens per second and chip; of the chips' limits: MFU 31.0%, "
            "HFU 47.0%"
        ),
        (
            "cost: 0.25 dollars, 250.00 per million generated tokens, 333.33 per million trained "
            "tokens"
        ),
    ]


def test_a_run_that_has_not_begun_has_no_lines():
    empty: dict[str, Any] = {
        "wall_s": 0.0,
        "first_step_s": None,
        "processes": 0,
        "seconds": {},
        "tokens": {},
    }
    assert list(ledger_lines({"ledger": empty, "goodput": {}, "speed": {}, "cost": {}})) == []


def test_a_run_that_ended_before_its_first_step_names_none():
    ledger = MEASURED["ledger"] | {"first_step_s": None}
    first, *_ = ledger_lines(MEASURED | {"ledger": ledger})
    assert first == "where the time went: 1m40s x 3 processes"
