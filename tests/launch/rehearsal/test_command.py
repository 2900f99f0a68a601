"""`launch.train --rehearse` without Ray: refused requests, endings, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from actors.colocated_actor import ColocatedActor
from actors.handles import RunActors
from configs.load import load_config
from configs.schema import Config
from launch import preparation, train
from launch.rehearsal import command as rehearsal
from pipeline.compute.model.sharding import make_mesh
from pipeline.contracts.adapters import AdapterRef, Published
from pipeline.contracts.memory import MemoryUse
from pipeline.contracts.rollouts import Completion, RolloutRequest
from pipeline.run.run_folder import RunFolder
from tests.fakes import Disk, FakeLearner, FakeSampler, FakeScorer, Script
from tests.launch.cluster_fixtures import PROJECT, write_config
from tests.launch.small_run import everything_below

DEMO = PROJECT / "launch" / "demo" / "tiny_gemma3"
SMALL = {
    "plan.placement": "colocated",
    "plan.slots": "8",
    "plan.slot_buckets": "[4]",
    "plan.row_tokens": "104",
    "plan.micro_batch_tokens": "104",
    "rollout.prompts_per_step": "2",
    "rollout.max_new_tokens": "40",
    "data.train.limit": "8",
}
MORE = {
    "rollout.partial": "keep",
    "rollout.cut_off": "0.5",
    "learner.importance_cap": "2.0",
    "learner.kl_coef": "0.1",
    "data.validation.path": "launch/demo/data/validation.jsonl",
    "data.validation.limit": "4",
    "eval.every_steps": "1",
}


class Scorer(FakeScorer):
    async def start(self) -> None:
        pass


class InProcess:
    """A colocated actor, called without Ray."""

    def __init__(self, actor: ColocatedActor) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **named: Any) -> Any:
            return getattr(self.actor, name)(*args, **named)

        return call

    async def publish(self, which: AdapterRef = "current") -> Published:
        (version, sha256), payload = self.actor.publish(which=which)
        return Published(version, sha256, payload)

    async def load(self, published: Published) -> str:
        payload: Any = published.payload
        return self.actor.load(published.version, published.sha256, payload)


class FakeProcess:
    async def memory(self) -> MemoryUse:
        return MemoryUse({})


class RememberingSampler(FakeSampler, FakeProcess):
    """A fake without memory use; `before_generate` runs before each of the rehearsal's calls."""

    before_generate: Callable[[], Awaitable[None]] | None = None

    async def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        temperature: float,
        min_finished: int | None = None,
    ) -> list[Completion]:
        if self.before_generate is not None and requests[0].name.phase == "rehearsal":
            await self.before_generate()
        return await super().generate(requests, temperature=temperature, min_finished=min_finished)


class RememberingLearner(FakeLearner, FakeProcess):
    """A fake without memory use."""


class FakeRunActors:
    """Stands in for `actors.handles.RunActors`."""

    devices = None

    def __init__(self, samplers: list[Any], learner: Any, scorer: Any, *, one: bool) -> None:
        self.samplers, self.learner, self.scorer, self.one_process = samplers, learner, scorer, one
        self.killed = False

    async def started(self) -> None:
        pass

    def kill(self) -> None:
        self.killed = True


def write_model(folder: Path) -> None:
    """A model of two layers without weights."""
    folder.mkdir()
    text = json.loads((DEMO / "config.json").read_text())
    text |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    (folder / "config.json").write_text(json.dumps(text))
    shutil.copyfile(DEMO / "tokenizer.model", folder / "tokenizer.model")


Command = Callable[..., int]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration whose model has no weights; no cluster is started."""

    @contextlib.contextmanager
    def no_cluster(_: object) -> Iterator[None]:
        yield

    async def no_wait(*_: object) -> None:
        pass

    monkeypatch.setattr(rehearsal, "cluster", no_cluster)
    monkeypatch.setattr(rehearsal, "wait_for_devices", no_wait)
    monkeypatch.setattr(preparation, "_check_rewards", lambda _: None)
    write_model(tmp_path / "model")
    return write_config(tmp_path, name="mine")


@pytest.fixture
def command(path: Path) -> Command:
    """Runs `launch.train --rehearse` and checks that it leaves nothing behind."""

    def run(*flags: str, **settings: str) -> int:
        given = {**SMALL, "model.path": str(path.parent / "model"), **settings}
        arguments = [f"--{key}={value}" for key, value in given.items()]
        before = everything_below(path.parent)
        try:
            return train.main([str(path), *arguments, "--rehearse", *flags])
        finally:
            assert everything_below(path.parent) - {"found.json"} == before
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    return run


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> RememberingSampler:
    """Replaces the run's actors with fakes; returns the sampler."""
    script = Script()
    sampler = RememberingSampler(script, seed=0, number=0)
    learner = RememberingLearner(script, disk=Disk())

    def spawn(config: Config) -> FakeRunActors:
        return FakeRunActors([sampler], learner, Scorer(script, config), one=False)

    monkeypatch.setattr(RunActors, "spawn", spawn)
    return sampler


def test_every_phase_works_with_random_weights_and_nothing_is_left(
    path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def one_device(**_: object) -> Any:
        return make_mesh(jax.devices()[:1])

    def spawn(config: Config) -> FakeRunActors:
        actor = ColocatedActor(config)
        worker = InProcess(actor)
        return FakeRunActors([worker], worker, Scorer(Script(), config), one=True)

    monkeypatch.setattr("pipeline.compute.opening.open_mesh", one_device)
    monkeypatch.setattr(RunActors, "spawn", spawn)
    # An existing run of that name, with other settings, does not matter.
    other = load_config(path)
    run = RunFolder.of(other)
    run.create(other)
    found = path.parent / "found.json"
    assert command("--random-weights", "--json", str(found), **MORE) == 0
    run.close()
    figures = json.loads(found.read_text())
    assert figures["works"] is True
    assert figures["random_weights"] is True
    phases = {phase["phase"]: phase for phase in figures["phases"]}
    drawn = ["prefill of 104", "prefill of 84", "prefill of 64", "decode", "decode in 4 slots"]
    for name in [*drawn, "score", "update"]:
        assert phases[name]["compiled_gib"] > 0
        assert phases[name]["planned_gib"] > 0
        assert phases[name]["measured_s"] > 0
    assert phases["update"]["compiled_gib"] > phases["score"]["compiled_gib"]
    assert phases["update"]["note"].startswith("8 x 1 rows of 104, 320 tokens")
    assert phases["decode"]["note"] == "8 rollouts in 8 slots, 40 tokens each"
    assert phases["restore"]["note"] == "version 1, the same adapter"
    shown = capsys.readouterr().out
    assert "everything fits and works with plan.slots = 8" in shown
    assert "writing 3" in shown
    assert "W&B" not in shown


def test_a_failed_phase_exits_with_1(
    command: Command, fakes: RememberingSampler, capsys: pytest.CaptureFixture[str]
):
    async def fail() -> None:
        raise RuntimeError("the chips are gone")

    fakes.before_generate = fail
    assert command("--random-weights") == 1
    shown = capsys.readouterr().out
    assert shown.endswith("FAILED: prefill of 64: the chips are gone\n")
    assert "first sync" in shown


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_rehearsal_in_order(
    command: Command, fakes: RememberingSampler, number: signal.Signals, status: int
):
    async def wait() -> None:
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()

    fakes.before_generate = wait
    assert command("--random-weights") == status


def test_sigterm_while_weights_are_written_leaves_nothing(
    command: Command, monkeypatch: pytest.MonkeyPatch
):
    def write(folder: Path, *_: object, **__: object) -> None:
        (folder / "half").touch()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(rehearsal, "write_random_weights", write)
    with pytest.raises(SystemExit) as ended:
        command("--random-weights")
    assert ended.value.code == 143


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ["--rehearse", "--dry-run"],
            "--dry-run: has no effect with --rehearse; remove one of them",
        ),
        (
            ["--rehearse", "--extend", "5"],
            "--extend: has no effect with --rehearse; remove one of them",
        ),
        (["--random-weights"], "--random-weights: needs --rehearse; add it, or remove this flag"),
        (["--json", "a.json"], "--json: needs --rehearse; add it, or remove this flag"),
    ],
)
def test_flags_without_effect_are_refused(
    path: Path, flags: list[str], line: str, capsys: pytest.CaptureFixture[str]
):
    assert train.main([str(path), *flags]) == 2
    assert capsys.readouterr().err == f"command line: {line}\n"


def refused(command: Command, capsys: pytest.CaptureFixture[str], *flags: str, **settings: str):
    """The error output of a refused rehearsal."""
    assert command(*flags, **settings) == 2
    return capsys.readouterr().err


def test_a_model_without_weights_is_refused_without_random_weights(
    command: Command, capsys: pytest.CaptureFixture[str]
):
    assert "lacks model.safetensors" in refused(command, capsys)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**6))
    shown = refused(command, capsys, "--random-weights")
    assert "a rehearsal temporarily writes 0.0 GiB there, and 0.0 are free" in shown


def test_mistakes_are_reported_before_random_weights_are_written(
    path: Path,
    command: Command,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    def never(*_: object, **__: object) -> None:
        pytest.fail("weights were written")

    def wrong(_: object) -> None:
        raise ValueError("rewards.functions: no such function")

    monkeypatch.setattr(rehearsal, "write_random_weights", never)
    gone = str(path.parent / "gone.jsonl")
    shown = refused(command, capsys, "--random-weights", **{"data.train.path": gone})
    assert f"no file {gone}" in shown
    monkeypatch.setattr(preparation, "_check_rewards", wrong)
    shown = refused(command, capsys, "--random-weights")
    assert shown == "rewards.functions: no such function\n"


def test_random_weights_need_a_tokenizer_and_a_shape(
    path: Path, command: Command, capsys: pytest.CaptureFixture[str]
):
    model = path.parent / "model"
    (model / "tokenizer.model").unlink()
    shown = refused(command, capsys, "--random-weights")
    assert f"{model} has no tokenizer, neither tokenizer.model nor tokenizer.json" in shown
    kaggle = {"model.path": "kaggle://google/gemma-3/flax/gemma3-1b-it"}
    shown = refused(command, capsys, "--random-weights", **kaggle)
    assert "provides its tokenizer only with the weights; set model.tokenizer" in shown
    (model / "config.json").unlink()
    shown = refused(command, capsys, "--random-weights")
    assert "has no config.json" in shown


def test_a_file_as_the_folder_of_runs_is_refused(
    path: Path, command: Command, capsys: pytest.CaptureFixture[str]
):
    shown = refused(command, capsys, "--random-weights", **{"run.dir": str(path)})
    assert shown == f'run.dir = "{path}": {path} is a file; choose another\n'


def test_the_json_file_must_be_writable(
    path: Path, command: Command, capsys: pytest.CaptureFixture[str]
):
    shown = refused(command, capsys, "--json", "/nowhere/at/all.json")
    assert shown == "command line: --json: no folder /nowhere/at\n"
    shown = refused(command, capsys, "--json", str(path.parent))
    assert shown == f"command line: --json: {path.parent} is a folder; name a file\n"
