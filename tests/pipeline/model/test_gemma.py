"""The forward pass against Tunix's own, and what is read from config.json."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix.models.gemma3 import model as gemma3

from pipeline.model.gemma import Architecture, architecture
from pipeline.model.policy import Params
from tests import tiny

SEQ = 3 * tiny.WINDOW
TOKENS = np.random.default_rng(0).integers(8, tiny.VOCAB, (2, SEQ)).astype(np.int32)


def read(**changes: Any) -> Architecture:
    return architecture(tiny.hf_config(**changes), dtype=jnp.dtype("float32"))


def hidden(base: Params, adapter: Params, tokens: Any) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return tiny.policy().bind(base, adapter)(jnp.asarray(tokens), positions)[0]


@pytest.fixture(scope="module")
def run() -> Any:
    return jax.jit(hidden)


def test_logits_are_tunixs(run: Any):
    config = tiny.policy().architecture.config
    model = nnx.eval_shape(lambda: gemma3.Gemma3(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    base = tiny.base()
    flat = [
        (path, variable.replace(base[".".join(map(str, path))]))
        for path, variable in nnx.to_flat_state(state)
    ]

    @jax.jit
    def logits(state: nnx.State) -> jax.Array:
        causal = jnp.tril(jnp.ones((SEQ, SEQ), bool))[None].repeat(len(TOKENS), 0)
        positions = jnp.broadcast_to(jnp.arange(SEQ), TOKENS.shape)
        return nnx.merge(graphdef, state)(jnp.asarray(TOKENS), positions, None, causal)[0]

    ours = run(base, tiny.policy().no_adapter(), TOKENS) @ base["embedder.input_embedding"].T
    np.testing.assert_allclose(
        ours, logits(nnx.from_flat_state(flat)), rtol=0, atol=2e-5 * float(jnp.abs(ours).max())
    )


def test_padding_behind_a_row_changes_nothing(run: Any):
    length = SEQ - 5
    other = TOKENS.copy()
    other[:, length:] = 0
    base, adapter = tiny.base(), tiny.probe()
    first, second = (np.asarray(run(base, adapter, tokens)) for tokens in (TOKENS, other))
    np.testing.assert_array_equal(first[:, :length], second[:, :length])
    assert (first[:, length:] != second[:, length:]).any()


def test_a_token_is_seen_by_later_ones_only(run: Any):
    base, adapter = tiny.base(), tiny.probe()
    other = TOKENS.copy()
    other[:, 4] += 1
    first, second = (np.asarray(run(base, adapter, tokens)) for tokens in (TOKENS, other))
    changed = (first != second).any(axis=(0, 2))
    assert not changed[:4].any()
    # Also beyond the reach of the local layers alone: the global one is in the middle.
    assert changed[4:].all()


def test_rematerialisation_changes_no_value_and_no_gradient():
    policy, base, adapter = tiny.policy(layers=2), tiny.base(layers=2), tiny.probe(layers=2)

    def loss(adapter: Params, base: Params, *, remat: bool) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(SEQ), TOKENS.shape)
        hidden, _ = policy.bind(base, adapter)(jnp.asarray(TOKENS), positions, remat=remat)
        return jnp.mean(jnp.sin(hidden))

    both = jax.jit(jax.value_and_grad(loss), static_argnames="remat")
    value, grads = both(adapter, base, remat=False)
    again, regrads = both(adapter, base, remat=True)
    np.testing.assert_allclose(value, again, rtol=1e-5)
    for name, grad in grads.items():
        scale = float(jnp.abs(grad).max())
        assert scale > 0
        np.testing.assert_allclose(regrads[name], grad, rtol=0, atol=1e-5 * scale, err_msg=name)


def test_every_setting_is_read():
    found = read(
        num_key_value_heads=1,
        query_pre_attn_scalar=16,
        rope_theta=5e5,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
    )
    config = found.config
    assert found.query_scale == 0.25
    assert (config.num_layers, config.num_embed, config.embed_dim) == (7, tiny.VOCAB, 24)
    assert (config.hidden_dim, config.num_heads, config.head_dim) == (40, 4, 8)
    assert (config.num_kv_heads, config.sliding_window_size) == (1, tiny.WINDOW)
    assert (config.global_base_frequency, config.local_base_frequency) == (5e5, 2e4)
    assert (config.global_scale_factor, config.local_scale_factor) == (4.0, 1.0)
    assert config.param_dtype == jnp.float32


def test_windows_follow_gemmas_pattern():
    found = read()
    windows = [found.window(layer) for layer in range(7)]
    assert windows == [tiny.WINDOW] * 5 + [None, tiny.WINDOW]
    model = nnx.eval_shape(lambda: found.build(nnx.Rngs(0)))
    kinds = [layer.attn.attn_type for layer in model.layers]
    local = gemma3.AttentionType.LOCAL_SLIDING
    assert [kind == local for kind in kinds] == [window is not None for window in windows]


def five(**full: Any) -> dict[str, Any]:
    """RoPE as transformers 5 spells it."""
    return {
        "rope_theta": None,
        "rope_local_base_freq": None,
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    }


@pytest.mark.parametrize(
    "scaling",
    [None, {"rope_type": "linear", "factor": 8.0}, {"type": "linear", "factor": 8.0}],
)
def test_transformers_4_and_5_spell_the_same(scaling: dict[str, Any] | None):
    four = read(rope_theta=7e5, rope_local_base_freq=2e4, rope_scaling=scaling)
    assert four == read(**five(rope_theta=7e5, **(scaling or {"rope_type": "default"})))
    assert four.config.global_scale_factor == (8.0 if scaling else 1.0)


def test_what_hugging_face_leaves_out_has_its_defaults():
    found = read(rope_theta=None, rope_local_base_freq=None).config
    assert (found.global_base_frequency, found.local_base_frequency) == (1e6, 1e4)
    assert read(rope_theta=None, rope_local_base_freq=None, rope_parameters={}).config == found


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model_type": "gemma2"}, "model_type is 'gemma2'; this version reads 'gemma3_text'"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"num_key_value_heads": 3}, "num_attention_heads is not a multiple of num_key_value_head"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu', only 'gelu_pytorch_tanh'"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, only 1e-06"),
        ({"attention_bias": True}, "attention_bias is True, only False"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, only None"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, only None"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False, only True"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True, only False"),
        ({"sliding_window_pattern": 2}, "layer_types is not Gemma 3's five local layers"),
        ({"layer_types": ["full_attention"] * 7}, "layer_types is not Gemma 3's five local layers"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn', only"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type is 'yarn', only"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type 'linear' without a factor"),
        (five(rope_type="default", partial_rotary_factor=0.5), "partial_rotary_factor is not comp"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], line: str):
    with pytest.raises(ValueError, match=r"^config\.json: .") as raised:
        read(**changes)
    assert line in str(raised.value)


def test_all_that_is_wrong_is_named_at_once():
    with pytest.raises(ValueError, match=r"rms_norm_eps.*; attention_bias.*; rope_type"):
        read(rms_norm_eps=1e-5, attention_bias=True, rope_scaling={"rope_type": "yarn"})
    with pytest.raises(ValueError, match="head_dim is missing; sliding_window is missing"):
        read(head_dim=None, sliding_window=None)
