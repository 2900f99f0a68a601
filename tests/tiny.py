"""A tiny random Gemma 3 for tests, with a configuration, policies, engines and learners.

What tests share, because it takes seconds to compile, has four layers: two local ones, a global and
again a local one. A window of 8; several query heads per kv head; head_dim different from width /
heads. No parameter is zero, so that every parameter has an effect.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.schema import Config, Lora
from pipeline.compute.decode.cache import empty_rings, ring_slots
from pipeline.compute.decode.engine import Engine
from pipeline.compute.learner.learner import Learner
from pipeline.compute.model.architecture import Architecture, architecture
from pipeline.compute.model.head import scaled_logits
from pipeline.compute.model.policy import Params, Policy
from pipeline.compute.model.sharding import make_mesh
from pipeline.compute.model.vocabulary import Vocabulary
from pipeline.types import NO_TEXT, Completion, Rollout, RolloutName, RolloutRequest, Segment

WINDOW = 8
VOCAB = 96
VOCABULARY = Vocabulary(pad=0, stops=(1, 50), forbidden=(0, 2, 3))
LORA = Lora(rank=3, alpha=6.0)
GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    # Small, so that soft-capping has an effect.
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 3.0,
    "rope_theta": 10_000.0,
    "rope_local_base_freq": None,
}
"""Changes of `hf_config` that give a Gemma 2."""

GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    # The last two layers attend to keys and values of the first two.
    "num_hidden_layers": 4,
    "layer_types": 2 * ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 3.0,
    "query_pre_attn_scalar": None,
    "rope_theta": None,
    "rope_local_base_freq": None,
}
"""Changes of `hf_config` that give a Gemma 4."""

_CONFIG: dict[str, dict[str, Any]] = {
    "run": {"name": "tiny", "seed": 5},
    "model": {"path": "tiny", "dtype": "float32"},
    "lora": LORA.model_dump(),
    "data": {
        "train": {"path": "train.jsonl"},
        "validation": None,
        "test": {"path": "test.jsonl"},
    },
    "rewards": {"functions": [{"name": "r", "function": "rewards.correctness:exact_answer"}]},
    "rollout": {
        "group_size": 2,
        "prompts_per_step": 2,
        "max_prompt_tokens": 14,
        # More than three windows.
        "max_new_tokens": 28,
        "temperature": 0.8,
    },
    "learner": {"lr": 1e-2, "token_weights": "token"},
    "plan": {
        "platform": "cpu",
        "placement": "colocated",
        "slots": 4,
        "slot_buckets": (),  # one program; compaction has its own tests
        "segment_steps": 4,
    },
    "budget": {"steps": 20},
}


def hf_config(**changes: Any) -> dict[str, Any]:
    """A `config.json` as transformers 4 writes it; a value of None removes the key."""
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": WINDOW,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    }
    return {key: value for key, value in (config | changes).items() if value is not None}


def make_policy(
    *,
    devices: int = 1,
    fsdp: int = 1,
    tp: int = 1,
    dtype: str = "float32",
    lora: Lora = LORA,
    quantization: str = "none",
    separate: bool = False,
    embeddings_in_host: bool = False,
    **changes: Any,
) -> Policy:
    """The policy on a mesh of the first `devices` devices; `changes` go to `hf_config`."""
    return Policy(
        architecture(hf_config(**changes), dtype=jnp.dtype(dtype)),
        lora=lora,
        mesh=make_mesh(jax.devices()[:devices], fsdp=fsdp, tp=tp),
        quantization=quantization,
        separate=separate,
        embeddings_in_host=embeddings_in_host,
    )


def make_base(policy: Policy, *, seed: int = 0) -> Params:
    """Random parameters: logits have a standard deviation near 1, norms are not the identity."""
    rng = np.random.default_rng(seed)
    base = {}
    shapes, _ = policy.abstract_params()
    for name, shape in sorted(shapes.items()):
        # With a larger tied embedding every token would predict itself.
        value = (0.1 if name.endswith("embedding") else 0.2) * rng.standard_normal(shape.shape)
        if policy.architecture.shape.value_norm:
            # Queries stay small: with large scores, attention multiplies rounding errors.
            value += 1.0 if name.endswith("scale") and "_query_norm" not in name else 0.0
        elif name == "final_norm.scale":
            value += 1.0
        base[name] = jax.device_put(value.astype(shape.dtype), shape.sharding)
    return base


def make_probe(policy: Policy, *, seed: int = 1) -> Params:
    """A random adapter. Uses NumPy, because JAX would compile a generator for every shape."""
    rng = np.random.default_rng(seed)
    shapes = sorted(policy.adapter_shapes.items())
    return policy.place_adapter(
        {name: 0.1 * rng.standard_normal(shape.shape) for name, shape in shapes}
    )


def hidden_states(policy: Policy, base: Params, adapter: Params, tokens: np.ndarray) -> jax.Array:
    """Hidden states of whole sequences, `rows seq embed`."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    given = jnp.asarray(tokens), positions
    return jax.jit(lambda base, adapter: policy.bind(base, adapter)(*given)[0])(base, adapter)


def logits(policy: Policy, base: Params, adapter: Params, tokens: np.ndarray) -> jax.Array:
    """Logits of whole sequences, `rows seq vocab`; no token is forbidden."""
    return scaled_logits(
        hidden_states(policy, base, adapter, tokens),
        policy.embedding(base),
        softcap=policy.architecture.shape.final_softcap,
        temperature=1.0,
        forbidden=jnp.zeros(policy.vocab_size, bool),
    )


def make_config(**tables: dict[str, Any]) -> Config:
    """A small valid configuration; `tables` override single keys: `plan={"slots": 8}`.

    By default a micro-batch has one row per device, so that there is only one shape.
    """
    names = _CONFIG.keys() | tables.keys()
    given = {name: _CONFIG.get(name, {}) | tables.get(name, {}) for name in names}
    plan, rollout = given["plan"], given["rollout"]
    row = plan.get("row_tokens", rollout["max_prompt_tokens"] + rollout["max_new_tokens"])
    rows = plan.get("learner_devices", 1)
    sizes = {"row_tokens": row, "micro_batch_tokens": rows * row}
    return Config.model_validate(given | {"plan": {**sizes, **plan}})


@functools.cache
def policy(*, layers: int = 4, **mesh: Any) -> Policy:
    """The shared float32 policy with this number of layers; `mesh` is devices, fsdp and tp."""
    return make_policy(num_hidden_layers=layers, sliding_window_pattern=3, **mesh)


@functools.cache
def base(*, layers: int = 4, **mesh: Any) -> Params:
    """The shared parameters; the same values on any mesh."""
    return make_base(policy(layers=layers, **mesh))


@functools.cache
def probe(*, layers: int = 4, **mesh: Any) -> Params:
    """An adapter that changes every output; the same on any mesh."""
    return make_probe(policy(layers=layers, **mesh))


def engine(*, layers: int = 4, **tables: dict[str, Any]) -> Engine:
    """The shared engine of this configuration, on `plan.learner_devices` devices."""
    return _engine(layers, make_config(**tables).model_dump_json())


@functools.cache
def _engine(layers: int, settings: str) -> Engine:
    config = Config.model_validate_json(settings)
    plan = config.plan
    mesh = {"devices": plan.devices_per_sampler, "fsdp": plan.fsdp_of_sampler}
    shape = mesh | {"tp": plan.tp_of_sampler, "layers": layers}
    return Engine(policy(**shape), base(**shape), config, VOCABULARY, text_of=text_of)


def text_of(tokens: np.ndarray) -> str:
    """One character per token, none for special tokens."""
    silent = (VOCABULARY.pad, *VOCABULARY.stops, *VOCABULARY.forbidden)
    return "".join(chr(32 + token) for token in tokens.tolist() if token not in silent)


def learner(*, layers: int = 2, **tables: dict[str, Any]) -> Learner:
    """The shared learner of this configuration, in its initial state.

    Two layers: the tests of the model cover more layers.
    """
    found = _learner(layers, make_config(**tables).model_dump_json())
    found.state = found._fresh()
    return found


@functools.cache
def _learner(layers: int, settings: str) -> Learner:
    config = Config.model_validate_json(settings)
    plan = config.plan
    mesh = {"devices": plan.learner_devices, "fsdp": plan.fsdp, "tp": plan.tp}
    shape = mesh | {"layers": layers}
    return Learner(policy(**shape), base(**shape), config, VOCABULARY)


def forget_shared() -> None:
    """Lets go of the shared engines and learners, and so of their compiled programs."""
    _engine.cache_clear()
    _learner.cache_clear()


def make_requests(
    lengths: Sequence[int], *, seed: int = 0, step: int = 0, phase: Any = "train"
) -> list[RolloutRequest]:
    """A request for each prompt length, with random tokens."""
    rng = np.random.default_rng(seed)
    return [
        RolloutRequest(
            RolloutName(phase, step, prompt_id=number, sample=0),
            rng.integers(8, VOCAB, length).astype(np.int32),
        )
        for number, length in enumerate(lengths)
    ]


def make_rollouts(
    lengths: Sequence[tuple[int, int]], *, advantages: Sequence[float], seed: int = 0
) -> list[Rollout]:
    """A scored rollout for each pair of prompt and completion length, with random tokens."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for number, ((prompt, new), advantage) in enumerate(zip(lengths, advantages, strict=True)):
        completion = Completion(
            name=RolloutName("train", 0, prompt_id=number // 2, sample=number % 2),
            prompt_tokens=rng.integers(8, VOCAB, prompt).astype(np.int32),
            segments=(
                Segment(
                    rng.integers(8, VOCAB, new).astype(np.int32),
                    -rng.random(new).astype(np.float32),
                    version=0,
                    adapter_sha256="",
                ),
            ),
            stop_reason="length",
        )
        rollouts.append(Rollout(completion, NO_TEXT, {"r": 0.0}, 0.0, advantage))
    return rollouts


def bytes_per_row(architecture: Architecture, *, max_tokens: int, eight_bits: bool = False) -> int:
    """KV bytes of one row over all layers."""
    slots = ring_slots(architecture, max_tokens=max_tokens)
    rings = jax.eval_shape(
        lambda: empty_rings(architecture, rows=1, slots=slots, eight_bits=eight_bits)
    )
    return sum(ring.size * ring.dtype.itemsize for ring in jax.tree.leaves(rings))
