"""The learner's gradient beside Tunix's on this machine: a small body with the real vocabulary.

Same weights, same tokens, same loss: GRPO at ratio 1 without a KL term, a mean over all tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.grpo.grpo_learner import TrainExample

import configs
from configs.load import load_config
from configs.schema import Config
from launch.bench.machine import available_bytes
from launch.bench.models import MODELS, VOCAB
from launch.bench.tunix_peer import Peer
from pipeline.compute.learner.batches import DeviceBatch, place_inputs
from pipeline.compute.learner.losses import weighted_sum
from pipeline.compute.learner.programs import LearnerPrograms
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.attention import PackedAttention
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.remat import Remat
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.contracts.rollouts import Completion, Rollout, RolloutName
from pipeline.inputs.dataset.batching import micro_batches, token_weights

PROMPT, COMPLETION = 256, 768
VOCABULARY = Vocabulary(pad=0, stops=(1,), forbidden=())
"""Tunix's loss forbids no token."""
ROOM = 0.8
"""Share of the free memory that a program may use."""


@dataclass(frozen=True)
class Case:
    """Our programs, and the inputs of both sides."""

    programs: LearnerPrograms
    base: Params
    adapter: Params
    batch: DeviceBatch
    rollouts: tuple[Rollout, ...]

    @staticmethod
    def make(*, sequences: int, dtype: str) -> Case:
        """Makes random weights, adapter, tokens and advantages, the same at each call."""
        config = _config(sequences, dtype)
        shape = architecture(MODELS["small_body"], dtype=jnp.dtype(dtype))
        policy = Policy(shape, lora=config.lora, mesh=make_mesh(jax.devices()[:1]))
        programs = LearnerPrograms(policy, config, VOCABULARY)
        rng = np.random.default_rng(0)
        base = {
            name: jnp.asarray(0.1 * rng.standard_normal(kept.shape, np.float32), kept.dtype)
            for name, kept in sorted(policy.base_shapes.items())
        }
        adapter = policy.place_adapter(
            {
                name: 0.1 * rng.standard_normal(kept.shape, np.float32)
                for name, kept in sorted(policy.adapter_shapes.items())
            }
        )
        rollouts = tuple(_rollout(rng, number) for number in range(sequences))
        weights = token_weights(rollouts, "token", budget=COMPLETION)
        (packed,) = micro_batches(
            rollouts, shape=programs.shape, weights=weights, keep_zero_advantage=True
        )
        inputs = place_inputs(packed, policy.mesh)
        batch = DeviceBatch(inputs, jnp.asarray(packed.weights), jnp.asarray(packed.advantages))
        return Case(programs, base, adapter, batch, rollouts)

    def widened(self) -> Case:
        """Returns the same values in float32; the adapter is rounded to the body's dtype first."""
        body = next(iter(self.base.values())).dtype

        def widen(params: Params) -> Params:
            return {name: x.astype(body).astype(jnp.float32) for name, x in params.items()}

        case = Case.make(sequences=len(self.rollouts), dtype="float32")
        return replace(case, base=widen(self.base), adapter=widen(self.adapter))

    def ours(self) -> Compiled:
        """Compiles our gradient program."""
        zeros = jax.tree.map(jnp.zeros_like, self.adapter)
        given = (self.base, self.adapter, zeros, self.batch)
        return Compiled(self.programs.gradient, given, lambda result: result[0])

    def theirs(self) -> Compiled:
        """Compiles Tunix's gradient program."""
        lora = self.programs.config.lora
        peer = Peer.create(
            self.programs.policy.architecture.config,
            rank=lora.rank,
            alpha=lora.scale * lora.rank,
            temperature=self.programs.config.rollout.temperature,
        )
        given = (*peer.with_values({**self.base, **self.adapter}), _example(self.rollouts))
        return Compiled(peer.gradient, given, lambda result: _flat(result[1]))

    def materialised(self) -> Params:
        """Returns the gradient of REINFORCE (GRPO at ratio 1) with the same body and whole logits.

        Logits are float32 for every dtype of the body.
        """
        policy, inputs = self.programs.policy, self.batch.inputs
        plan, temperature = self.programs.config.plan, self.programs.config.rollout.temperature

        def loss(adapter: Params) -> jax.Array:
            hidden, _ = policy.bind(self.base, adapter, exact=True)(
                inputs.tokens,
                inputs.positions,
                attend=PackedAttention(inputs.segments),
                remat=Remat(plan.remat, plan.layer_tokens),
            )
            embedding = policy.embedding(self.base)
            logits = jnp.einsum(
                "rsd,vd->rsv", hidden, embedding, preferred_element_type=jnp.float32
            )
            logprobs = jax.nn.log_softmax(logits / temperature)
            taken = jnp.take_along_axis(logprobs, inputs.targets[..., None], axis=-1)[..., 0]
            return weighted_sum(-taken * self.batch.advantages, self.batch.weights)

        gradient: Params = jax.jit(jax.grad(loss))(self.adapter)
        return gradient


class Compiled:
    """A compiled program and its arguments; a call waits for the result."""

    def __init__(
        self, function: Callable[..., Any], given: tuple[Any, ...], pick: Callable[[Any], Any]
    ) -> None:
        self._program = jax.jit(function).lower(*given).compile()
        self._given, self._pick = given, pick
        memory = self._program.memory_analysis()
        assert memory is not None
        self.temporary_bytes: int = memory.temp_size_in_bytes

    def __call__(self) -> dict[str, jax.Array]:
        """Returns the gradient of each LoRA matrix, by path."""
        return self._pick(jax.block_until_ready(self._program(*self._given)))


def memory_and_time(*, sequences: int, repeats: int) -> dict[str, Any]:
    """Returns temporaries, time and difference of both gradients in float32, alternating.

    Programs that need too much memory are compiled, but not run.
    """
    case = Case.make(sequences=sequences, dtype="float32")
    ours, theirs = case.ours(), case.theirs()
    sizes = {"ours_mib": ours.temporary_bytes, "theirs_mib": theirs.temporary_bytes}
    found: dict[str, Any] = {name: size / 2**20 for name, size in sizes.items()}
    found["memory_ratio"] = theirs.temporary_bytes / ours.temporary_bytes
    if max(sizes.values()) > ROOM * available_bytes():
        return found | {"not_run": True}
    found["apart"] = apart(ours(), theirs())
    seconds: dict[str, list[float]] = {"ours_s": [], "theirs_s": []}
    for _ in range(repeats):
        for name, run in (("ours_s", ours), ("theirs_s", theirs)):
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return found | medians | {"time_ratio": medians["theirs_s"] / medians["ours_s"]}


def exactness(*, sequences: int, dtype: str) -> dict[str, Any]:
    """Returns the error of the LoRA's gradient against whole logits, for the worst leaf.

    Also the errors of both against whole logits in float32 at the same values: the cost of the
    dtype, independent of the implementation.
    """
    case = Case.make(sequences=sequences, dtype=dtype)
    ours, whole = case.ours()(), case.materialised()
    found = {"tokens": sequences * (PROMPT + COMPLETION), "apart": apart(ours, whole)}
    if dtype == "float32":
        return found
    exact = case.widened().materialised()
    return found | {"ours_rounded": apart(ours, exact), "whole_rounded": apart(whole, exact)}


def apart(one: Mapping[str, jax.Array], other: Mapping[str, jax.Array]) -> float:
    """Returns the largest |one - other| / |other| of a leaf, in Euclidean norms."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    exact = {name: np.asarray(value, np.float64) for name, value in other.items()}
    return max(
        float(np.linalg.norm(np.asarray(one[name], np.float64) - value) / np.linalg.norm(value))
        for name, value in exact.items()
    )


def _config(sequences: int, dtype: str) -> Config:
    row = PROMPT + COMPLETION
    settings = {
        "model.dtype": dtype,
        "lora.rank": 8,
        "lora.alpha": 16.0,
        "rollout.max_prompt_tokens": PROMPT,
        "rollout.max_new_tokens": COMPLETION,
        "rollout.temperature": 0.9,
        "learner.token_weights": "token",
        "plan.learner_devices": 1,
        "plan.row_tokens": row,
        "plan.micro_batch_tokens": sequences * row,
    }
    overrides = [(key, str(value)) for key, value in settings.items()]
    return load_config(Path(configs.__file__).parent / "demo.toml", overrides)


def _rollout(rng: np.random.Generator, number: int) -> Rollout:
    def random_tokens(count: int) -> np.ndarray:
        return rng.integers(8, VOCAB, count).astype(np.int32)

    completion = Completion(
        name=RolloutName("train", 0, prompt_id=number, sample=0),
        prompt_tokens=random_tokens(PROMPT),
        tokens=random_tokens(COMPLETION),
        logprobs=np.zeros(COMPLETION, np.float32),
        stop_reason="length",
        version=0,
        adapter_sha256="",
    )
    return Rollout(completion, "", {}, 0.0, float(rng.standard_normal()))


def _example(rollouts: tuple[Rollout, ...]) -> TrainExample:
    prompts = jnp.stack([rollout.completion.prompt_tokens for rollout in rollouts])
    completions = jnp.stack([rollout.completion.tokens for rollout in rollouts])
    return TrainExample(
        prompt_ids=prompts,
        prompt_mask=jnp.ones_like(prompts, bool),
        completion_ids=completions,
        completion_mask=jnp.ones_like(completions, bool),
        advantages=jnp.asarray([rollout.advantage for rollout in rollouts], jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=None,
    )


def _flat(state: Any) -> dict[str, jax.Array]:
    return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}
