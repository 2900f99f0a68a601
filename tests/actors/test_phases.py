"""The phases that real actors report: a planted delay of a part is in its phase."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from actors.learner_actor import LearnerActor
from actors.sampler_actor import SamplerActor
from pipeline.clock import Heartbeat, PhaseClock
from pipeline.compute.decode.engine import Engine
from pipeline.compute.decode.programs import DecodePrograms
from pipeline.compute.decode.rollout_weights import RolloutWeights
from pipeline.compute.learner import learner as learner_module
from pipeline.compute.learner.batches import place_inputs
from pipeline.compute.learner.checkpoint import Checkpoints
from pipeline.compute.learner.learner import Learner
from pipeline.plan.sizes import Sizes
from tests import tiny
from tests.actors.test_learner_actor import trained, update
from tests.actors.test_sampler_actor import sample
from tests.actors.two_layers import give_model, opened
from tests.pipeline.compute.learner.test_sft import PACKED
from tests.run_process import FakeClock

DELAY_S = 5.0
SIZES = Sizes(4, 84)


@pytest.fixture
def now() -> FakeClock:
    return FakeClock()


@pytest.fixture
def delay(now: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str], None]:
    """Plants a delay before a method."""

    def plant(cls: type, name: str) -> None:
        method = getattr(cls, name)

        def delayed(*args: Any, **kwargs: Any) -> Any:
            now.seconds += DELAY_S
            return method(*args, **kwargs)

        monkeypatch.setattr(cls, name, delayed)

    return plant


@pytest.mark.parametrize(
    ("cls", "method", "phase"),
    [
        (RolloutWeights, "__init__", "loading"),
        (DecodePrograms, "compile", "compile"),
        (SamplerActor, "set_adapter", "sync"),
        (Engine, "_prefill", "prefill"),
        (Engine, "_collect_ended", "decode"),
    ],
)
def test_phases_of_a_sampler(now: FakeClock, delay, cls: type, method, phase):
    actor = SamplerActor(tiny.make_config(plan={"slots": 4, "slot_buckets": None}))
    actor.opening, actor.phases = opened(), PhaseClock(now)
    delay(cls, method)
    actor.prepare(SIZES)
    actor.load(1, actor.policy.fresh_adapter(0))
    sample(actor)
    use = actor.use()
    found = {name: seconds for name, seconds in use.seconds.items() if seconds}
    assert found.keys() == {phase}
    assert found[phase] % DELAY_S == 0
    assert use.memory is not None
    assert use.memory.in_use > 0
    assert actor.use().seconds == {}


@pytest.mark.parametrize(
    ("cls", "method", "phase"),
    [
        (Learner, "update", "update"),
        (Checkpoints, "save", "checkpoint"),
        (LearnerActor, "adapter_of", "sync"),
    ],
)
def test_phases_of_a_learner(tmp_path: Path, now: FakeClock, delay, cls: type, method, phase):
    actor = trained(tmp_path)
    actor.phases = PhaseClock(now)
    delay(cls, method)
    update(actor)
    actor.save({})
    actor.publish(which="current")
    found = {name: seconds for name, seconds in actor.use().seconds.items() if seconds}
    assert found == {phase: DELAY_S}


@pytest.mark.slow
def test_an_update_hangs_where_a_micro_batch_does_not_where_it_has_many(
    now: FakeClock, monkeypatch: pytest.MonkeyPatch
):
    """`faults.stuck_s` is 300 s; the heartbeats are those of the moment before a batch ends."""
    sft = {"train": {"path": "sft.jsonl"}, "steps": 2}
    plan = {"placement": "split", "micro_batch_tokens": SIZES.micro_batch_tokens}
    run = {"phases": ["sft", "grpo"]}
    actor = LearnerActor(tiny.make_config(plan=plan, run=run, sft=sft))
    give_model(actor, monkeypatch)
    actor.prepare(SIZES)
    actor.phases.now = now

    def beats(work: Callable[[], object], batch_s: float) -> list[Heartbeat]:
        found = list[Heartbeat]()

        def place_slowly(*args: Any) -> Any:
            now.seconds += batch_s
            found.append(actor.heartbeat())
            return place_inputs(*args)

        monkeypatch.setattr(learner_module, "place_inputs", place_slowly)
        work()
        return found

    rollouts = tiny.make_rollouts([(20, 20)] * 8, advantages=[1.0, -1.0] * 4)
    for work in (partial(actor.sft_update, PACKED), partial(actor.update, rollouts)):
        for batch_s, hangs in ((200.0, False), (301.0, True)):
            found = beats(work, batch_s)
            assert len(found) > 1
            assert {beat.phase for beat in found} == {"update"}
            assert {beat.unchanged_s > 300 for beat in found} == {hangs}
