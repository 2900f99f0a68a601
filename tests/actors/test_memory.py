"""Memory in actors: errors name their phase, limits are known before anything runs, peaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from actors.colocated_actor import ColocatedActor
from pipeline.compute.device_memory import resident_bytes
from pipeline.plan.sizes import Sizes, smaller
from pipeline.plan.topology import GIB
from pipeline.protocols import OutOfMemory
from pipeline.types import Completion
from tests import tiny
from tests.actors.two_layers import give_model

ROW = 42
WHOLE, FEWER_SLOTS, FEWER_ROWS = Sizes(4, 2 * ROW), Sizes(3, 2 * ROW), Sizes(4, ROW)
REQUESTS = tiny.make_requests([3, 14, 6, 9, 4, 11])
ROLLOUTS = tiny.make_rollouts(
    [(3, 20), (3, 17), (9, 25), (12, 28)], advantages=[1.0, -1.0, 0.5, -0.5]
)


def full(*_: Any, **__: Any) -> Any:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.\nmore")


def make_actor(monkeypatch: pytest.MonkeyPatch) -> ColocatedActor:
    """Two layers, merged for rollouts, prepared; slots are compacted at the end."""
    config = tiny.make_config(
        learner={"kl_coef": 0.1, "kl": "topk", "kl_top_k": 8},
        plan={
            "slots": WHOLE.slots,
            "slot_buckets": (2,),
            "micro_batch_tokens": WHOLE.micro_batch_tokens,
            "rollout_weights": "merged",
        },
    )
    actor = ColocatedActor(config)
    give_model(actor, monkeypatch)
    actor.prepare(WHOLE)
    publish(actor)
    return actor


def publish(actor: ColocatedActor) -> None:
    (version, _), payload = actor.publish(which="current")
    actor.load(version, payload)


def draw(actor: ColocatedActor) -> list[Completion]:
    return actor.generate(REQUESTS, temperature=0.8)


@pytest.fixture(scope="module")
def patched() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def shared(patched: pytest.MonkeyPatch) -> ColocatedActor:
    """The actor whose memory runs out in each test; `actor` prepares it anew."""
    return make_actor(patched)


@pytest.fixture
def actor(shared: ColocatedActor) -> ColocatedActor:
    shared.prepare(WHOLE)
    shared.learner.state = shared.learner._fresh()
    publish(shared)
    return shared


def test_the_phase_that_ran_out_of_memory_is_told(monkeypatch: pytest.MonkeyPatch):
    actor = ColocatedActor(tiny.make_config())
    parts = SimpleNamespace(
        update=full, score=full, generate=full, export=full, base={}, adapter={}
    )
    for name in ("learner", "engine", "exporter", "weights"):
        monkeypatch.setattr(actor, name, parts, raising=False)
    monkeypatch.setattr(actor, "adapter_of", lambda _: ({}, 0))
    monkeypatch.setattr(actor, "set_adapter", full)
    work: dict[str, Callable[[], Any]] = {
        "generate": lambda: actor.generate([], temperature=1.0),
        "update": lambda: actor.update([]),
        "score": lambda: actor.score([], which="current"),
        "sync": lambda: actor.load(1, "current"),
        "export": lambda: actor.export("folder", [], which="best"),
    }
    for phase, method in work.items():
        with pytest.raises(OutOfMemory) as told:
            method()
        assert told.value.phase == phase


@pytest.mark.slow
def test_smaller_sizes_give_the_same_samples_and_keep_the_other_programs(actor: ColocatedActor):
    whole = draw(actor)
    assert smaller(actor.config, Sizes.of(actor.config), "generate") == FEWER_SLOTS
    built = {one.name for one in actor.prepare(FEWER_SLOTS).built}
    assert built >= {"segment 3", "segment 2", "empty slots"}
    assert not any(name.startswith("gradient") for name in built)
    for one, other in zip(whole, draw(actor), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
    actor.prepare(WHOLE)
    assert smaller(actor.config, Sizes.of(actor.config), "update") == FEWER_ROWS
    built = {one.name for one in actor.prepare(FEWER_ROWS).built}
    assert built >= {"gradient 1", "score 1", "apply"}
    assert not any(name.startswith("segment") for name in built)


@pytest.mark.slow
def test_programs_that_exceed_the_limit_are_refused_before_anything_runs(
    actor: ColocatedActor, monkeypatch: pytest.MonkeyPatch
):
    there, needs = resident_bytes(), actor.needs()
    largest = max(needs["update"].values())
    assert largest > max(needs["generate"].values())
    plan = actor.requested.plan.model_copy(update={"hbm_gib": (there + largest - 1) / GIB})
    monkeypatch.setattr(actor, "requested", actor.requested.model_copy(update={"plan": plan}))
    with pytest.raises(OutOfMemory, match=r"needs .* GiB of each device beside .*hbm_gib") as told:
        actor.prepare(WHOLE)
    assert told.value.phase == "update"
    assert 0 < (told.value.share or 0) < 1
    actor.prepare(FEWER_ROWS)


@pytest.mark.slow
def test_sampler_and_learner_never_hold_their_peaks_at_once(
    actor: ColocatedActor, monkeypatch: pytest.MonkeyPatch
):
    """Caches are freed before the update starts, gradients before sampling starts."""
    actor.update(ROLLOUTS)
    publish(actor)
    idle, seen = resident_bytes(), dict[str, int]()
    segment, gradient = actor.engine._programs.segment[4], actor.learner._compiled["gradient 2"]

    def watched(name: str, program: Any) -> Any:
        def run(*given: Any) -> Any:
            seen.setdefault(name, resident_bytes() - idle)
            return program(*given)

        return run

    programs, compiled = actor.engine._programs, actor.learner._compiled
    monkeypatch.setattr(
        actor.engine,
        "_programs",
        dataclasses.replace(programs, segment={**programs.segment, 4: watched("segment", segment)}),
    )
    monkeypatch.setattr(
        actor.learner,
        "_compiled",
        {**compiled, "gradient 2": watched("gradient", gradient)},
    )
    for _ in range(2):
        draw(actor)
        assert resident_bytes() == idle
        actor.update(ROLLOUTS)
        assert resident_bytes() == idle
        publish(actor)
        assert resident_bytes() == idle
    slots = sum(leaf.nbytes for leaf in jax.tree.leaves(programs.empty()))
    gradients = sum(leaf.nbytes for leaf in actor.learner.state.adapter.values())
    assert slots <= seen["segment"] < slots + gradients
    assert gradients <= seen["gradient"] < gradients + slots
