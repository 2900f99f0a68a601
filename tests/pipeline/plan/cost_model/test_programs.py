"""The programs that a plan counts are those that sampler and learner compile."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.compute.decode.programs import DecodePrograms
from pipeline.compute.learner.programs import LearnerPrograms
from pipeline.data.models.hf_config import FULL, SLIDING, read_model_shape
from pipeline.plan.cost_model.programs import built_programs
from tests import tiny

ROW = 42
WARM: dict[str, Any] = {
    "run": {"phases": ("sft", "grpo")},
    "sft": {"train": {"path": "train.jsonl"}, "steps": 3},
    "learner": {"kl": "topk", "kl_coef": 0.1, "kl_top_k": 4},
    "plan": {"slot_buckets": None, "prompt_buckets": (7,), "micro_batch_tokens": 2 * ROW},
}
FEW: dict[str, Any] = {"plan": {"slot_buckets": (1,)}}


@pytest.mark.parametrize(
    ("tables", "layers"),
    [(WARM, (SLIDING, FULL)), (FEW, (SLIDING,)), (FEW, (FULL,))],
    ids=["rings of two kinds and a warm start", "windows only", "no windows"],
)
def test_a_plan_counts_the_compiled_programs(
    tables: dict[str, Any], layers: tuple[str, ...]
) -> None:
    config = tiny.make_config(**tables)
    hf: dict[str, Any] = {"layer_types": list(layers), "num_hidden_layers": len(layers)}
    policy = tiny.make_policy(**hf)
    sampler = DecodePrograms(policy, config, tiny.VOCABULARY).programs
    learner = LearnerPrograms(policy, config, tiny.VOCABULARY).programs
    found = built_programs(config, read_model_shape(tiny.hf_config(**hf)))
    assert sorted(found) == sorted([*sampler, *learner])
