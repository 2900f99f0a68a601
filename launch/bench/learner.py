"""`python -m launch.bench learner`: the cost of logits on this machine's CPU, beside peers.

The learner's gradient beside Tunix's under a small body with the real vocabulary: same weights,
same tokens, same loss, GRPO at ratio 1 without a KL term, a mean over all tokens. Further sections:
the gradient's error against whole logits, prompts that a group shares (`shared_prompts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from launch.bench.harness import Benchmark, Bound, Row, Section, medians
from launch.bench.shared_prompts import SHARED
from launch.bench.small_gemma import SMALL, preset, random_weights
from launch.bench.tunix import Peer, train_example
from pipeline.compute.learner.batches import DeviceBatch, place_inputs
from pipeline.compute.learner.losses import weighted_sum
from pipeline.compute.learner.programs import LearnerPrograms
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.remat import Remat
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.data.batching import micro_batches, token_weights
from pipeline.types import NO_TEXT, Completion, Rollout, RolloutName, Segment

BODY: dict[str, Any] = SMALL | {
    "vocab_size": 262_144,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 256,
    "sliding_window": 128,
}
"""`config.json` of a small body with the real vocabulary."""
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
        row = PROMPT + COMPLETION
        config = preset(
            "demo",
            model__dtype=dtype,
            lora__rank=8,
            lora__alpha=16.0,
            rollout__max_prompt_tokens=PROMPT,
            rollout__max_new_tokens=COMPLETION,
            rollout__temperature=0.9,
            learner__token_weights="token",
            plan__learner_devices=1,
            plan__row_tokens=row,
            plan__micro_batch_tokens=sequences * row,
        )
        shape = architecture(BODY, dtype=jnp.dtype(dtype))
        policy = Policy(shape, lora=config.lora, mesh=make_mesh(jax.devices()[:1]))
        programs = LearnerPrograms(policy, config, VOCABULARY)
        rng = np.random.default_rng(0)
        base, adapter = random_weights(policy, rng, scales={})
        rollouts = tuple(_rollout(rng, number) for number in range(sequences))
        weights = token_weights(rollouts, "token", budget=COMPLETION)
        (packed,) = micro_batches(
            rollouts, shape=programs.shape, weights=weights, keep_zero_advantage=True
        )
        inputs = place_inputs(packed, policy.mesh)
        batch = DeviceBatch(inputs, jnp.asarray(packed.advantages))
        return Case(programs, base, adapter, batch, rollouts)

    def widened(self) -> Case:
        """Returns the same values in float32; the adapter is rounded to the body's dtype first."""
        body = next(iter(self.base.values())).dtype

        def widen(params: Params) -> Params:
            return {name: x.astype(body).astype(jnp.float32) for name, x in params.items()}

        case = Case.make(sequences=len(self.rollouts), dtype="float32")
        return replace(case, base=widen(self.base), adapter=widen(self.adapter))

    def ours(self) -> Gradient:
        """Compiles our gradient program."""
        zeros = jax.tree.map(jnp.zeros_like, self.adapter)
        given = (self.base, self.adapter, zeros, self.batch)
        return Gradient(self.programs.gradient, given, lambda result: result[0])

    def theirs(self, *, remat: bool = False) -> Gradient:
        """Compiles Tunix's gradient program, without recomputation as in its recipes."""
        config = self.programs.config
        peer = Peer.create(
            self.programs.policy.architecture.config,
            config.lora,
            temperature=config.rollout.temperature,
            remat=remat,
        )
        example = train_example(
            jnp.stack([rollout.completion.prompt_tokens for rollout in self.rollouts]),
            jnp.stack([rollout.completion.tokens for rollout in self.rollouts]),
            jnp.asarray([rollout.advantage for rollout in self.rollouts], jnp.float32),
        )
        given = (*peer.with_values({**self.base, **self.adapter}), example)
        return Gradient(peer.gradient, given, lambda result: _flat(result[1]))

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
                attend=self.programs.attention(inputs),
                remat=Remat(plan.remat, plan.layer_tokens),
            )
            embedding = policy.embedding(self.base)
            logits = jnp.einsum(
                "rsd,vd->rsv", hidden, embedding, preferred_element_type=jnp.float32
            )
            logprobs = jax.nn.log_softmax(logits / temperature)
            taken = jnp.take_along_axis(logprobs, inputs.targets[..., None], axis=-1)[..., 0]
            return weighted_sum(-taken * self.batch.advantages, inputs.weights)

        gradient: Params = jax.jit(jax.grad(loss))(self.adapter)
        return gradient


class Gradient:
    """A compiled gradient program and its arguments; a call waits for the result."""

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


def _flat(state: Any) -> dict[str, jax.Array]:
    return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}


def _rollout(rng: np.random.Generator, number: int) -> Rollout:
    def random_tokens(count: int) -> np.ndarray:
        return rng.integers(8, BODY["vocab_size"], count).astype(np.int32)

    completion = Completion(
        name=RolloutName("train", 0, prompt_id=number, sample=0),
        prompt_tokens=random_tokens(PROMPT),
        segments=(Segment(random_tokens(COMPLETION), np.zeros(COMPLETION, np.float32), 0, ""),),
        stop_reason="length",
    )
    return Rollout(completion, NO_TEXT, {}, 0.0, float(rng.standard_normal()))


def memory_and_time(*, sequences: int, repeats: int) -> dict[str, Any]:
    """Returns temporaries, time and difference of both gradients in float32, alternating.

    Programs that need too much memory are compiled, but not run.
    """
    case = Case.make(sequences=sequences, dtype="float32")
    ours, theirs = case.ours(), case.theirs()
    found: dict[str, Any] = {
        "ours_mib": ours.temporary_bytes / 2**20,
        "theirs_mib": theirs.temporary_bytes / 2**20,
        "memory_ratio": theirs.temporary_bytes / ours.temporary_bytes,
    }
    if max(ours.temporary_bytes, theirs.temporary_bytes) > ROOM * available_bytes():
        return found | {"not_run": "yes"}
    found["apart"] = apart(ours(), theirs())
    seconds = medians({"ours_s": ours, "theirs_s": theirs}, repeats=repeats)
    return found | seconds | {"time_ratio": seconds["theirs_s"] / seconds["ours_s"]}


def available_bytes() -> int:
    """Returns the memory that is free or can be freed."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


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
    rounded = {"ours_rounded": apart(ours, exact), "whole_rounded": apart(whole, exact)}
    ratio = rounded["ours_rounded"] / rounded["whole_rounded"]
    return {**found, **rounded, "rounded_ratio": ratio}


def apart(one: Mapping[str, jax.Array], other: Mapping[str, jax.Array]) -> float:
    """Returns the largest |one - other| / |other| of a leaf, in Euclidean norms."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    exact = {name: np.asarray(value, np.float64) for name, value in other.items()}
    return max(
        float(np.linalg.norm(np.asarray(one[name], np.float64) - value) / np.linalg.norm(value))
        for name, value in exact.items()
    )


BENCHMARK = Benchmark(
    (
        Section(
            "gradient",
            "The gradient of a LoRA under 262,144 entries: two layers, width 64, sequences of "
            "256 + 768 tokens, float32; medians of runs in turns",
            [
                Row(f"{1024 * n:,} tokens", memory_and_time, {"sequences": n, "repeats": 3})
                for n in (1, 4, 8)
            ],
            (
                Bound("memory_ratio", least=10),
                # Absent where a program is too large to run.
                Bound("time_ratio", least=1, optional=True),
            ),
        ),
        Section(
            "exact",
            "The same gradient against whole logits in float32: the LoRA's worst leaf, relative "
            "to its norm; and how far rounding in the body takes both",
            [
                Row(dtype, exactness, {"sequences": 1, "dtype": dtype})
                for dtype in ("float32", "bfloat16")
            ],
            (
                Bound("apart", most=1e-5, rows="float32"),
                Bound("apart", most=1e-2, rows="bfloat16"),
                Bound("rounded_ratio", most=1.1, rows="bf*"),
            ),
        ),
        SHARED,
    )
)
