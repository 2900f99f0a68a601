"""Problems planted in small runs: whether the verdict of the report names each.

Each row is a run of the demo's model by `launch.train`, with the settings or the reward function
that cause the problem. Healthy runs raise no alarm.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import configs
from launch.bench.harness import Benchmark, Claim, Figures, Row, Section
from pipeline.run.report.run_records import RunRecords, read_run
from pipeline.run.report.verdict import verdict

_REWARDS = """
import time

def varied(completion):
    return sum(map(ord, completion)) % 7 / 6

def slow(completion):
    time.sleep(0.15)
    return varied(completion)

def long(completion):
    return len(completion) / 100

def zeros(completion):
    digits = [int(character) for character in completion if character.isdecimal()]
    return -sum(digits) / max(1, len(digits)) / 9
"""
_BASE: Mapping[str, Any] = {
    "run.name": "run",
    "rollout.prompts_per_step": 4,
    "plan.slots": 32,
    "plan.prefill_tokens": 208,
    "plan.micro_batch_tokens": 1536,
    "eval.every_steps": 1000,
    "data.validation.limit": 1,
    "data.test.limit": 1,
    "checkpoint.every_steps": 1000,
    "wandb.mode": "disabled",
    "budget.steps": 5,
}


def _alarm_after(rule: str, steps: int = 2) -> dict[str, int]:
    return {f"alarms.{rule}.steps": steps}


@dataclass(frozen=True)
class Plant:
    """How a problem is planted.

    Attributes:
        settings: of the run, by dotted key.
        reward: a function of the file with rewards; "": the demo's.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    reward: str = "varied"


PLANTS: Mapping[str, Plant] = {
    "slow_reward": Plant(reward="slow"),
    "truncation": Plant({"rollout.max_new_tokens": 12, **_alarm_after("truncation")}),
    "entropy_collapse": Plant(
        {
            "learner.lr": 5e-3,
            "budget.steps": 20,
            # All answers are soon alike: without a gradient the entropy is no longer measured.
            "alarms.entropy_collapse.below": 0.4,
            **_alarm_after("entropy_collapse", steps=1),
        },
        reward="zeros",
    ),
    "length_correlation": Plant(_alarm_after("length_correlation"), reward="long"),
    "disagreement": Plant(
        {
            "plan.rollout_weights": "int8",
            "learner.importance_cap": 2.0,
            "alarms.disagreement.above": 0.01,
        }
    ),
}
"""How each problem is planted, by the kind of its finding."""
HEALTHY = Plant({"budget.steps": 12, "rollout.prompts_per_step": 8}, reward="")
SEEDS = (0, 1, 2)


def measure(*, problem: str, seed: int = 0) -> Figures:
    """Runs with a planted problem, and judges the run.

    Args:
        problem: a key of `PLANTS`; "": a healthy run.
        seed: of the run.
    """
    plant = PLANTS[problem] if problem else HEALTHY
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        run = _run(Path(scratch), plant, seed=seed)
        found = verdict(run)
    return {
        "named": ", ".join(one.kind for one in found.problems) or "nothing",
        "evidence": "; ".join(one.evidence for one in found.problems if one.kind == problem),
        "bound": found.bound.sentence,
        "alarms": len(run.entries("alarm")),
        "steps": run.steps,
        "seconds": time.perf_counter() - began,
    }


def _run(folder: Path, plant: Plant, *, seed: int) -> RunRecords:
    """Trains with a planted problem; returns what the run recorded.

    Raises:
        RuntimeError: if the run fails, with the end of its output.
    """
    settings = {**_BASE, "run.dir": folder, "run.seed": seed, **plant.settings}
    if plant.reward:
        file = folder / "planted_rewards.py"
        file.write_text(_REWARDS)
        function = f"{{name = '{plant.reward}', function = '{file}:{plant.reward}'}}"
        settings["rewards.functions"] = f"[{function}]"
    arguments = [f"--{key}={value}" for key, value in settings.items()]
    path = Path(configs.__file__).parent / "demo.toml"
    command = [sys.executable, "-m", "launch.train", str(path), *arguments]
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            status = process.wait()
        finally:
            process.terminate()
            process.wait()
    if status:
        raise RuntimeError(log.read_text()[-2000:])
    return read_run(folder / "run")


def _claims(found: Mapping[str, Figures]) -> Iterator[Claim]:
    for name, figures in found.items():
        kinds = figures["named"].split(", ")
        if name in PLANTS:
            yield Claim(f"{name}: the verdict names it ({figures['named']})", name in kinds)
        else:
            healthy = kinds == ["nothing"] and not figures["alarms"]
            yield Claim(f"{name}: no problem and no alarm ({figures['named']})", healthy)


BENCHMARK = Benchmark(
    [
        Section(
            "verdicts",
            "Small runs with a planted problem, and what the verdict of their report names",
            [
                *(Row(problem, measure, {"problem": problem}) for problem in PLANTS),
                *(Row(f"healthy, seed {n}", measure, {"problem": "", "seed": n}) for n in SEEDS),
            ],
            [_claims],
            environment={},
        )
    ]
)
