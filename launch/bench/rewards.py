"""What slow rewards cost, and how many cheap ones a process computes.

Runs with rewards of half a second are measured beside runs with instant ones. Both sample the same
rollouts and give them the same scores, so that they differ in the time of the rewards only. The
model is the demo's with random weights: its rollouts end at random, spread over the step.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import configs
from configs.schema import Prompt, RewardFunction, Rewards
from launch.bench.harness import Benchmark, Bound, Figures, Row, Section
from pipeline.data.models.hf_config import read_model_shape
from pipeline.data.models.hf_folder import read_config
from pipeline.data.models.random_folder import write_random_weights
from rewards.base import RewardInput, Tags
from rewards.processes.host import RewardHost
from rewards.processes.log import RewardLog

SECONDS, CONCURRENCY = 0.5, 16
"""Seconds of a reward, and completions that are scored at a time."""
ROLLOUTS, STEPS = 64, 7
_REWARDS = f"""
import asyncio

async def slow(completion):
    await asyncio.sleep({SECONDS})
    return float(len(completion) % 7)

async def instant(completion):
    return float(len(completion) % 7)
"""
_CASE = {
    "rollout.prompts_per_step": ROLLOUTS // 8,
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 640,
    "plan.slots": 4,
    "plan.prefill_tokens": 104,
    "plan.row_tokens": 1384,
    "plan.micro_batch_tokens": 5536,
    "learner.lr": 1e-9,
    "budget.steps": STEPS,
    "checkpoint.every_steps": 100,
    "eval.every_steps": STEPS,
    "data.validation.limit": 1,
    "data.test.limit": 1,
    "wandb.mode": "disabled",
    "run.name": "run",
}


def measure(*, ahead: str) -> Figures:
    """Runs with instant and slow rewards, and compares seconds of a step and of the run.

    Args:
        ahead: `rollout.ahead`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _write_model(folder / "model")
        (folder / "bench_rewards.py").write_text(_REWARDS)
        runs = {name: _run(folder, name, ahead=ahead) for name in ("instant", "slow")}
    # The first step of a run finds nothing sampled ahead. With it only the whole step is measured.
    parts = ("sample", "reward", "step") if ahead == "off" else ("step",)
    found = {
        f"{name}_{part}_s": statistics.median(step[f"time/{part}_s"] for step in steps[1:])
        for name, steps in runs.items()
        for part in parts
    }
    if ahead == "off":
        found["more_s"] = found["slow_reward_s"] - found["instant_reward_s"]
    run_s = {
        name: steps[-1]["time/elapsed_s"] - steps[0]["time/elapsed_s"]
        for name, steps in runs.items()
    }
    first, second = ([step["rollout/tokens_mean"] for step in steps] for steps in runs.values())
    return {
        **found,
        "run_ratio": run_s["slow"] / run_s["instant"],
        "rewards_alone_s": ROLLOUTS * SECONDS / CONCURRENCY,
        "equal": first == second,
    }


def speed(*, inputs: int) -> Figures:
    """Scores a second of a cheap function in one process, the host's work included."""
    part = RewardFunction(name="correct", function="rewards.correctness:exact_answer")
    tags = Tags.of(Prompt())
    text = "<reasoning>10+23=33</reasoning><answer>33</answer>"
    given = [
        RewardInput("ask?", text, "eos", str(30 + number % 5), {"id": number}, tags)
        for number in range(inputs)
    ]

    async def scored() -> tuple[float, float]:
        host = RewardHost(Rewards(functions=(part,)), log=RewardLog(None))
        await host.start()
        try:
            began = time.perf_counter()
            found = await host.score(given)
            seconds = time.perf_counter() - began
        finally:
            await host.close()
        return seconds, sum(row["correct"].value or 0.0 for row in found) / inputs

    seconds, right = asyncio.run(scored())
    return {"scores_a_second": inputs / seconds, "right": right}


def _write_model(folder: Path) -> None:
    demo = Path(configs.__file__).parents[1] / "launch" / "demo" / "tiny_gemma3"
    shutil.copytree(demo, folder)
    for weights in folder.glob("*.safetensors*"):
        weights.unlink()
    write_random_weights(folder, read_model_shape(read_config(folder)), dtype="bfloat16", seed=0)


def _run(folder: Path, reward: str, *, ahead: str) -> list[dict[str, float]]:
    """The metrics of a run's steps."""
    case = _CASE | {
        "model.path": folder / "model",
        "run.dir": folder / reward,
        "rollout.ahead": ahead,
    }
    if ahead != "off":
        case["learner.importance_cap"] = 2.0
    functions = (
        f"[{{name = 'length', function = '{folder}/bench_rewards.py:{reward}', "
        f"concurrency = {CONCURRENCY}}}]"
    )
    case["rewards.functions"] = functions
    arguments = [part for key, value in case.items() for part in (f"--{key}", str(value))]
    demo = Path(configs.__file__).parent / "demo.toml"
    done = subprocess.run(
        [sys.executable, "-m", "launch.train", str(demo), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    lines = (folder / reward / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


BENCHMARK = Benchmark(
    [
        Section(
            "rewards",
            f"Seconds of a step of {ROLLOUTS} rollouts that end spread out, with rewards of "
            f"{SECONDS} s, {CONCURRENCY} at a time, and with instant ones; medians of "
            f"{STEPS - 1} steps; reward_s is what is left of it after sampling, "
            "run_ratio is of the whole runs after their first step",
            [Row(f"ahead {ahead}", measure, {"ahead": ahead}) for ahead in ("off", "one")],
            [
                Bound("more_s", most=0.6, rows="ahead off"),
                Bound("run_ratio", most=1.05, rows="ahead one"),
                Bound("equal", least=1),
            ],
            environment={},
        ),
        Section(
            "speed",
            "Scores a second of exact_answer in one reward process",
            [Row("cheap", speed, {"inputs": 50_000})],
            [Bound("scores_a_second", least=5_000), Bound("right", least=0.2, most=0.2)],
        ),
    ]
)
