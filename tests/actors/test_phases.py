"""The phases that real actors report: a planted delay of a part is in its phase."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from actors.learner_actor import LearnerActor
from actors.sampler_actor import SamplerActor
from pipeline.clock import PhaseClock
from pipeline.compute.decode.engine import Engine
from pipeline.compute.decode.programs import DecodePrograms
from pipeline.compute.decode.rollout_weights import RolloutWeights
from pipeline.compute.learner.checkpoint import Checkpoints
from pipeline.compute.learner.learner import Learner
from pipeline.plan.sizes import Sizes
from tests import tiny
from tests.actors.test_learner_actor import trained, update
from tests.actors.test_sampler_actor import sample
from tests.actors.two_layers import give_model, opened
from tests.run_process import FakeClock

SIZES = Sizes(4, 84)


@pytest.fixture
def now() -> FakeClock:
    return FakeClock()


def plant(
    now: FakeClock, monkeypatch: pytest.MonkeyPatch, delays: Mapping[str, tuple[type, str]]
) -> dict[str, float]:
    """Plants a delay before a method of each phase; returns the seconds by phase, once it has run.

    The delays are different powers of 100, and no method has 100 calls.
    """
    planted = dict[str, float]()

    def delay(phase: str, cls: type, name: str, seconds: float) -> None:
        method = getattr(cls, name)

        def delayed(*args: Any, **kwargs: Any) -> Any:
            now.seconds += seconds
            planted[phase] = planted.get(phase, 0.0) + seconds
            return method(*args, **kwargs)

        monkeypatch.setattr(cls, name, delayed)

    for number, (phase, (cls, name)) in enumerate(delays.items()):
        delay(phase, cls, name, 100.0**number)
    return planted


def test_phases_of_a_sampler(now: FakeClock, monkeypatch: pytest.MonkeyPatch):
    actor = SamplerActor(tiny.make_config(plan={"slots": 4}))
    actor.opening, actor.phases = opened(), PhaseClock(now)
    delays = {
        "loading": (RolloutWeights, "__init__"),
        "compile": (DecodePrograms, "compile"),
        "sync": (SamplerActor, "set_adapter"),
        "prefill": (Engine, "_prefill"),
        "decode": (Engine, "_collect_ended"),
    }
    planted = plant(now, monkeypatch, delays)
    actor.prepare(SIZES)
    actor.load(1, actor.policy.fresh_adapter(0))
    sample(actor)
    use = actor.use()
    assert planted.keys() == delays.keys()
    assert {name: seconds for name, seconds in use.seconds.items() if seconds} == planted
    assert use.memory is not None
    assert use.memory.in_use > 0
    assert actor.use().seconds == {}


def test_phases_of_a_learner(tmp_path: Path, now: FakeClock, monkeypatch: pytest.MonkeyPatch):
    actor = trained(tmp_path)
    actor.phases = PhaseClock(now)
    delays = {"update": (Learner, "update"), "checkpoint": (Checkpoints, "save")}
    delays["sync"] = (LearnerActor, "adapter_of")
    planted = plant(now, monkeypatch, delays)
    update(actor)
    actor.save({})
    actor.publish(which="current")
    assert {name: seconds for name, seconds in actor.use().seconds.items() if seconds} == planted
    assert planted.keys() == delays.keys()


@pytest.mark.slow
def test_each_micro_batch_of_an_update_is_progress(monkeypatch: pytest.MonkeyPatch):
    """A run whose update has many is not taken for one that hangs."""
    seen = list[PhaseClock]()

    def progressed(clock: PhaseClock) -> None:
        seen.append(clock)

    monkeypatch.setattr(PhaseClock, "progress", progressed)
    plan = {"placement": "split", "micro_batch_tokens": SIZES.micro_batch_tokens}
    actor = LearnerActor(tiny.make_config(plan=plan))
    give_model(actor, monkeypatch)
    actor.prepare(SIZES)
    seen.clear()
    actor.update(tiny.make_rollouts([(20, 20)] * 8, advantages=[1.0, -1.0] * 4))
    assert len(seen) == 4  # two rows of 42 tokens each
