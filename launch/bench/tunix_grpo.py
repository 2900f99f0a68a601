"""GRPO by Tunix 0.1.7 alone: its `GRPOLearner`, as its documentation sets it up, for a race.

Model, loader, LoRA, sampler, loss, optimizer and loop are Tunix's, qwix's and optax's, on one
device. Only the task is the configuration's: rows, prompts, tokenizer, reward functions, lengths,
groups, learning rate and its warm-up, rank and alpha. What its users have to know is done in its
favour:

* its sampler draws the same noise at each call, unless `RolloutConfig.seed` changes: it does; as a
  number, because the first micro-batch donates an array;
* without `top_p` it is greedy, whatever the temperature: it is set, to 1;
* it stops at the tokenizer's <eos> unless `eos_tokens` names the end of a turn: it does;
* its default loss has a KL term (`beta` 0.04) and a mean of means: the configuration's is used;
* its default is one prompt a micro-batch: it has as many as memory allows for their logits, which
  are whole arrays, also those of a prefill; the demo's have all prompts of a step;
* its sampler fails after an update of a micro-batch, which donates the sampler's arrays: all
  rollouts of a step are sampled before the first one;
* its loggers write to TensorBoard and W&B: they are off.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import optax
import psutil
from flax import nnx
from safetensors.numpy import save_file
from tunix.models.gemma3 import params_safetensors
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft.metrics_logger import MetricsLoggerOptions

from configs.load import load_config
from configs.schema import Config
from launch.bench.tunix import with_lora
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.data.load import load_data
from pipeline.data.models.hf_folder import read_text_config
from pipeline.data.order import prompts_for_step
from pipeline.data.text.tokenizer import Tokenizer
from pipeline.data.text.tokenizer_files import read_tokenizer
from pipeline.types import Prompt
from rewards.base import Outcome, RewardInput, Tags
from rewards.forms import recognise
from rewards.resolve import resolve
from rewards.weighting import combine

_MEANS = {"token": "token-mean", "sequence": "sequence-mean-token-mean"}
"""Its names of our averages of token losses; it has no other one of ours."""
LOGITS_SHARE = 1 / 8
"""Of the memory, for the logits of a micro-batch; loss and gradient hold several such arrays."""
WITHOUT_LIMIT = 10**9
"""Steps of a run that its seconds end."""


def train(
    *, config: str, seed: int, lr: float, seconds: float, every: int, folder: str
) -> dict[str, Any]:
    """Trains until the seconds since the call are up.

    The folder gets `STEP.safetensors` every few steps, of which the first is the base's: the LoRA's
    arrays by path.

    Returns:
        A value for each step: `elapsed_s`, its end in seconds since the call; `tokens`, generated
        until then.
    """
    run = _Run(load_config(config), seed=seed, lr=lr, folder=Path(folder))
    run.learner.train(run.batches(seconds, every=every))
    return {"elapsed_s": run.elapsed_s, "tokens": run.generated}


class _Run:
    def __init__(self, config: Config, *, seed: int, lr: float, folder: Path) -> None:
        self.began_s = time.monotonic()
        self.config, self.seed, self.folder = config, seed, folder
        model = Path(config.model.path)
        self.tokenizer = read_tokenizer(model)
        self.prompts = load_data(config, self.tokenizer).train.prompts
        self.tokens, self.elapsed_s, self.generated = 0, list[float](), list[int]()
        mesh = jax.make_mesh(
            (1, 1),
            ("fsdp", "tp"),
            devices=jax.devices()[:1],
            axis_types=(jax.sharding.AxisType.Auto,) * 2,
        )
        dtype = jax.numpy.dtype(config.model.dtype)
        shape = architecture(read_text_config(model), dtype=dtype).config
        with mesh:
            base = params_safetensors.create_model_from_safe_tensors(
                str(model), shape, mesh, dtype=dtype
            )
            policy = with_lora(base, config.lora, seed=seed)
        rollouts = RolloutConfig(
            max_tokens_to_generate=config.rollout.max_new_tokens,
            max_prompt_length=config.rollout.max_prompt_tokens,
            kv_cache_size=config.rollout.max_tokens,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            eos_tokens=list(Vocabulary.of(self.tokenizer, config.rollout).stops),
        )
        roles = rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT
        self.learner = GRPOLearner(
            rl_cluster=rl_cluster.RLCluster(
                actor=policy,
                tokenizer=_tokens(self.tokenizer, self.prompts),
                cluster_config=rl_cluster.ClusterConfig(
                    role_to_mesh=dict.fromkeys(roles, mesh),
                    training_config=self._training(lr),
                    rollout_config=rollouts,
                ),
            ),
            reward_fns=self._reward(),
            algo_config=GRPOConfig(
                num_generations=config.rollout.group_size,
                beta=0.0,
                epsilon=config.learner.variant.clip_low,
                loss_agg_mode=_MEANS[config.learner.variant.token_weights],
            ),
            metric_fns=[self._count],
        )
        self._draw_seeds()

    def _draw_seeds(self) -> None:
        """Gives each call of the sampler a seed of its own."""
        sampler, calls = self.learner.rl_cluster.rollout, itertools.count()
        generate = sampler.generate

        def seeded(prompts: Any, config: RolloutConfig) -> Any:
            drawn = np.random.SeedSequence((self.seed, next(calls))).generate_state(1)
            return generate(prompts, replace(config, seed=cast("Any", int(drawn[0] >> 1))))

        sampler.generate = seeded

    def _training(self, lr: float) -> rl_cluster.RLTrainingConfig:
        learner, prompts = self.config.learner, self.config.rollout.prompts_per_step
        micro_batch = self._micro_batch(prompts)
        warmup = max(learner.warmup_steps, 1)
        rate = optax.linear_schedule(lr / warmup, lr, max(warmup - 1, 1))
        return rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.chain(
                optax.clip_by_global_norm(learner.max_grad_norm),
                optax.adamw(rate, b1=0.9, b2=learner.adam_b2, weight_decay=learner.weight_decay),
            ),
            eval_every_n_steps=WITHOUT_LIMIT,
            max_steps=WITHOUT_LIMIT,
            mini_batch_size=prompts,
            train_micro_batch_size=micro_batch,
            rollout_micro_batch_size=micro_batch,
            # The least common multiple of the last two is sampled before an update.
            compute_logps_micro_batch_size=prompts,
            metrics_logging_options=MetricsLoggerOptions(
                str(self.folder), backend_kwargs={"custom_backend": [_silent]}
            ),
        )

    def _micro_batch(self, prompts: int) -> int:
        """Prompts of a micro-batch, a divisor of those of a step."""
        stats, rollout = jax.devices()[0].memory_stats() or {}, self.config.rollout
        memory = stats.get("bytes_limit", psutil.virtual_memory().total)
        logits = 4 * self.tokenizer.vocab_size * rollout.max_tokens * rollout.group_size
        divisors = [n for n in range(1, prompts + 1) if prompts % n == 0]
        return max((n for n in divisors if n * logits <= LOGITS_SHARE * memory), default=1)

    def _reward(self) -> Any:
        """A reward function of Tunix's form: the weighted sum of the configuration's."""
        parts = self.config.rewards.functions
        forms = {part.name: recognise(resolve(part.function), part.args) for part in parts}
        by_text = {prompt.text: prompt for prompt in self.prompts}
        tags = Tags.of_run(self.config)

        def reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
            inputs: list[RewardInput] = [
                by_text[prompt].reward_input(text, stop_reason="eos", tags=tags)
                for prompt, text in zip(prompts, completions, strict=True)
            ]
            scores: list[dict[str, Outcome]] = [{} for _ in inputs]
            for name, form in forms.items():
                for index, outcome, _trace in form.score(inputs):
                    scores[index][name] = outcome
            weights = self.config.reward_weights
            return [combine(one, weights=weights) or 0.0 for one in scores]

        return reward

    def _count(self, *, completions: Sequence[str], **_: Any) -> dict[str, Any]:
        """Called by the learner with each step's rollouts; counts their tokens."""
        self.tokens += sum(len(self.tokenizer.encode(text)) + 1 for text in completions)
        return {}

    def batches(self, seconds: float, *, every: int) -> Iterator[Mapping[str, np.ndarray]]:
        """The prompts of each step; the learner takes the next ones after an update.

        Records the end of the step before, and keeps its version if it is due.
        """
        for step in itertools.count():
            trained = self.learner.rl_cluster.actor_trainer.model
            lora = jax.block_until_ready(nnx.state(trained, nnx.LoRAParam))
            elapsed_s = time.monotonic() - self.began_s
            if step:
                self.elapsed_s.append(elapsed_s)
                self.generated.append(self.tokens)
            if elapsed_s >= seconds or step % every == 0:
                arrays = {
                    ".".join(map(str, path)): np.asarray(leaf.get_value())
                    for path, leaf in nnx.to_flat_state(lora)
                }
                save_file(arrays, self.folder / f"{step}.safetensors")
            if elapsed_s >= seconds:
                return
            prompts = prompts_for_step(
                self.prompts,
                seed=self.seed,
                step=step,
                prompts_per_step=self.config.rollout.prompts_per_step,
            )
            yield {"prompts": np.array([prompt.text for prompt in prompts])}


def _tokens(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> SimpleNamespace:
    """The configuration's tokenizer with the interface that Tunix accepts."""
    ids = {prompt.text: prompt.tokens.tolist() for prompt in prompts}
    return SimpleNamespace(
        encode=lambda text, **_: list(ids[text]),
        decode=lambda ids, **_: tokenizer.decode(ids),
        bos_id=lambda: tokenizer.bos_id,
        eos_id=lambda: tokenizer.eos_id,
        pad_id=lambda: tokenizer.pad_id,
    )


def _silent() -> SimpleNamespace:
    """A logging backend that writes nothing."""
    return SimpleNamespace(log_scalar=lambda *_, **__: None, close=lambda: None)
