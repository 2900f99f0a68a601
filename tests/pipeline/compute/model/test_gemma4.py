"""Per-layer embeddings of a Gemma 4 in host memory; `test_golden` has its logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests import tiny

SEQ = 3 * tiny.WINDOW + 1
TOKENS = np.random.default_rng(0).integers(8, tiny.VOCAB, (2, SEQ)).astype(np.int32)


TWO_LAYERS: dict[str, Any] = tiny.GEMMA4 | {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
}

TABLE = "per_layer_embedder.embedding"


def test_embeddings_in_host_memory_give_the_same_logits():
    tokens, model = np.tile(TOKENS, (4, 1)), TWO_LAYERS
    mesh: dict[str, Any] = {"devices": 8, "fsdp": 2, "tp": 2}
    chips = tiny.make_policy(**mesh, **model)
    host = tiny.make_policy(**mesh, embeddings_in_host=True, **model)
    base = tiny.make_base(chips)
    there = host.stored_base(base.items())
    assert there[TABLE].sharding.memory_kind == "pinned_host"
    found, wanted = (
        tiny.logits(policy, params, tiny.make_probe(policy), tokens)
        for policy, params in ((host, there), (chips, base))
    )
    np.testing.assert_array_equal(found, wanted)
    for (name, value), (_, exact) in zip(
        host.parameters(there), chips.parameters(base), strict=True
    ):
        np.testing.assert_array_equal(value, exact, err_msg=name)
    again = host.stored_base(there.items())
    assert again[TABLE] is there[TABLE]
