"""A small Gemma with random weights on some devices: the model of the checks.

The settings are those of a preset, the sizes are small. The same numbers on any devices: base and
adapter are rounded to bfloat16, so that float32 and bfloat16 differ in the computation only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import configs
from configs.load import load_config
from configs.schema import Config
from pipeline.compute.model.architecture import architecture
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.types import Rollout, RolloutName, RolloutRequest
from tests import tiny

ROWS = 8
"""Packed rows of a batch: one for each chip of a host."""
ROW = 128
"""Positions of a row, a block of the flash attention kernel; a row holds two sequences."""
PROMPT, NEW = 24, 40
"""Largest lengths; a sequence is longer than the window, so that ring caches wrap around."""
WINDOW = 32
VOCABULARY = Vocabulary(pad=0, stops=(1,), forbidden=(0, 1, 2, 3))
"""Stop tokens are forbidden: completions have the requested length."""
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 2048,
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "query_pre_attn_scalar": 128,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 3,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
}
"""`config.json`: two local layers and a global one."""
_GEMMA2: dict[str, Any] = {
    **{key: value for key, value in GEMMA3.items() if key != "rope_local_base_freq"},
    "model_type": "gemma2",
    "rope_theta": 10_000.0,
    # Small, so that they have an effect.
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 3.0,
}
_PRESET = "gemma3_1b_gsm8k_v5e8"


@dataclass(frozen=True)
class SmallModel:
    """The model on its devices.

    Attributes:
        policy: the model.
        base: its parameters.
        adapter: a LoRA that changes every output.
        config: settings and sizes.
    """

    policy: Policy
    base: Params
    adapter: Params
    config: Config

    @staticmethod
    def on(
        devices: Sequence[jax.Device],
        *,
        dtype: str = "bfloat16",
        gemma2: bool = False,
        **settings: Any,
    ) -> SmallModel:
        """The model on devices.

        Args:
            devices: of one kind.
            dtype: of base and computation.
            gemma2: with soft caps, and without norms of queries and keys.
            settings: of the configuration, as `table__key=value`.
        """
        config = make_config(devices, {"model__dtype": dtype} | settings)
        hf = _GEMMA2 if gemma2 else GEMMA3
        policy = Policy(
            architecture(hf, dtype=jnp.dtype(dtype)), lora=config.lora, mesh=make_mesh(devices)
        )
        rng = np.random.default_rng(0)
        shapes, _ = policy.abstract_params()
        base = {}
        for name, kept in sorted(shapes.items()):
            # With a larger tied embedding every token would predict itself.
            value = _random(rng, kept.shape, 0.03 if name.endswith("embedding") else 0.1)
            value += 2.0 if name == "final_norm.scale" else 0.0
            base[name] = jax.device_put(value.astype(kept.dtype), kept.sharding)
        adapter = {
            name: _random(rng, kept.shape, 0.1)
            for name, kept in sorted(policy.adapter_shapes.items())
        }
        return SmallModel(policy, base, policy.place_adapter(adapter), config)


def _random(rng: np.random.Generator, shape: Sequence[int], scale: float) -> np.ndarray:
    """Normal numbers, rounded to bfloat16, as float32."""
    value = scale * rng.standard_normal(shape, np.float32)
    return value.astype(jnp.bfloat16).astype(np.float32)


def make_config(devices: Sequence[jax.Device], settings: Mapping[str, Any]) -> Config:
    """The settings of the preset with small sizes, and with `settings`."""
    platform, count = devices[0].platform, len(devices)
    given = {
        "lora__rank": 8,
        "rollout__group_size": 4,
        "rollout__max_prompt_tokens": PROMPT,
        "rollout__max_new_tokens": NEW,
        "plan__platform": platform,
        "plan__learner_devices": count,
        "plan__slots": 2 * ROWS,
        "plan__slot_buckets": "[]",
        "plan__segment_steps": 16,
        "plan__prefill_tokens": 4 * PROMPT,
        "plan__prompt_buckets": "[]",
        "plan__row_tokens": ROW,
        "plan__micro_batch_tokens": ROW * count,  # one row on each
        # The kernel has a check of its own.
        "plan__attention": "blocked",
        **settings,
    }
    overrides = [(key.replace("__", "."), str(value)) for key, value in given.items()]
    return load_config(Path(configs.__file__).parent / f"{_PRESET}.toml", overrides)


def rollouts() -> list[Rollout]:
    """Two random sequences for each row, half of them with a positive advantage."""
    rng = np.random.default_rng(1)
    # Any two fit into a row, and no three.
    prompts = rng.integers(PROMPT - 8, PROMPT + 1, 2 * ROWS).tolist()
    news = rng.integers(NEW - 12, NEW + 1, 2 * ROWS).tolist()
    lengths = list(zip(prompts, news, strict=True))
    return tiny.make_rollouts(lengths, advantages=ROWS * [1.0, -1.0])


def requests(longest: int = PROMPT) -> list[RolloutRequest]:
    """Random prompts in groups of four, half as many again as there are slots."""
    rng, found = np.random.default_rng(2), []
    for group in range(3 * ROWS // 4):
        length = int(rng.integers(longest // 2, longest + 1))
        tokens = rng.integers(len(VOCABULARY.forbidden), GEMMA3["vocab_size"], length)
        for sample in range(4):
            name = RolloutName("train", 0, group, sample)
            found.append(RolloutRequest(name, tokens.astype(np.int32)))
    return found
