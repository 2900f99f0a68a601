"""A rehearsal with real processes' insides and no Ray: random weights, colocated, on the CPU."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from actors.colocated import ColocatedActor
from configs.load import load_config
from launch import preparation, rehearsal
from pipeline.balanced import Balanced
from pipeline.datatypes import Published
from pipeline.plan.hardware import topology_of
from pipeline.plan.shapes import shape_of
from pipeline.rehearsal.account import Result
from pipeline.rehearsal.phases import Rehearsal, Stage
from pipeline.rehearsal.scratch import rehearsed, scratch
from tests.fakes import FakeScorer, Script
from tests.launch.cluster_fixtures import PROJECT, write_config

DEMO = PROJECT / "launch" / "demo" / "tiny_gemma3"
SETTINGS = {
    "plan.placement": "colocated",
    "plan.rollout_rows": "8",
    "plan.slot_buckets": "[4]",
    "plan.row_tokens": "104",
    "plan.micro_batch_tokens": "104",
    "rollout.prompts_per_step": "2",
    "rollout.max_new_tokens": "40",
    "rollout.partial": "keep",
    "rollout.cut_off": "0.5",
    "learner.importance_cap": "2.0",
    "learner.kl_coef": "0.1",
    "run.phases": '["sft", "grpo"]',
    "sft.train.path": "launch/demo/data/worked.jsonl",
    "sft.train.limit": "16",
    "sft.steps": "1",
    "sft.sequences_per_step": "2",
    "data.validation.path": "launch/demo/data/validation.jsonl",
    "data.validation.limit": "4",
    "eval.every_steps": "1",
}


class Here:
    """The actor of all devices, called on the spot."""

    def __init__(self, actor: ColocatedActor) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **named: Any) -> Any:
            return getattr(self.actor, name)(*args, **named)

        return call


class LearnerHere(Here):
    async def publish(self, which: str = "current") -> Published:
        (version, sha256), payload = self.actor.publish(which=which)
        return Published(version, sha256, payload)

    async def memory(self):
        return self.actor.learner_memory()


class SamplerHere(Here):
    async def load(self, published: Published) -> str:
        return self.actor.load(published.version, published.sha256, published.payload)

    async def memory(self):
        return self.actor.sampler_memory()


def write_model(folder: Path) -> None:
    """A model of two layers without weights."""
    folder.mkdir()
    text = json.loads((DEMO / "config.json").read_text())
    text |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    (folder / "config.json").write_text(json.dumps(text))
    shutil.copyfile(DEMO / "tokenizer.model", folder / "tokenizer.model")


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    if jax.device_count() != 1:
        monkeypatch.setattr("actors.devices.open_mesh", lambda **_: _one())
        monkeypatch.setattr("actors.opening.open_mesh", lambda **_: _one())
    write_model(tmp_path / "model")
    settings = {**SETTINGS, "model.path": str(tmp_path / "model")}
    config = load_config(write_config(tmp_path, name="real"), tuple(settings.items()))
    shape, aside = shape_of(config), rehearsed(config)
    with scratch(aside) as folder:
        aside = rehearsal._with_random_weights(aside, shape, folder / "model")
        prepared = preparation.prepare(aside, extend=None, tracked=False)
        actor = ColocatedActor(prepared.config)
        learner, sampler = LearnerHere(actor), SamplerHere(actor)
        balanced = Balanced.of(
            prepared.config, prepared.folder, samplers=[sampler], learner=learner, say=print
        )
        stage = Stage(
            config=prepared.config,
            data=prepared.data,
            tokenizer=prepared.tokenizer,
            balanced=balanced,
            scorer=FakeScorer(Script(), prepared.config),
            processes=[learner, sampler],
            one_process=True,
            restore=learner.restore,
            export=prepared.folder.export,
            shape=shape,
            topology=topology_of(prepared.config, None),
        )
        one = Rehearsal(stage, print)

        async def run() -> Result:
            await one.start(waited_s=0.0)
            return await one.run()

        found = asyncio.run(run())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "real.toml"]
    return found


def _one():
    from pipeline.model.sharding import make_mesh

    return make_mesh(jax.devices()[:1])


def test_every_phase_of_a_run_works_once_and_is_accounted_for(result: Result):
    assert result.failure is None
