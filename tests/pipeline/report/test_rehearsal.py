"""The table of a rehearsal: the plan's figures, the records of a run, and the lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.contracts.memory import MemoryUse
from pipeline.contracts.sizes import Sizes
from pipeline.inputs.hub.hf_config import read_model_shape
from pipeline.plan.cost_model.memory import estimate_memory
from pipeline.report.rehearsal import (
    Observed,
    figures,
    lines,
    measured_seconds,
    planned_memory,
    planned_seconds,
)
from pipeline.run.run_folder import RunFolder
from tests.fakes import make_config

GIB = 2**30
SHAPE = read_model_shape({"model_type": "gemma3_text", "num_hidden_layers": 7})
SIZES = {"slots": 16, "micro_batch_tokens": 704}
PLAN = {"platform": "tpu", "placement": "split", **SIZES}
SFT: dict[str, Any] = {
    "run": {"phases": ["sft", "grpo"]},
    "sft": {"train": {"path": "demonstrations.jsonl"}, "steps": 1},
}
VALIDATED: dict[str, Any] = {
    "data": {"validation": {"path": "validation.jsonl"}},
    "eval": {"every_steps": 2},
}
PROMPTS = {"test": 8, "validation": 4}
LAPS = {"sample": 8.0, "reward": 0.5, "learn": 7.0, "sync": 0.25}


def record(folder: RunFolder, *events: dict[str, Any]) -> None:
    """What a run of one SFT and one GRPO step records."""
    folder.path.mkdir()
    folder.write_plan({"in_force": SIZES})
    for entry in (
        {"event": "calibrated", "seconds": 20.0},
        {"event": "started", "elapsed_s": 50.0},
        {"event": "evaluated", "name": "test_before", "n": 8},
        {"event": "reserved", "reason": "test evaluation", "seconds": 3.0},
        {"event": "reserved", "reason": "validation evaluation", "seconds": 2.0},
        {"event": "reserved", "reason": "validation evaluation", "seconds": 1.0},
        {"event": "exported", "seconds": 9.0},
        *events,
    ):
        folder.journal(**entry)
    folder.write_metrics({"step": 1, "sft/loss": 1.0, "time/learn_s": 4.0, "time/sync_s": 1.0})
    folder.write_metrics({"step": 2, **{f"time/{lap}_s": s for lap, s in LAPS.items()}})


def test_seconds_are_those_that_the_run_recorded(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    record(folder)
    assert measured_seconds(folder) == {
        "start": 30.0,
        "calibration": 20.0,
        "evaluation": 3.0,
        "validation": 2.0,
        "export": 9.0,
        "SFT update": 4.0,
        "sampling": 8.0,
        "rewards": 0.5,
        "update": 7.0,
        "sync": 0.25,
    }


def test_a_step_that_ended_the_run_has_no_seconds_of_its_update(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.write_metrics({"step": 1, "time/sample_s": 8.0, "time/reward_s": 0.5})
    assert measured_seconds(folder) == {"sampling": 8.0, "rewards": 0.5}


def test_planned_seconds_have_a_range_and_are_those_of_full_length(tmp_path: Path):
    config = make_config(tmp_path, plan=PLAN, **SFT, **VALIDATED)
    planned = planned_seconds(config, config, SHAPE, PROMPTS)
    for phase, seconds in planned.items():
        fixed = phase == "calibration"  # sizes are given
        assert (seconds.expected == 0) is fixed
        assert seconds.low <= seconds.expected <= seconds.high
    rollout = {**dict(config.rollout), "max_new_tokens": 160}
    longer = make_config(tmp_path, plan=PLAN | {"micro_batch_tokens": 336}, rollout=rollout)
    twice = planned_seconds(longer, longer, SHAPE, PROMPTS)["sampling"].expected
    assert twice == pytest.approx(2 * planned["sampling"].expected, rel=0.2)


def test_planned_memory_is_that_of_the_fullest_program(tmp_path: Path):
    config = make_config(tmp_path, plan=PLAN, **SFT)
    planned, estimated = planned_memory(config, SHAPE), estimate_memory(config, SHAPE)
    assert planned.keys() == {"SFT update", "sampling", "update"}
    assert planned["sampling"] == max(estimated["prefill"].total, estimated["decode"].total)
    assert planned["update"] == max(estimated["score"].total, estimated["update"].total)


def found(folder: Path, *events: dict[str, Any], **plan: Any) -> dict[str, Any]:
    config = make_config(folder, plan={**PLAN, **plan})
    record(RunFolder.of(config), *events)
    sampler = Observed(MemoryUse({"prefill 8": 1, "segment 16": 3 * GIB}, 5 * GIB, 16 * GIB))
    sampler.peaks["sampling"] = 4 * GIB
    learner = Observed(MemoryUse({"gradient 8": 9 * GIB, "score 8": 2 * GIB}, None, None))
    learner.seconds |= {"checkpoint": 0.75, "restore": 0.5}
    return figures(config, [sampler, learner], shape=SHAPE)


def row(figures: dict[str, Any], name: str) -> list[str]:
    return next(line.split() for line in lines(figures) if line.startswith(name))


def test_figures_are_those_of_the_fullest_process_in_seconds_and_gib(tmp_path: Path):
    table = found(tmp_path)
    assert (table["works"], table["failed"], table["device_limit_gib"]) == (True, None, 16.0)
    assert table["sizes"] == table["first_sizes"] == SIZES
    phases = {phase["phase"]: phase for phase in table["phases"]}
    sampling, update, restore = (phases[name] for name in ("sampling", "update", "restore"))
    assert (sampling["compiled_gib"], sampling["device_peak_gib"]) == (3.0, 4.0)
    assert (update["compiled_gib"], update["device_peak_gib"]) == (9.0, None)
    assert sampling["planned_s"]["low"] < sampling["planned_s"]["high"]
    assert (restore["measured_s"], restore["planned_s"]) == (0.5, None)
    expected, low, high = (
        f"~{update['planned_s'][pace]:.3f}" for pace in ("expected", "low", "high")
    )
    planned = f"~{update['planned_gib']:.2f}"
    assert row(table, "update") == ["update", expected, low, high, "7.00", planned, "9.00"]
    assert "on the device: peak so far of 16.00 GiB" in lines(table)
    *_, last = lines(table)
    assert last == (
        "everything fits and works with plan.slots = 16 and plan.micro_batch_tokens = 704"
    )


def test_small_sizes_are_in_mib_and_gpus_are_not_planned_for(tmp_path: Path):
    config = make_config(tmp_path, plan={**PLAN, "platform": "gpu"})
    record(RunFolder.of(config))
    use = Observed(MemoryUse({"gradient 8": 2**19}))
    table = figures(config, [use], shape=SHAPE)
    assert row(table, "update") == ["update", "7.00", "0.50"]
    assert any("MiB planned" in line for line in lines(table))
    assert "on the device: this platform reports no memory in use" in lines(table)


@pytest.mark.parametrize("works", [True, False])
def test_the_last_lines_show_reductions_and_the_outcome(tmp_path: Path, works: bool):
    first = Sizes(32, 704).to_json()
    events = [{"event": "replan", "from": first, "to": SIZES}]
    events += [] if works else [{"event": "failed", "error": "the chips are gone"}]
    table = found(tmp_path, *events)
    assert table["works"] is works
    *_, smaller, outcome = lines(table)
    assert smaller == (
        "memory ran out: continued with plan.slots = 16 and plan.micro_batch_tokens = 704 "
        "instead of plan.slots = 32 and plan.micro_batch_tokens = 704"
    )
    assert (outcome == "FAILED: the chips are gone") is not works
