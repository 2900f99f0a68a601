"""A small policy with random weights, with our engine and Tunix's sampler, and their requests.

Lengths are given: stop tokens are forbidden on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import configs
from configs.load import load_config
from configs.schema import Config
from launch.bench.models import MODELS
from launch.bench.tunix_peer import Peer
from launch.bench.tunix_sampler import TunixSampler
from pipeline.compute.decode.engine import Engine
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.contracts.rollouts import RolloutName, RolloutRequest

GROUP = 8
SLOTS, SEGMENT = 16, 8
PROMPT, NEW = 64, 256
"""Largest lengths of a prompt, which has at least half of it, and of a completion."""
SPREAD, MEDIAN = 0.8, 0.272
"""Lognormal length of a completion: standard deviation of the logarithm, and median as a share of
`NEW`. Truncated at `NEW`, the mean is 0.35 of it."""
VOCABULARY = Vocabulary(pad=0, stops=(1,), forbidden=(0, 1))
_SCALES = {"embedder.input_embedding": 0.03}
"""Scales of random weights other than 0.1; a larger tied embedding makes every token repeat."""


@dataclass(frozen=True)
class Case:
    """Both samplers, with the same weights.

    Attributes:
        policy: the model.
        base: its frozen parameters.
        adapter: a non-zero LoRA.
        engine: our rollout engine.
        peer: Tunix's sampler.
    """

    policy: Policy
    base: Params
    adapter: Params
    engine: Engine
    peer: TunixSampler

    @staticmethod
    def make() -> Case:
        """Makes random weights, the same at each call."""
        config = case_config()
        policy, base, adapter = make_policy(config)
        lora, shape = config.lora, policy.architecture.config
        peer = Peer.create(shape, rank=lora.rank, alpha=lora.scale * lora.rank)
        model = nnx.merge(peer.graphdef, *peer.with_values({**base, **adapter}))
        return Case(
            policy,
            base,
            adapter,
            Engine(policy, base, config, VOCABULARY),
            TunixSampler(model, VOCABULARY, prompt=PROMPT, new=NEW),
        )


def make_policy(config: Config) -> tuple[Policy, Params, Params]:
    """Returns the policy, random weights and a non-zero LoRA, the same at each call."""
    shape = architecture(MODELS["small_policy"], dtype=jnp.dtype("float32"))
    policy = Policy(shape, lora=config.lora, mesh=make_mesh(jax.devices()[:1]))
    rng = np.random.default_rng(0)
    base = {
        name: jnp.asarray(_SCALES.get(name, 0.1) * rng.standard_normal(kept.shape, np.float32))
        for name, kept in sorted(policy.base_shapes.items())
    }
    # Logits with a standard deviation of about 1.
    base["final_norm.scale"] += 2.0
    adapter = policy.place_adapter(
        {
            name: 0.1 * rng.standard_normal(kept.shape, np.float32)
            for name, kept in sorted(policy.adapter_shapes.items())
        }
    )
    return policy, base, adapter


def make_requests(lengths: Sequence[int]) -> list[RolloutRequest]:
    """Returns requests of these lengths; `GROUP` consecutive ones have the same prompt."""
    rng = np.random.default_rng(1)
    requests = []
    for first in range(0, len(lengths), GROUP):
        size = rng.integers(PROMPT // 2, PROMPT + 1)
        tokens = rng.integers(2, MODELS["small_policy"]["vocab_size"], size).astype(np.int32)
        requests += [
            RolloutRequest(RolloutName("train", 0, first // GROUP, sample), tokens, int(length))
            for sample, length in enumerate(lengths[first : first + GROUP])
        ]
    return requests


def make_lengths(count: int) -> np.ndarray:
    """Returns `count` lognormal lengths, truncated at `NEW`; the same at each call."""
    lengths = np.random.default_rng(2).lognormal(math.log(MEDIAN * NEW), SPREAD, count)
    return np.clip(lengths.round(), 1, NEW).astype(int)


def case_config(**changes: Any) -> Config:
    """Returns the configuration of policy and sampler, with changes as `table__key=value`."""
    settings = {
        "rollout.group_size": GROUP,
        "rollout.max_prompt_tokens": PROMPT,
        "rollout.max_new_tokens": NEW,
        "plan.sampler_devices": 1,
        "plan.learner_devices": 1,
        "plan.slots": SLOTS,
        "plan.segment_steps": SEGMENT,
        # One prefill holds the prompts of all slots.
        "plan.prefill_tokens": SLOTS // GROUP * PROMPT,
        "plan.row_tokens": PROMPT + NEW,
        "plan.micro_batch_tokens": PROMPT + NEW,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    overrides = [(key, str(value)) for key, value in settings.items()]
    return load_config(Path(configs.__file__).parent / "demo.toml", overrides)
