"""Sizes that calibration finds beside fixed ones and the recipe that Tunix ships, in turns.

Engine, learner, calibration and planner are the real ones, in one process without Ray: a step draws
a step's rollouts and learns from them. Lengths are given, so every way trains on the same tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax

from configs.schema import Config
from launch.bench.balance import FIXED
from launch.bench.balance_recipe import SAMPLES, Recipe
from launch.bench.models import MODELS
from launch.bench.rollout_case import (
    GROUP,
    NEW,
    PROMPT,
    VOCABULARY,
    case_config,
    make_lengths,
    make_policy,
    make_requests,
)
from pipeline.compute.decode.engine import Engine
from pipeline.compute.learner.learner import Learner
from pipeline.contracts.builds import Building, BuildLog, Ready
from pipeline.contracts.cache_folder import CACHE_VARIABLE
from pipeline.contracts.rollouts import Completion, Rollout, RolloutRequest
from pipeline.contracts.sizes import Sizes, sized
from pipeline.contracts.speeds import LearnerSpeed, SamplerSpeed
from pipeline.plan.calibration import CalibrationStart, calibrate
from pipeline.plan.size_controller import SizeController, Worker

_RECIPE_STEPS = 32
"""Steps of the recipe in each run: it is slow, and they are alike."""

Step = Callable[[], int]
"""Draws and learns; how many tokens were trained."""


class Process:
    """Sampler and learner of one policy, as `pipeline.plan` sees them.

    Args:
        config: sizes are open.

    Attributes:
        policy: the model; `base` and `adapter` are random weights.
        engine: with the slots that it was prepared for last.
        learner: likewise.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.policy, self.base, self.adapter = make_policy(config)
        self.log = BuildLog()
        self.engine: Engine
        self.learner: Learner
        self._sizes: Sizes | None = None

    async def prepare(self, sizes: Sizes) -> Ready:
        """See `pipeline.contracts.workers.Resizable`."""
        config, before = sized(self.config, sizes), self._sizes
        known = len(self.log.read().done)
        if before is None:
            self.engine = self.make_engine(sizes.slots)
            self.learner = Learner(self.policy, self.base, config, VOCABULARY, log=self.log)
        elif before.slots != sizes.slots:
            self.engine.resize(config, log=self.log)
        if before is not None and before.micro_batch_tokens != sizes.micro_batch_tokens:
            self.learner.resize(config, log=self.log)
        self._sizes = sizes
        return Ready(0.0, self.log.read().done[known:])

    async def building(self) -> Building:
        """See `pipeline.contracts.workers.Resizable`."""
        return self.log.read()

    async def drawing_speed(self) -> SamplerSpeed:
        """See `pipeline.contracts.workers.Draws`."""
        return self.engine.speed(self.base, self.learner.state.adapter)

    async def learning_speed(self) -> LearnerSpeed:
        """See `pipeline.contracts.workers.Learns`."""
        return self.learner.speed()

    def make_engine(self, slots: int) -> Engine:
        """Another engine on the same base."""
        row = self.config.row_tokens
        config = sized(self.config, Sizes(slots, row))
        return Engine(self.policy, self.base, config, VOCABULARY, log=self.log)

    def step(self, engine: Engine, requests: Sequence[RolloutRequest]) -> int:
        """Draws these rollouts and learns from them; how many tokens were trained."""
        state = self.learner.state
        drawn = engine.generate(
            requests,
            adapter=state.adapter,
            version=state.version,
            adapter_sha256="",
            temperature=1.0,
        )
        return int(self.learner.update([_scored(one) for one in drawn])["tokens_trained"])


def tokens_a_second(*, prompts_per_step: int, steps: int, repeats: int) -> dict[str, Any]:
    """Trained tokens a second with the sizes that are found, with fixed slots, by the recipe.

    Fixed slots learn in the micro-batches that were found: only the slots differ. Where as many are
    found as one of the fixed numbers, these are one row.

    Args:
        prompts_per_step: each with `GROUP` rollouts.
        steps: of a run.
        repeats: runs of each, step by step in turns, of which the median counts.
    """
    with tempfile.TemporaryDirectory() as folder:
        _keep_programs(Path(folder))
        config = _config(Path(folder), prompts_per_step)
        process = Process(config)
        sizes, facts = _calibrated(process)
        asyncio.run(process.prepare(sizes))
        engines = {str(slots): process.make_engine(slots) for slots in FIXED}
        # The same number twice would be the same programs: the difference is the machine's.
        found = str(sizes.slots) if sizes.slots in FIXED else "found"
        engines[found] = process.engine
        work = _requests(prompts_per_step, steps)
        recipe = Recipe.make(process.policy, process.base, process.adapter, config)
        runs: dict[str, list[Step]] = {
            name: [partial(process.step, engine, requests) for requests in work]
            for name, engine in engines.items()
        }
        all_rollouts = [request for requests in work for request in requests]
        runs["recipe"] = [
            partial(recipe.run, some)
            for some in _parts(all_rollouts[: SAMPLES * _RECIPE_STEPS], of=SAMPLES, count=steps)
        ]
        speed = _in_turns(runs, repeats=repeats)
    speed["found"], best = speed[found], max(speed[str(slots)] for slots in FIXED)
    return {
        "rollouts": prompts_per_step * GROUP,
        "steps": steps,
        **facts,
        **{f"tokens_{name}": value for name, value in speed.items()},
        "of_best": speed["found"] / best,
        "of_recipe": speed["found"] / speed["recipe"],
    }


def _calibrated(process: Process) -> tuple[Sizes, dict[str, Any]]:
    """Sizes as a run finds them at its start, and what that took."""
    config, lines = process.config, list[str]()
    beginning = CalibrationStart.of(config, None)
    controller = SizeController(config, beginning.sizes, lines.append)
    worker = Worker("process", process)

    async def start() -> None:
        await controller.start([worker])
        measured = (worker, process)
        await calibrate(controller, beginning, sampler=measured, learner=measured)

    began = time.monotonic()
    asyncio.run(start())
    sizes = controller.in_force
    return sizes, {
        "slots": sizes.slots,
        "rows": sizes.micro_batch_tokens // config.row_tokens,
        "start_s": time.monotonic() - began,
    }


def _parts(
    requests: Sequence[RolloutRequest], *, of: int, count: int
) -> Iterator[Sequence[RolloutRequest]]:
    """`count` parts of about one length, in multiples of `of`."""
    whole = len(requests) // of
    bounds = [whole * number // count * of for number in range(count + 1)]
    return (requests[first:last] for first, last in pairwise(bounds))


def _in_turns(runs: Mapping[str, Sequence[Step]], *, repeats: int) -> dict[str, float]:
    """The median of tokens a second of each, after a first run.

    Each does its first step, then each its second, every other time backwards, so that an hour or a
    second in which the machine is slow is one for all.
    """
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(1 + repeats):
        tokens, seconds = dict.fromkeys(runs, 0), dict.fromkeys(runs, 0.0)
        for turn, steps in enumerate(zip(*runs.values(), strict=True)):
            order = list(zip(runs, steps, strict=True))
            for name, step in order if (number + turn) % 2 else order[::-1]:
                began = time.perf_counter()
                tokens[name] += step()
                seconds[name] += time.perf_counter() - began
        if number:
            for name in runs:
                found[name].append(tokens[name] / seconds[name])
    return {name: statistics.median(values) for name, values in found.items()}


def _requests(prompts_per_step: int, steps: int) -> list[list[RolloutRequest]]:
    """The rollouts of each step, of lognormal lengths."""
    size = prompts_per_step * GROUP
    found = make_requests(make_lengths(size * steps).tolist())
    return [found[first : first + size] for first in range(0, len(found), size)]


def _scored(drawn: Completion) -> Rollout:
    """Half of each group was right."""
    advantage = 1.0 if drawn.name.sample % 2 else -1.0
    return Rollout(drawn, "", {}, 0.0, advantage)


def _config(folder: Path, prompts_per_step: int) -> Config:
    """Sizes are open; the model is a folder with the small policy's sizes only."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODELS["small_policy"]), encoding="utf-8")
    return case_config(
        # Random weights stay where they are: what is timed does not change.
        learner__lr=1e-9,
        run__dir=folder,
        model__path=model,
        rollout__prompts_per_step=prompts_per_step,
        plan__placement="colocated",
        plan__samplers="none",
        plan__sampler_devices="none",
        # The prompts of as many rollouts as a step has at most.
        plan__prefill_tokens=max(FIXED) // GROUP * PROMPT,
        plan__row_tokens=PROMPT + NEW,
        # The peer's backward pass computes nothing twice either.
        plan__remat="none",
        plan__fixed="false",
        plan__slots="none",
        plan__micro_batch_tokens="none",
    )


def _keep_programs(folder: Path) -> None:
    """Programs that were compiled while measuring are found again; speeds of others are not."""
    os.environ[CACHE_VARIABLE] = str(folder / "cache")
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
