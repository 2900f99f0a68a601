"""`python -m launch.bench rates`: GRPO runs of a configuration, to compare learning rates.

A run trains a fresh adapter in one process without Ray, on the device that JAX finds. A rollout's
reward is 1 for a right answer, whatever `rewards.functions` says; schedule and lengths are the
configuration's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs.evaluation import EXACT_ANSWER
from configs.load import load_config
from configs.schema import Config
from launch.bench.harness import Benchmark, Figures, Row, Section
from pipeline.compute.decode.engine import Engine
from pipeline.compute.learner.learner import Learner
from pipeline.compute.learner.optimizer import grpo_rate
from pipeline.compute.model.policy import Params
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.compute.opening import open_policy
from pipeline.compute.program_cache import use_program_cache
from pipeline.data.load import load_data
from pipeline.data.order import prompts_for_step
from pipeline.data.text.prompts import PromptMaker
from pipeline.data.text.tokenizer_files import read_tokenizer
from pipeline.evaluate.evaluation import Evaluation, judge, requests
from pipeline.plan.search.fitting import first_sizes, with_chosen_placement
from pipeline.plan.sizes import sized
from pipeline.rollout.advantages import group_advantages
from pipeline.types import (
    NO_TEXT,
    Completion,
    Prompt,
    Rollout,
    RolloutName,
    RolloutRequest,
)

STEP_S = 5.0
"""Seconds of a step, as the demo's on two cores."""
SAMPLES = 8
"""Samples of a prompt where a validation is sampled at temperature 1."""


class Runs:
    """The model, its programs and the data of a configuration, on one device.

    Args:
        config: of the runs.

    Attributes:
        data: its prompts.
        policy: its model.
    """

    def __init__(self, config: Config) -> None:
        use_program_cache()
        config = with_chosen_placement(config, None)
        config = sized(config, first_sizes(config, None))
        folder = Path(config.model.path)
        tokenizer = read_tokenizer(folder)
        self.config, self.data = config, load_data(config, tokenizer)
        self.policy, self._base = open_policy(
            folder,
            dtype=config.model.dtype,
            lora=config.lora,
            mesh=make_mesh(jax.devices()[:1]),
            quantization=config.model.quantization,
        )
        self._maker = PromptMaker(config.prompt, tokenizer)
        self._vocabulary = Vocabulary.of(tokenizer, config.rollout)
        self._engine = Engine(
            self.policy, self._base, config, self._vocabulary, text_of=tokenizer.decode
        )

    @cached_property
    def _learner(self) -> Learner:
        """Compiled at the first use: what only samples does not wait for it."""
        return Learner(self.policy, self._base, self.config, self._vocabulary)

    def run(self, *, lr: float, seed: int, steps: int) -> dict[str, Any]:
        """Trains a fresh adapter; returns the accuracies before and after, and each step's metrics.

        Args:
            lr: peak learning rate.
            seed: of adapter, prompts and noise.
            steps: number of updates.
        """
        learner = self._learner
        learner.state = learner._begin_phase(self.policy.fresh_adapter(seed), version=0)  # noqa: SLF001
        peak = self.config.learner.model_copy(update={"lr": lr})
        schedule = grpo_rate(self.config.model_copy(update={"learner": peak}))
        found: list[dict[str, float]] = []
        before = self._validate(learner.state.adapter)
        for step in range(steps):
            prompts = prompts_for_step(
                self.data.train.prompts,
                seed=seed,
                step=step,
                prompts_per_step=self.config.rollout.prompts_per_step,
            )
            began = time.monotonic()
            rollouts, shares = self._rollouts(prompts, seed=seed, step=step)
            metrics = learner.update(rollouts, rate=float(schedule(step)))
            kept = ("grad_norm", "adapter_norm", "entropy", "mismatch_mean", "mismatch_p999")
            shares |= {name: metrics[name] for name in kept if name in metrics}
            found.append(shares | {"seconds": time.monotonic() - began})
        after = self._validate(learner.state.adapter)
        return {"lr": lr, "seed": seed, "before": before, "after": after, "steps": found}

    def _validate(self, adapter: Params) -> dict[str, float]:
        """Shares on the validation split: right answers, greedy and sampled, and well-formed."""
        assert self.data.validation is not None
        prompts = self.data.validation.prompts
        greedy = self.measure(prompts, adapter, samples=1)
        sampled = self.measure(prompts, adapter, samples=SAMPLES)
        return {
            "greedy": float(greedy.correct.mean()),
            "sampled": float(sampled.correct.mean()),
            "well_formed": float(sampled.well_formed.mean()),
        }

    def measure(self, prompts: Sequence[Prompt], adapter: Params, *, samples: int) -> Evaluation:
        """The judged answers to prompts.

        Args:
            prompts: of one split.
            adapter: of the policy.
            samples: of each prompt; one is greedy, several are sampled at temperature 1.
        """
        temperature = 0.0 if samples == 1 else 1.0
        asked = requests(prompts, phase="validation", samples=samples)
        drawn = self._generate(asked, adapter, temperature=temperature)
        return self._judge(prompts, drawn)

    def _judge(self, prompts: Sequence[Prompt], drawn: Sequence[Completion]) -> Evaluation:
        exact = self.config.with_metric(EXACT_ANSWER)
        return judge(prompts, drawn, config=exact, maker=self._maker)

    def _generate(
        self,
        asked: Sequence[RolloutRequest],
        adapter: Params,
        *,
        temperature: float,
        version: int = 0,
    ) -> list[Completion]:
        return self._engine.generate(
            asked, adapter=adapter, version=version, adapter_sha256="", temperature=temperature
        )

    def _rollouts(
        self, prompts: Sequence[Prompt], *, seed: int, step: int
    ) -> tuple[list[Rollout], dict[str, float]]:
        """The rollouts of a step by the learner's policy, and their shares."""
        number, state = 10_000 * seed + step, self._learner.state
        asked = [
            RolloutRequest(RolloutName("train", number, prompt.id, sample), prompt.tokens)
            for prompt in prompts
            for sample in range(self.config.rollout.group_size)
        ]
        drawn = self._generate(
            asked,
            state.adapter,
            temperature=self.config.rollout.temperature,
            version=state.version,
        )
        judged = self._judge(prompts, drawn)
        right = judged.correct.astype(float)
        kind = self.config.learner.variant.advantage
        advantages = [group_advantages(group, kind=kind) for group in right.tolist()]
        scored = zip(drawn, right.ravel(), np.concatenate(advantages), strict=True)
        rollouts = [
            Rollout(completion, NO_TEXT, {}, float(reward), float(advantage))
            for completion, reward, advantage in scored
        ]
        return rollouts, {
            "accuracy": float(right.mean()),
            "well_formed": float(judged.well_formed.mean()),
            "mixed": float(np.mean([group.any() for group in advantages])),
        }


def trained(
    *, config: str, model: str | None, lr: float, seeds: Sequence[int], steps: int
) -> Figures:
    """Runs with one learning rate.

    Returns:
        `greedy`, `sampled`: accuracy on the validation split before and after, by seed; `rollouts`:
        that of the rollouts of each step, mean of the seeds; `runs`: all figures of `Runs.run`.
    """
    opened = Runs(_load(config, model))
    runs = [opened.run(lr=lr, seed=seed, steps=steps) for seed in seeds]
    curve = np.mean([[step["accuracy"] for step in run["steps"]] for run in runs], axis=0)
    accuracies = {
        how: ", ".join(f"{run['before'][how]:.3f} -> {run['after'][how]:.3f}" for run in runs)
        for how in ("greedy", "sampled")
    }
    return {**accuracies, "rollouts": ", ".join(f"{share:.2f}" for share in curve), "runs": runs}


def _load(config: str, model: str | None) -> Config:
    return load_config(config, [("model.path", model)] if model else [])


def benchmark(request: argparse.Namespace) -> Benchmark:
    """A row for each learning rate.

    Raises:
        ValueError: for a mistake in the configuration, or if it says too little.
        FileNotFoundError: if there is no such configuration.
    """
    config = _load(request.config, request.model)
    steps = request.steps or config.budget.steps
    if steps is None:
        raise ValueError("--steps: give the number of updates; budget.steps is not set")
    if config.data.validation is None:
        raise ValueError("data.validation is missing: rates are compared on it")
    if config.plan.platform != "cpu" and config.plan.learner_devices > 1:
        raise ValueError(
            "rates are compared on one device: give a configuration with plan.learner_devices = 1"
        )
    given = {"config": request.config, "model": request.model}
    runs = {"seeds": request.seeds, "steps": steps}
    # A validation before and after a run takes about as long as four steps.
    expected_s = STEP_S * (steps + 8) * len(request.seeds)
    return Benchmark(
        (
            Section(
                "rates",
                f"Accuracy on the validation split, greedy and of {SAMPLES} samples at temperature "
                "1, before -> after by seed; that of the rollouts of each step, mean of the seeds",
                [
                    Row(f"lr {lr:g}", trained, {**given, **runs, "lr": lr}, seconds=expected_s)
                    for lr in request.lr
                ],
            ),
        )
    )
