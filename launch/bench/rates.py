"""Learning rates of a real model: short GRPO runs on sums, without Ray, on one device.

    python -m launch.bench.rates MODEL_DIR --lr 2e-5 5e-5 1e-4 [--seeds 0 1 2] [--steps 8]

Each run asks a base model for sums, two shots, 16 prompts x 16 rollouts a step, and is measured on
sums that training does not contain. Prints a table; `--json` writes all steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import jax
import numpy as np

from configs.schema import Config
from launch.bench.harness import machine
from pipeline.compute.decode.engine import Engine
from pipeline.compute.learner.learner import Learner
from pipeline.compute.model.policy import Params
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.compute.opening import open_policy
from pipeline.contracts.rollouts import Completion, Prompt, Rollout, RolloutName, RolloutRequest
from pipeline.inputs.text.tokenizer_files import read_tokenizer
from pipeline.rollout.advantages import group_advantages
from rewards.base import Tags

PROMPTS, GROUP, VALIDATION, SAMPLES = 16, 16, 40, 8
TEMPLATE = "3 + 5 = 8\n12 + 7 = 19\n{a} + {b} ="


def sums_config(
    model: Path, *, dtype: str, rank: int, alpha: float, warmup: int, slots: int
) -> Config:
    """Settings of the runs: the task's lengths, and defaults."""
    tables: dict[str, Any] = {
        "run": {"name": "rates"},
        "model": {"path": str(model), "dtype": dtype},
        "lora": {"rank": rank, "alpha": alpha},
        "data": {"train": {"path": "train.jsonl"}, "test": {"path": "test.jsonl"}},
        "rewards": {"functions": [{"name": "r", "function": "rewards.correctness:exact_answer"}]},
        "rollout": {
            "group_size": GROUP,
            "prompts_per_step": PROMPTS,
            "max_prompt_tokens": 40,
            "max_new_tokens": 6,
            "stop_tokens": ["<eos>", "\n"],
        },
        "learner": {"lr": 1e-5, "warmup_steps": warmup, "token_weights": "token"},
        "plan": {
            "platform": "cpu",
            "placement": "colocated",
            "slots": slots,
            "slot_buckets": (),
            "segment_steps": 6,
            "row_tokens": 512,
            "micro_batch_tokens": 4096,
        },
        "budget": {"steps": 1000},
    }
    return Config.model_validate(tables)


class Sums:
    """The model, its programs and the task.

    Args:
        config: of `sums_config`.
    """

    def __init__(self, config: Config) -> None:
        folder = Path(config.model.path)
        self._tokenizer = read_tokenizer(folder)
        vocabulary = Vocabulary.of(self._tokenizer, config.rollout)
        mesh = make_mesh(jax.devices()[:1])
        self._policy, base = open_policy(
            folder, dtype=config.model.dtype, lora=config.lora, mesh=mesh
        )
        self._engine = Engine(self._policy, base, config, vocabulary)
        self._learner = Learner(self._policy, base, config, vocabulary)
        pairs = [(a, b) for a in range(30) for b in range(10)]
        Random(0).shuffle(pairs)
        prompts = [self._prompt(number, a, b) for number, (a, b) in enumerate(pairs)]
        self._validation, self._train = prompts[:VALIDATION], prompts[VALIDATION:]

    def _prompt(self, number: int, a: int, b: int) -> Prompt:
        text = TEMPLATE.format(a=a, b=b)
        tokens = np.concatenate([[self._tokenizer.bos_id], self._tokenizer.encode(text)])
        return Prompt(number, text, tokens.astype(np.int32), str(a + b), {})

    def run(self, *, lr: float, seed: int, steps: int) -> dict[str, Any]:
        """Trains a fresh adapter; returns the accuracy before and after, and each step's metrics.

        Args:
            lr: peak learning rate.
            seed: of adapter, prompts and noise.
            steps: number of updates.
        """
        learner, order = self._learner, Random(seed)
        learner.state = learner._begin_phase(self._policy.fresh_adapter(seed), version=0)  # noqa: SLF001
        found: list[dict[str, float]] = []
        before = self._validate(learner.state.adapter, seed=seed)
        queue: list[Prompt] = []
        for step in range(steps):
            if len(queue) < PROMPTS:
                queue = order.sample(self._train, len(self._train))
            prompts, queue = queue[:PROMPTS], queue[PROMPTS:]
            began = time.monotonic()
            rollouts, shares = self._rollouts(prompts, learner.state.adapter, seed=seed, step=step)
            metrics = learner.update(rollouts, lr=lr)
            kept = ("grad_norm", "adapter_norm", "lr", "entropy", "parity_mean", "parity_p999")
            shares |= {name: metrics[name] for name in kept if name in metrics}
            found.append(shares | {"seconds": time.monotonic() - began})
        after = self._validate(learner.state.adapter, seed=seed)
        return {"lr": lr, "seed": seed, "before": before, "after": after, "steps": found}

    def _sample(
        self, prompts: Sequence[Prompt], adapter: Params, *, names: tuple[str, int], samples: int
    ) -> list[Completion]:
        phase, step = names
        requests = [
            RolloutRequest(RolloutName(phase, step, prompt.id, sample), prompt.tokens)
            for prompt in prompts
            for sample in range(samples)
        ]
        return self._engine.generate(
            requests, adapter=adapter, version=0, adapter_sha256="", temperature=1.0
        )

    def _validate(self, adapter: Params, *, seed: int) -> float:
        """Share of right answers to unseen sums, sampled at temperature 1."""
        drawn = self._sample(self._validation, adapter, names=("validation", seed), samples=SAMPLES)
        answers = {prompt.id: prompt.answer for prompt in self._validation}
        return float(np.mean([self._text(one) == answers[one.name.prompt_id] for one in drawn]))

    def _text(self, completion: Completion) -> str:
        """The answer: the first line."""
        return self._tokenizer.decode(completion.tokens).partition("\n")[0].strip()

    def _rollouts(
        self, prompts: Sequence[Prompt], adapter: Params, *, seed: int, step: int
    ) -> tuple[list[Rollout], dict[str, float]]:
        names = ("train", 10_000 * seed + step)
        drawn = self._sample(prompts, adapter, names=names, samples=GROUP)
        texts = [self._text(one) for one in drawn]
        answers = [prompt.answer for prompt in prompts for _ in range(GROUP)]
        rewards = [float(text == answer) for text, answer in zip(texts, answers, strict=True)]
        groups = [rewards[at : at + GROUP] for at in range(0, len(rewards), GROUP)]
        advantages, stats = group_advantages(groups, kind="grpo")
        tags = Tags("<reasoning>", "</reasoning>", "<answer>", "</answer>")
        rollouts: list[Rollout] = []
        for one, reward, advantage in zip(drawn, rewards, np.concatenate(advantages), strict=True):
            prompt = prompts[len(rollouts) // GROUP]
            given = prompt.reward_input("", stop_reason=one.stop_reason, tags=tags)
            version = dataclasses.replace(one, version=self._learner.state.version)
            rollouts.append(Rollout(version, given, {}, reward, float(advantage)))
        well_formed = [text.isdigit() for text in texts]
        return rollouts, {
            "accuracy": float(np.mean(rewards)),
            "well_formed": float(np.mean(well_formed)),
            "mixed": stats.mixed / PROMPTS,
        }


def table(runs: Sequence[dict[str, Any]]) -> str:
    """The runs as a Markdown table, a row for each rate with the accuracies of its seeds."""
    lines = ["| lr | unseen sums, before -> after, by seed | sampled accuracy, mean of the seeds |"]
    lines.append("|---|---|---|")
    for lr in dict.fromkeys(run["lr"] for run in runs):
        own = [run for run in runs if run["lr"] == lr]
        pairs = ", ".join(f"{run['before']:.3f} -> {run['after']:.3f}" for run in own)
        curve = np.mean([[step["accuracy"] for step in run["steps"]] for run in own], axis=0)
        lines.append(f"| {lr:g} | {pairs} | {', '.join(f'{share:.2f}' for share in curve)} |")
    return "\n".join(lines)


def main() -> None:
    """Parses the command line, trains and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="Hugging Face folder of a base model")
    parser.add_argument("--lr", type=float, nargs="+", required=True, help="peak learning rates")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--steps", type=int, default=8, help="updates of a run; default: 8")
    parser.add_argument("--warmup", type=int, default=0, help="steps of warm-up; default: 0")
    parser.add_argument("--rank", type=int, default=16, help="default: 16")
    parser.add_argument("--alpha", type=float, default=32.0, help="default: 32")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--slots", type=int, default=64, help="rollouts at a time; default: 64")
    parser.add_argument("--json", type=Path, help="file for all steps of all runs")
    given = parser.parse_args()
    config = sums_config(
        given.model,
        dtype=given.dtype,
        rank=given.rank,
        alpha=given.alpha,
        warmup=given.warmup,
        slots=given.slots,
    )
    sums, runs = Sums(config), []
    for lr in given.lr:
        for seed in given.seeds:
            runs.append(sums.run(lr=lr, seed=seed, steps=given.steps))
            print(f"lr {lr:g}, seed {seed}: {runs[-1]['after']:.3f}", file=sys.stderr, flush=True)
            if given.json is not None:
                about = machine() | {"device": jax.devices()[0].device_kind}
                settings = {key: str(value) for key, value in vars(given).items()}
                result = {"machine": about, "settings": settings, "runs": runs}
                given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(runs))


if __name__ == "__main__":
    main()
