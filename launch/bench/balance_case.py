"""Speed with calibrated sizes, with fixed sizes, and of the recipe that Tunix ships.

Engine, learner, calibration and planner are the real ones, in one process without Ray: a step
samples rollouts and updates on them. Lengths are given, so all variants train on the same tokens.
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
from launch.bench.balance_bench import FIXED
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
from pipeline.contracts.speeds import Speeds
from pipeline.plan.calibration import CalibrationStart, calibrate
from pipeline.plan.size_controller import SizeController, Worker

_RECIPE_STEPS = 32
"""Steps of the recipe in each run, few because it is slow and its steps are alike."""

Step = Callable[[], int]
"""Samples and updates; returns the number of trained tokens."""


class Process:
    """Sampler and learner of one policy, as sizes and calibration use them.

    Args:
        config: with open sizes.

    Attributes:
        policy: the model; `base` and `adapter` are random weights.
        engine: with the slots of the last `prepare`.
        learner: with the micro-batches of the last `prepare`.
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

    async def sampler_speed(self) -> Speeds:
        """See `pipeline.contracts.workers.MeasurableSampler`."""
        return self.engine.speed(self.base, self.learner.state.adapter)

    async def learner_speed(self) -> Speeds:
        """See `pipeline.contracts.workers.MeasurableLearner`."""
        return self.learner.speed()

    def make_engine(self, slots: int) -> Engine:
        """Returns another engine on the same base."""
        row = self.config.row_tokens
        config = sized(self.config, Sizes(slots, row))
        return Engine(self.policy, self.base, config, VOCABULARY, log=self.log)

    def step(self, engine: Engine, requests: Sequence[RolloutRequest]) -> int:
        """Samples these rollouts and updates on them; returns the number of trained tokens."""
        state = self.learner.state
        completions = engine.generate(
            requests,
            adapter=state.adapter,
            version=state.version,
            adapter_sha256="",
            temperature=1.0,
        )
        return int(self.learner.update([_scored(one) for one in completions])["tokens_trained"])


def tokens_a_second(*, prompts_per_step: int, steps: int, repeats: int) -> dict[str, Any]:
    """Returns trained tokens a second with calibrated sizes, with fixed slots, and of the recipe.

    Fixed slots use the calibrated micro-batches, so that only the slots differ. If calibration
    finds one of the fixed numbers, both are measured once.

    Args:
        prompts_per_step: each with `GROUP` rollouts.
        steps: of a run.
        repeats: runs of each variant, alternating step by step; the median counts.
    """
    with tempfile.TemporaryDirectory() as folder:
        _use_caches(Path(folder))
        config = _config(Path(folder), prompts_per_step)
        process = Process(config)
        sizes, facts = _calibrate(process)
        asyncio.run(process.prepare(sizes))
        engines = {str(slots): process.make_engine(slots) for slots in FIXED}
        # Measuring the same programs twice would only show the noise of the machine.
        calibrated = str(sizes.slots) if sizes.slots in FIXED else "found"
        engines[calibrated] = process.engine
        requests_by_step = _requests(prompts_per_step, steps)
        recipe = Recipe.make(process.policy, process.base, process.adapter, config)
        runs: dict[str, list[Step]] = {
            name: [partial(process.step, engine, requests) for requests in requests_by_step]
            for name, engine in engines.items()
        }
        all_rollouts = [request for requests in requests_by_step for request in requests]
        runs["recipe"] = [
            partial(recipe.run, some)
            for some in _parts(all_rollouts[: SAMPLES * _RECIPE_STEPS], of=SAMPLES, count=steps)
        ]
        speed = _alternate(runs, repeats=repeats)
    speed["found"], best = speed[calibrated], max(speed[str(slots)] for slots in FIXED)
    return {
        "rollouts": prompts_per_step * GROUP,
        "steps": steps,
        **facts,
        **{f"tokens_{name}": value for name, value in speed.items()},
        "of_best": speed["found"] / best,
        "of_recipe": speed["found"] / speed["recipe"],
    }


def _calibrate(process: Process) -> tuple[Sizes, dict[str, Any]]:
    """Calibrates as at the start of a run; returns the sizes, and figures of the calibration."""
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
    """Splits requests into `count` parts of similar length, in multiples of `of`."""
    whole = len(requests) // of
    bounds = [whole * number // count * of for number in range(count + 1)]
    return (requests[first:last] for first, last in pairwise(bounds))


def _alternate(runs: Mapping[str, Sequence[Step]], *, repeats: int) -> dict[str, float]:
    """Returns the median tokens a second of each variant, after a first run.

    All variants do their first step, then their second, every other time in reverse order, so that
    a slow phase of the machine affects all of them.
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
    """Returns the requests of each step, of lognormal lengths."""
    size = prompts_per_step * GROUP
    found = make_requests(make_lengths(size * steps).tolist())
    return [found[first : first + size] for first in range(0, len(found), size)]


def _scored(completion: Completion) -> Rollout:
    """Returns a rollout; half of each group has advantage 1, the other half -1."""
    advantage = 1.0 if completion.name.sample % 2 else -1.0
    return Rollout(completion, "", {}, 0.0, advantage)


def _config(folder: Path, prompts_per_step: int) -> Config:
    """Returns a configuration with open sizes; the model folder holds only a config.json."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODELS["small_policy"]), encoding="utf-8")
    return case_config(
        # Random weights hardly change, so the timed work stays the same.
        learner__lr=1e-9,
        run__dir=folder,
        model__path=model,
        rollout__prompts_per_step=prompts_per_step,
        plan__placement="colocated",
        plan__samplers="none",
        plan__sampler_devices="none",
        # One prefill holds the prompts of the largest number of slots.
        plan__prefill_tokens=max(FIXED) // GROUP * PROMPT,
        plan__row_tokens=PROMPT + NEW,
        # The peer's backward pass does not rematerialize, either.
        plan__remat="none",
        plan__fixed="false",
        plan__slots="none",
        plan__micro_batch_tokens="none",
    )


def _use_caches(folder: Path) -> None:
    """Sets empty caches: programs are compiled once, and no speeds of other runs are used."""
    os.environ[CACHE_VARIABLE] = str(folder / "cache")
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
