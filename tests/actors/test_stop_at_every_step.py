"""A real learner and sampler, stopped at every step and killed during every save, end alike."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from actors.colocated_actor import ColocatedActor
from configs.schema import Config
from pipeline.compute.learner.checkpoint import Checkpoints
from pipeline.compute.opening import OpenedModel
from pipeline.data.text.tokenizer_files import read_tokenizer
from pipeline.plan.sizes import Sizes
from pipeline.run.run_folder import RunFolder
from pipeline.types import AdapterRef, ExportReport, Published
from tests import tiny
from tests.fakes import Disk, Killed, Process, left_behind
from tests.samples import make_data

DEMO = Path(__file__).parents[2] / "launch" / "demo" / "tiny_gemma3"
REWARD = "tests.launch.planted_rewards:checksum"
STEPS, PROMPTS, PER_STEP = 12, 8, 2
assert STEPS * PER_STEP == 3 * PROMPTS  # three epochs


def settings(folder: Path, *, keep: int = 1) -> Config:
    return tiny.make_config(
        run={"name": "run", "dir": str(folder), "seed": 5},
        data={"validation": {"path": "validation.jsonl"}},
        rewards={"functions": [{"name": "sum", "function": REWARD}]},
        rollout={"prompts_per_step": PER_STEP},
        learner={"updates_per_batch": 2},
        eval={"every_steps": 4, "metric": "reward"},
        budget={"steps": STEPS},
        checkpoint={"every_steps": 1, "keep": keep},
        wandb={"mode": "disabled"},
    )


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> ColocatedActor:
    """The process of all runs: compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.model_actor.find_model", lambda _: DEMO)
        patch.setattr("actors.model_actor.open_tokenizer", lambda _: SimpleNamespace(path=DEMO))
        config = settings(tmp_path_factory.mktemp("compiled"))
        found = ColocatedActor(config)
        model = tiny.policy(layers=2), tiny.base(layers=2), tiny.VOCABULARY, read_tokenizer(DEMO)
        found.opening = OpenedModel(*model, 0.0)  # type: ignore[assignment]
        found.prepare(Sizes.of(config))
        return found


class InProcess:
    """The actor without Ray.

    Attributes:
        before_update: called with the version before each update.
    """

    def __init__(self, actor: ColocatedActor) -> None:
        self.actor = actor
        self.before_update: Callable[[int], None] = lambda _: None

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        method = getattr(self.actor, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        return call

    def kill(self, why: str | None = None) -> None:
        raise NotImplementedError

    async def publish(self, which: AdapterRef = "current") -> Published:
        label, payload = self.actor.publish(which=which)
        return Published(*label, payload)

    async def load(self, published: Published) -> str:
        return self.actor.load(published.version, published.sha256, published.payload)

    async def update(self, *rollouts: Any, **scalars: Any) -> dict[str, float]:
        self.before_update(self.actor.learner.state.version)
        return self.actor.update(*rollouts, **scalars)

    async def export(self, folder: str, *_: Any, **__: Any) -> ExportReport:
        return ExportReport(folder, 0.0, 0, self.actor.learner.state.version)


class RealProcess(Process):
    """A process of a run with the actor in its initial state, or that of its checkpoint."""

    def __init__(self, config: Config, actor: ColocatedActor) -> None:
        actor.config, actor.learner.state = config, actor.learner._fresh()
        folder, keep = RunFolder.of(config).checkpoints, config.checkpoint.keep
        actor.checkpoints = Checkpoints(folder, keep=keep)
        self.actor, self.restored, disk = InProcess(actor), actor.restore(), Disk()
        if self.restored.meta is not None:
            disk[actor.learner.state.version] = ("", dict(self.restored.meta))
        super().__init__(config, disk=disk, data=make_data(train=PROMPTS, validation=3))

    def connect(self, **_: Any) -> None:
        super().connect(samplers=[self.actor], learner=self.actor, one_process=True)

    @property
    def result(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Records, adapter and optimizer state."""
        state = self.actor.actor.learner.state
        leaves = jax.tree.leaves((state.adapter, state.optimizer))
        return left_behind(self.folder), [np.array(leaf) for leaf in leaves]


def same(run: RealProcess, expected: tuple[dict[str, Any], list[np.ndarray]]) -> None:
    records, state = run.result
    assert records == expected[0]
    for one, other in zip(state, expected[1], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture(scope="module")
def undisturbed(
    actor: ColocatedActor, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[np.ndarray]]:
    run = RealProcess(settings(tmp_path_factory.mktemp("whole")), actor)
    assert run.run() == "finished"
    assert actor.learner.state.version == STEPS
    assert actor.learner.state.updates > STEPS  # two for each batch with a signal
    return run.result


@pytest.mark.slow
@pytest.mark.parametrize("step", range(STEPS))
def test_promise_3_a_real_run_stopped_at_any_step_is_the_same_run(
    tmp_path: Path, actor: ColocatedActor, undisturbed: Any, step: int
):
    config = settings(tmp_path)
    first = RealProcess(config, actor)

    def stop(version: int) -> None:
        if version == step:
            first.script.stop.set()

    first.actor.before_update = stop
    assert first.run() == "interrupted"
    second = RealProcess(config, actor)
    assert second.progress.step == step + 1
    second.run()
    same(second, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_promise_3_a_real_run_killed_during_any_save_is_the_same_run(
    tmp_path: Path,
    actor: ColocatedActor,
    undisturbed: Any,
    step: int,
    monkeypatch: pytest.MonkeyPatch,
):
    config = settings(tmp_path)
    first = RealProcess(config, actor)
    save, saved = Checkpoints.save, ColocatedActor.saved

    def stuck(self: Checkpoints, *args: Any) -> None:
        if args[0].version == step:  # the write of this checkpoint does not begin
            self.wait()
            self._writer.shutdown()
            monkeypatch.setattr(self, "_writer", SimpleNamespace(submit=lambda *_: PENDING))
        save(self, *args)

    def killed(self: ColocatedActor, *, wait: bool) -> float | None:
        if self.checkpoints._saving is PENDING and (wait or step == STEPS):
            raise Killed
        return saved(self, wait=wait)

    def kill(version: int) -> None:
        if version == step:
            raise Killed

    monkeypatch.setattr(Checkpoints, "save", stuck)
    monkeypatch.setattr(ColocatedActor, "saved", killed)
    first.actor.before_update = kill
    with pytest.raises(Killed):
        first.run()
    monkeypatch.undo()
    second = RealProcess(config, actor)
    assert second.progress.step == step - 1
    second.run()
    same(second, undisturbed)


PENDING: Any = SimpleNamespace(done=lambda: False, result=lambda: None)
"""A write that does not end."""
