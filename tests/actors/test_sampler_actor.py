"""The sampler's process: opened and loaded adapters, and merged or quantized weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from actors.colocated_actor import ColocatedActor
from actors.sampler_actor import SamplerActor
from configs.schema import Config
from launch.bench.harness import compilations
from pipeline.compute.decode.rollout_weights import RolloutWeights
from pipeline.compute.model import lora
from pipeline.compute.model.adapter_file import write_adapter_file
from pipeline.types import Completion
from tests import tiny
from tests.actors.two_layers import opened
from tests.pipeline.compute.learner.test_learner import ahead

GOLDEN = Path(__file__).parents[1] / "golden" / "gemma3"


@pytest.fixture
def sampler() -> SamplerActor:
    actor = SamplerActor(tiny.make_config())
    actor.policy = tiny.policy(layers=2)
    actor.weights = RolloutWeights(actor.policy, tiny.base(layers=2), actor.config)
    return actor


def write_best(folder: Path) -> str:
    adapter = jax.device_get(tiny.probe(layers=2))
    write_adapter_file(folder / "checkpoints" / "best", adapter, version=7)
    return lora.sha256(adapter)


def test_a_runs_adapter_is_opened_once(sampler: SamplerActor, tmp_path: Path):
    sha256 = write_best(tmp_path)
    opened = sampler.open_adapter(str(tmp_path))
    assert (opened.version, opened.sha256) == (7, sha256)
    assert opened.what == f"step 7 of {tmp_path / 'checkpoints' / 'best'}"
    base = sampler.open_adapter(None)
    assert (base.version, base.what) == (0, "the base")
    assert sampler.sha256 == base.sha256 != sha256
    assert not any(np.asarray(value).any() for value in sampler.adapter.values())
    # Not read again: the run may replace its best adapter meanwhile.
    (tmp_path / "checkpoints" / "best" / "adapter.safetensors").unlink()
    assert sampler.open_adapter(str(tmp_path)) == opened
    assert (sampler.version, sampler.sha256) == (7, sha256)
    assert lora.sha256(sampler.adapter) == sha256


def config(kind: str, **tables: dict[str, Any]) -> Config:
    return tiny.make_config(
        learner={"importance_cap": 2.0},
        plan={"rollout_weights": kind} | tables.pop("plan", {}),
        **tables,
    )


def sample(actor: SamplerActor) -> Sequence[Completion]:
    return actor.generate(tiny.make_requests([3, 14, 6]), temperature=0.8)


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.tokens.tolist() for completion in completions]


@pytest.mark.parametrize("kind", ["shared", "int8"])
def test_a_sampler_uses_the_loaded_adapter_and_compiles_nothing(kind: str):
    actor = SamplerActor(config(kind))
    actor.open(opened())
    sent = [jax.device_get(tiny.make_probe(actor.policy, seed=seed)) for seed in (1, 2)]
    with compilations() as seen:
        first = actor.load(0, sent[0])
        before = sample(actor)
        second = actor.load(1, sent[1])
        other = sample(actor)
        again = actor.load(2, sent[0])
        after = sample(actor)
    assert seen == []
    # The hash is the adapter's, before merging or quantization.
    assert [first, second, again] == [lora.sha256(sent[number]) for number in (0, 1, 0)]
    assert {(one.version, one.adapter_sha256) for one in after} == {(2, first)}
    assert tokens(before) == tokens(after) != tokens(other)
    for one, two in zip(before, after, strict=True):
        np.testing.assert_array_equal(one.logprobs, two.logprobs)


def test_a_colocated_sampler_with_merged_weights_follows_the_learner():
    actor = ColocatedActor(config("merged"))
    actor.learner = ahead()
    model = opened()
    SamplerActor.open(actor, model)
    pointers = {name: value.unsafe_buffer_pointer() for name, value in model.base.items()}
    bounds, drawn = actor.config.mismatch_bounds, []
    learned = tiny.make_rollouts([(3, 20), (3, 17)], advantages=[1.0, -1.0])
    for which in ("probe", "current"):
        if which == "current":
            actor.learner.update(learned)
        (version, sha256), payload = actor.publish(which=which)
        assert payload == which  # the adapter itself does not move
        assert actor.load(version, payload) == sha256
        drawn.append(sample(actor))
        assert {(d.version, d.adapter_sha256) for d in drawn[-1]} == {(version, sha256)}
        scored = np.concatenate(actor.learner.score(drawn[-1], adapter=actor.adapter))
        sampled = np.concatenate([completion.logprobs for completion in drawn[-1]])
        assert np.abs(scored - sampled).max() <= bounds.p999
    assert tokens(drawn[0]) != tokens(drawn[1])
    # The learner's base is unchanged and was not copied.
    assert pointers == {name: value.unsafe_buffer_pointer() for name, value in model.base.items()}
