"""`python -m launch.bench balance`: sizes that a run chooses beside fixed ones and Tunix's recipe.

Engine, learner, choice of sizes and planner are the real ones, on this machine's CPU in one process
without Ray: a step samples rollouts and updates on them. Lengths are given, so all variants train
on the same tokens. They alternate step by step, so that other load of the machine affects all of
them equally.

The recipe is the one that Tunix 0.1.7 ships for GRPO of gemma3-1b on a v5e-8, with its own
programs: one prompt and two samples a step; its sampler decodes two rows to the end of the longer
one, its GRPO loss and gradient run on both at full length, Adam updates its LoRA. Its reference
policy, its data pipeline and the sync of the LoRA are left out, in its favour.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from configs.schema import Config
from launch.bench.counting import compilations
from launch.bench.harness import Benchmark, Bound, Row, Section
from launch.bench.small_gemma import (
    GROUP,
    NEW,
    PROMPT,
    SMALL,
    VOCABULARY,
    make_lengths,
    make_requests,
    small_config,
    small_policy,
)
from launch.bench.tunix import Peer, padded_in_front, train_example
from pipeline import protocols
from pipeline.compute.builds import Building, BuildLog, Ready
from pipeline.compute.decode.engine import Engine
from pipeline.compute.learner.learner import Learner
from pipeline.plan.choose_sizes import choose_sizes
from pipeline.plan.sizes import Sizes, sized
from pipeline.protocols import SamplerTimes
from pipeline.run.cache_folder import CACHE_VARIABLE
from pipeline.run.console import Console
from pipeline.types import NO_TEXT, Rollout, RolloutRequest

FIXED = (2, 8, 32, 64)
"""Fixed numbers of slots."""
SAMPLES = 2
"""Rollouts of a step of the recipe, all of one prompt."""
_RECIPE_STEPS = 32
"""Steps of the recipe in each run, few because it is slow and its steps are alike."""

Step = Callable[[], int]
"""Samples and updates; returns the number of trained tokens."""


def tokens_a_second(*, prompts_per_step: int, steps: int, repeats: int) -> dict[str, Any]:
    """Returns trained tokens a second with the chosen sizes, with fixed slots, and of the recipe.

    Fixed slots use the chosen micro-batches, so that only the slots differ. If one of the fixed
    numbers is chosen, both are measured once.

    Args:
        prompts_per_step: each with `GROUP` rollouts.
        steps: of a run.
        repeats: runs of each variant after a first one; the median counts.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = _config(Path(folder), prompts_per_step)
        process = Process(config)
        began = time.monotonic()
        sizes = asyncio.run(chosen(process))
        start_s = time.monotonic() - began
        engines = {str(slots): process.engine_of(slots) for slots in FIXED}
        # Measuring the same programs twice would only show the noise of the machine.
        found = str(sizes.slots) if sizes.slots in FIXED else "found"
        engines[found] = process.engine
        per_step = prompts_per_step * GROUP
        requests = make_requests(make_lengths(per_step * steps).tolist())
        by_step = [
            requests[first : first + per_step] for first in range(0, len(requests), per_step)
        ]
        runs: dict[str, list[Step]] = {
            name: [partial(process.step, engine, some) for some in by_step]
            for name, engine in engines.items()
        }
        runs["recipe"] = recipe_steps(process, requests[: SAMPLES * _RECIPE_STEPS], count=steps)
        speed, compiled = alternate(runs, repeats=repeats)
    best = max(speed[str(slots)] for slots in FIXED)
    return {
        "slots": sizes.slots,
        "rows": sizes.micro_batch_tokens // config.row_tokens,
        "start_s": start_s,
        "tokens_found": speed[found],
        **{f"tokens_{name}": speed[name] for name in (*map(str, FIXED), "recipe")},
        "of_best": speed[found] / best,
        "of_recipe": speed[found] / speed["recipe"],
        "compiled": compiled,
    }


def _config(folder: Path, prompts_per_step: int) -> Config:
    """Returns a configuration with open sizes; the model folder holds only a config.json.

    Sets empty caches in the folder: programs are compiled once.
    """
    os.environ[CACHE_VARIABLE] = str(folder / "cache")
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    return small_config(
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
        # The peer's backward pass does not rematerialize, either.
        plan__remat="none",
        plan__slots="none",
        plan__micro_batch_tokens="none",
    )


class Process:
    """Sampler and learner of one policy, as `choose_sizes` uses them.

    Args:
        config: with open sizes.

    Attributes:
        policy: the model; `base` and `adapter` are random weights.
        engine: with the slots of the last `prepare`.
        learner: with the micro-batches of the last `prepare`.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.policy, self.base, self.adapter = small_policy(config)
        self.log = BuildLog()
        self.engine: Engine
        self.learner: Learner
        self._sizes: Sizes | None = None

    async def prepare(self, sizes: Sizes) -> Ready:
        """See `pipeline.protocols.Worker`."""
        config, before = sized(self.config, sizes), self._sizes
        known = len(self.log.read().done)
        if before is None:
            self.engine = self.engine_of(sizes.slots)
            self.learner = Learner(self.policy, self.base, config, VOCABULARY, log=self.log)
        elif before.slots != sizes.slots:
            self.engine.resize(config, log=self.log)
        if before is not None and before.micro_batch_tokens != sizes.micro_batch_tokens:
            self.learner.resize(config, log=self.log)
        self._sizes = sizes
        return Ready(0.0, self.log.read().done[known:])

    async def building(self) -> Building:
        """See `pipeline.protocols.Worker`."""
        return self.log.read()

    async def sampler_times(self) -> SamplerTimes:
        """See `pipeline.protocols.Sampler`."""
        return self.engine.times(self.base, self.learner.state.adapter)

    async def micro_batch_s(self) -> float:
        """See `pipeline.protocols.Learner`."""
        return self.learner.micro_batch_s()

    def engine_of(self, slots: int) -> Engine:
        """Returns another engine on the same base."""
        config = sized(self.config, Sizes(slots, self.config.row_tokens))
        return Engine(self.policy, self.base, config, VOCABULARY, log=self.log)

    def step(self, engine: Engine, requests: Sequence[RolloutRequest]) -> int:
        """Samples these rollouts and updates on them; returns the number of trained tokens.

        Half of each group has advantage 1, the other half -1.
        """
        state = self.learner.state
        completions = engine.generate(
            requests,
            adapter=state.adapter,
            version=state.version,
            adapter_sha256="",
            temperature=1.0,
        )
        rollouts = [
            Rollout(completion, NO_TEXT, {}, 0.0, 1.0 if completion.name.sample % 2 else -1.0)
            for completion in completions
        ]
        return int(self.learner.update(rollouts)["tokens_trained"])


async def chosen(process: Process) -> Sizes:
    """Chooses sizes as at the start of a run, and prepares the process for them."""
    found = await choose_sizes(
        process.config,
        None,
        learner=cast("protocols.Learner", process),
        samplers=[cast("protocols.Sampler", process)],
        one_process=True,
        display=Console(write=lambda _: None),
    )
    return found.sizes


def recipe_steps(process: Process, requests: Sequence[RolloutRequest], *, count: int) -> list[Step]:
    """Returns `count` parts of the recipe on the same weights, each of some of its steps."""
    config = process.config
    peer = Peer.create(process.policy.architecture.config, config.lora)
    lora, base = peer.with_values({**process.base, **process.adapter})
    sampler = peer.sampler((lora, base), VOCABULARY, prompt=PROMPT, new=NEW)
    adam = optax.adam(config.learner.lr)
    trained = {"lora": lora, "adam": adam.init(lora)}

    @jax.jit
    def update(trained: Any, base: Any, example: Any) -> Any:
        _, gradient = peer.gradient(trained["lora"], base, example)
        updates, state = adam.update(gradient, trained["adam"], trained["lora"])
        return {"lora": optax.apply_updates(trained["lora"], updates), "adam": state}

    def run(pairs: Sequence[Sequence[RolloutRequest]]) -> int:
        tokens = 0
        for number, pair in enumerate(pairs):
            lengths = np.array([request.max_new_tokens or NEW for request in pair])
            prompts = [request.prompt_tokens for request in pair]
            longest = int(lengths.max())
            sampled, _ = sampler.sample(
                prompts, new=longest, temperature=1.0, seed=SAMPLES * number
            )
            completions = np.full((SAMPLES, NEW), VOCABULARY.pad, np.int32)
            completions[:, :longest] = sampled
            completions[np.arange(NEW) >= lengths[:, None]] = VOCABULARY.pad
            example = train_example(
                jnp.asarray(padded_in_front(prompts, PROMPT)),
                jnp.asarray(completions),
                jnp.asarray([1.0, -1.0], jnp.float32),
            )
            trained.update(jax.block_until_ready(update(trained, base, example)))
            tokens += int(lengths.sum())
        return tokens

    pairs = [requests[first : first + SAMPLES] for first in range(0, len(requests), SAMPLES)]
    bounds = [len(pairs) * number // count for number in range(count + 1)]
    return [partial(run, pairs[first:last]) for first, last in pairwise(bounds)]


def alternate(runs: Mapping[str, Sequence[Step]], *, repeats: int) -> tuple[dict[str, float], int]:
    """Returns the median tokens a second of each variant, and compilations, after a first run.

    All variants do their first step, then their second, every other time in reverse order, so that
    a slow phase of the machine affects all of them.
    """
    found: dict[str, list[float]] = {name: [] for name in runs}

    def run(number: int) -> None:
        tokens, seconds = dict.fromkeys(runs, 0), dict.fromkeys(runs, 0.0)
        for turn, steps in enumerate(zip(*runs.values(), strict=True)):
            order = list(zip(runs, steps, strict=True))
            for name, step in order if (number + turn) % 2 else order[::-1]:
                began = time.perf_counter()
                tokens[name] += step()
                seconds[name] += time.perf_counter() - began
        for name in runs:
            found[name].append(tokens[name] / seconds[name])

    run(0)
    with compilations() as compiled:
        for number in range(1, 1 + repeats):
            run(number)
    speed = {name: statistics.median(values[1:]) for name, values in found.items()}
    return speed, len(compiled)


BENCHMARK = Benchmark(
    (
        Section(
            "trained",
            "Trained tokens a second of sampling and updates: 7 layers of width 128, prompts of at "
            "most 64 tokens and completions of at most 256, lengths lognormal, 8 rollouts a "
            "prompt; fixed slots use the chosen micro-batches, and are measured once if they "
            "equal the chosen slots; medians of 5 runs, alternating step by step",
            (
                Row(
                    "64 rollouts a step",
                    tokens_a_second,
                    {"prompts_per_step": 8, "steps": 6, "repeats": 5},
                ),
                Row(
                    "16 rollouts a step",
                    tokens_a_second,
                    {"prompts_per_step": 2, "steps": 24, "repeats": 5},
                ),
            ),
            (
                Bound("of_best", least=0.95),
                Bound("of_recipe", least=3.0),
                Bound("compiled", most=0),
            ),
        ),
    )
)
