"""`launch.train --rehearse`: one step at full length, refused requests, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.handles import RunActors
from configs.load import load_config
from configs.schema import Config
from launch import preparation, rehearsal, session, train
from launch.rehearsal import FullLengthWorker, full_length_data, one_step, temporary_folder
from pipeline.contracts.adapters import Restored
from pipeline.contracts.memory import MemoryUse, OutOfMemory
from pipeline.contracts.rollouts import NO_TEXT, Rollout, RolloutName, RolloutRequest
from pipeline.contracts.sizes import WorkerPhase
from pipeline.inputs.hub.hf_config import read_model_shape
from pipeline.inputs.hub.model_shape import shape_of
from pipeline.plan.cost_model.programs import depends_on, programs_of
from pipeline.rollout.workers import TrainingStopped
from pipeline.run.run_folder import RunFolder
from tests.fakes import (
    Disk,
    FakeLearner,
    FakeSampler,
    FakeScorer,
    Script,
    completion,
    make_config,
    make_data,
)
from tests.launch.cluster_fixtures import (
    PATIENCE_S,
    PROJECT,
    VALIDATED,
    private_environment,
    train_command,
    write_config,
)
from tests.launch.small_run import everything_below
from tests.pipeline.plan.presets import preset

pytestmark = pytest.mark.slow

DEMO = PROJECT / "launch" / "demo" / "tiny_gemma3"
SMALL = {
    "plan.placement": "colocated",
    "plan.slots": "8",
    "plan.row_tokens": "104",
    "plan.micro_batch_tokens": "104",
    "rollout.prompts_per_step": "2",
    "data.train.limit": "8",
}
FAKED = {
    # The fakes' completions have up to 68 tokens.
    "rollout.max_new_tokens": "80",
    "plan.placement": "split",
    "plan.row_tokens": "144",
    "plan.micro_batch_tokens": "288",
}


# --- configuration, data, workers


def test_the_configuration_is_of_one_step_with_the_programs_of_the_run(tmp_path: Path):
    config = make_config(
        tmp_path,
        run={"phases": ["sft", "grpo"]},
        sft={"train": {"path": "demonstrations.jsonl"}, "steps": 40, "warmup_steps": 10},
        learner={"schedule": "cosine", "warmup_steps": 5},
        budget={"steps": 100},
    )
    one = one_step(config)
    assert (one.budget.steps, one.sft_steps, one.decay_steps) == (2, 1, 60)
    shape = read_model_shape({"model_type": "gemma3_text"})
    for program in programs_of(config):
        assert depends_on(one, shape, program) == depends_on(config, shape, program)


def test_a_time_budget_keeps_its_seconds_for_measuring_sizes(tmp_path: Path):
    config = make_config(
        tmp_path,
        learner={"schedule": "linear", "warmup_steps": 5},
        rollout={"min_prompts_per_step": 1},
        plan={"fixed": False},
        budget={"time": "9h", "steps": None},
    )
    one = one_step(config)
    assert one.budget.steps == 1
    assert one.plan.calibration_share == pytest.approx(0.02 * 9)


def test_training_data_have_the_maximum_length_and_evaluations_are_short(tmp_path: Path):
    data = make_data(train=3, validation=20, test=20, sets=["other"], sft=2)
    config = make_config(tmp_path)
    found = full_length_data(data, config)
    first = found.train.prompts[0]
    assert (first.id, first.tokens.tolist()) == (1, [2, 51, 51, 51, 51, 51, 51, 51])
    assert found.sft is not None
    assert {len(one.prompt_tokens) for one in found.sft.demonstrations} == {8}
    assert {len(one.completion_tokens) for one in found.sft.demonstrations} == {80}
    assert found.test.prompts == data.test.prompts[:8]
    assert found.validation is not None
    assert len(found.validation.prompts) == 8
    assert not found.sets
    # A step has 4 rollouts: only an evaluation fills 24 slots.
    evaluation = {"samples": 2, "temperature": 1.0}
    slots = make_config(tmp_path, plan={"slots": 12, "samplers": 2}, eval=evaluation)
    assert len(full_length_data(data, slots).test.prompts) == 12


class WithMemory:
    """A process that reports a growing peak."""

    peak = 0

    async def memory(self) -> MemoryUse:
        self.peak += 1
        return MemoryUse({}, self.peak, 100)


class Sampler(WithMemory, FakeSampler):
    """A fake that keeps its requests."""

    def __init__(self, script: Script) -> None:
        super().__init__(script, seed=0, number=0)
        self.requests: list[RolloutRequest] = []

    async def generate(self, requests: Sequence[RolloutRequest], **settings: Any) -> list[Any]:
        self.requests += requests
        return await super().generate(requests, **settings)


class Learner(WithMemory, FakeLearner):
    def __init__(self, script: Script) -> None:
        super().__init__(script, disk=Disk())


def request(phase: str) -> RolloutRequest:
    return RolloutRequest(RolloutName(phase, 0, 1, 0), np.array([2, 51], np.int32))


def test_rollouts_are_held_and_the_longest_prefill_is_run(tmp_path: Path):
    sampler = Sampler(Script())
    sampler.adapter = "0" * 64
    rollout = {"partial": "keep", "cut_off": 0.5}
    config = make_config(tmp_path, rollout=rollout, learner={"importance_cap": 2.0})
    worker = FullLengthWorker(sampler, config)
    for phase in ("probe", "test", "train"):
        asyncio.run(worker.generate([request(phase)], temperature=1.0, min_finished=1))
    *held, continuing, last = sampler.requests
    assert all(one.hold for one in [*held, last])
    assert (len(continuing.prefill_tokens), continuing.num_partial) == (2 + 79, 79)
    assert worker.observed.peaks == {"evaluation": 1, "sampling": 2}


def test_an_update_gets_full_rollouts_of_which_the_real_tokens_are_compared(tmp_path: Path):
    learner = Learner(Script())
    short = completion(request("train"), "ab")
    rollouts = [Rollout(short, NO_TEXT, {}, reward, 0.0) for reward in (None, 1.0)]
    asyncio.run(FullLengthWorker(learner, make_config(tmp_path)).update(rollouts))
    first, second = learner.seen
    assert (first.advantage, second.advantage) == (1.0, -1.0)
    assert (first.reward, second.reward) == (0.0, 1.0)
    full = first.completion
    assert len(full.tokens) == len(full.logprobs) == 80
    assert full.tokens[:6].tolist() == [*short.tokens, *short.tokens]
    assert full.versions.tolist() == [0] * 3 + [-1] * 77
    np.testing.assert_array_equal(full.logprobs[:3], short.logprobs)


@pytest.mark.parametrize("damaged", [True, False])
def test_another_state_after_the_restore_stops_the_run(tmp_path: Path, damaged: bool):
    learner = Learner(Script())
    worker = FullLengthWorker(learner, make_config(tmp_path))
    asyncio.run(worker.save({"step": 0}))
    assert worker.observed.seconds.keys() == {"checkpoint", "restore"}

    async def restore() -> Restored:
        learner.adapter = "0" * 64
        return Restored({"step": 0}, ("checkpoint 0 is damaged",) if damaged else ())

    learner.restore = restore  # type: ignore[method-assign]
    with pytest.raises(TrainingStopped, match="is damaged" if damaged else "step 0, 000000000000"):
        asyncio.run(worker.save({"step": 0}))


# --- the temporary folder


def test_leftovers_of_a_killed_rehearsal_are_deleted_and_the_run_is_not(tmp_path: Path):
    config = make_config(tmp_path)
    run = RunFolder.of(config)
    run.create(config)
    before = everything_below(tmp_path)
    left = tmp_path / ".rehearsal-run"
    left.mkdir()
    (left / ".lock").touch()
    for name in ("model/weights", "mine/config.json", "note"):
        (left / name).parent.mkdir(exist_ok=True)
        (left / name).touch()
    with temporary_folder(config) as folder:
        assert [path.name for path in folder.iterdir()] == [".lock"]
    run.close()
    assert everything_below(tmp_path) == before


def test_two_rehearsals_at_once_are_refused(tmp_path: Path):
    config = make_config(tmp_path)
    with temporary_folder(config) as folder:
        (folder / "note").touch()
        again = temporary_folder(config)
        with pytest.raises(ValueError, match="another process is using"), again:
            pass
        assert (folder / "note").is_file()


# --- the command


@dataclass(frozen=True)
class FakeRunActors:
    """Stands in for `actors.handles.RunActors`."""

    samplers: list[Any]
    learner: Any
    scorer: Any
    one_process: bool = False
    devices: Any = None

    async def started(self) -> None:
        pass

    def kill(self) -> None:
        pass


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
    def no_cluster(_: object, *, tpu_chips: int | None) -> Iterator[None]:
        yield

    async def no_wait(*_: object) -> None:
        pass

    monkeypatch.setattr(session, "cluster", no_cluster)
    monkeypatch.setattr(session, "wait_for_devices", no_wait)
    monkeypatch.setattr(preparation, "check", lambda _: [])
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

    return run


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Replaces the run's actors with fakes; returns the script of their calls."""
    script = Script()

    def spawn(config: Config) -> FakeRunActors:
        return FakeRunActors([Sampler(script)], Learner(script), FakeScorer(script, config))

    monkeypatch.setattr(RunActors, "spawn", spawn)
    return script


@pytest.mark.ray
@pytest.mark.timeout(PATIENCE_S)
def test_a_step_works_with_random_weights_and_nothing_is_left(tmp_path: Path):
    write_model(tmp_path / "model")
    path, found = write_config(tmp_path, name="mine"), tmp_path / "found.json"
    # An existing run of that name, with other settings, does not matter.
    other = load_config(path)
    with contextlib.closing(RunFolder.of(other)) as run:
        run.create(other)
        before = everything_below(tmp_path)
        settings = {
            **SMALL,
            "model.path": str(tmp_path / "model"),
            "rollout.partial": "keep",
            "rollout.cut_off": "0.5",
            "learner.importance_cap": "2.0",
            "learner.kl_coef": "0.1",
        }
        arguments = [*(f"--{key}={value}" for key, value in settings.items()), *VALIDATED]
        ended = subprocess.run(
            train_command(path, *arguments, "--rehearse", "--random-weights", "--json", str(found)),
            cwd=PROJECT,
            env=private_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert everything_below(tmp_path) - {"found.json"} == before
    figures = json.loads(found.read_text())
    assert (figures["works"], figures["random_weights"]) == (True, True)
    phases = {phase["phase"]: phase for phase in figures["phases"]}
    assert list(phases) == [
        *("start", "evaluation", "validation", "sampling", "rewards", "update", "sync"),
        *("checkpoint", "restore", "export"),
    ]
    for name in ("sampling", "update"):
        assert phases[name]["compiled_gib"] > 0
        assert phases[name]["planned_gib"] > 0
    assert all(phase["measured_s"] > 0 for phase in phases.values())
    assert "writing 3" in ended.stdout
    *_, last = ended.stdout.splitlines()
    assert last.startswith("everything fits and works with plan.slots = 8")
    assert "W&B" not in ended.stdout
    assert "finished" not in ended.stdout


def test_a_failed_phase_exits_with_1_and_shows_the_others(
    command: Command, script: Script, capsys: pytest.CaptureFixture[str]
):
    def fail() -> None:
        raise RuntimeError("the chips are gone")

    script.on["learner.export 2"] = fail
    sft = {
        "run.phases": '["sft", "grpo"]',
        "budget.steps": "200",
        "sft.train.path": "launch/demo/data/demonstrations.jsonl",
        "sft.train.limit": "8",
        "sft.sequences_per_step": "2",
    }
    assert command("--random-weights", **FAKED, **sft) == 1
    shown = capsys.readouterr().out
    assert shown.endswith("FAILED: RuntimeError: the chips are gone\n")
    assert "\nSFT update" in shown
    assert "\nrestore" in shown
    assert "\nexport" not in shown.partition("rehearsal of")[2]
    assert "the same command continues" not in shown


CALLS: dict[str, WorkerPhase] = {
    "sampler0.generate:train 0": "generate",
    "learner.update 0": "update",
    "learner.export 1": "export",
}


@pytest.mark.parametrize("call", CALLS)
def test_out_of_memory_reduces_sizes_or_names_the_smaller_ones_if_they_are_fixed(
    command: Command, script: Script, capsys: pytest.CaptureFixture[str], call: str
):
    def run_out() -> None:
        raise OutOfMemory(CALLS[call], "RESOURCE_EXHAUSTED: so many bytes")

    script.on[call] = run_out
    open_sizes = {"plan.fixed": "false", "plan.calibration_share": "0"}
    assert command("--random-weights", **FAKED, **open_sizes) == 0
    assert script.calls.count(call) == 2
    fewer = "slots = 6" if CALLS[call] == "generate" else "micro_batch_tokens = 144"
    shown = capsys.readouterr().out
    assert "out of memory while" in shown
    assert "memory ran out: continued with plan." in shown
    assert fewer in shown.splitlines()[-1]
    script.on[call] = run_out
    assert command("--random-weights", **FAKED) == 1
    shown = capsys.readouterr().out.splitlines()[-1]
    assert "RESOURCE_EXHAUSTED: so many bytes; plan.fixed = true" in shown
    assert f"--plan.fixed false continues with plan.{fewer}" in shown


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_rehearsal_in_order(
    command: Command,
    script: Script,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    status: int,
):
    script.on["sampler0.generate:test 0"] = lambda: os.kill(os.getpid(), number)
    assert command("--random-weights", **FAKED) == status
    shown = capsys.readouterr().out
    assert "stopping; Ctrl-C again does not wait" in shown
    assert "rehearsal of" not in shown


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
        ("--rehearse --dry-run", "--dry-run: has no effect with --rehearse; remove one of them"),
        ("--rehearse --extend 5", "--extend: has no effect with --rehearse; remove one of them"),
        (
            "--rehearse --accept rewards",
            "--accept: has no effect with --rehearse; remove one of them",
        ),
        ("--random-weights", "--random-weights: needs --rehearse; add it, or remove this flag"),
        ("--json a.json", "--json: needs --rehearse; add it, or remove this flag"),
    ],
)
def test_flags_without_effect_are_refused(
    path: Path, flags: str, line: str, capsys: pytest.CaptureFixture[str]
):
    assert train.main([str(path), *flags.split()]) == 2
    assert capsys.readouterr().err == f"command line: {line}\n"


def refused(command: Command, capsys: pytest.CaptureFixture[str], *flags: str, **settings: str):
    """The error output of a refused rehearsal."""
    assert command(*flags, **settings) == 2
    return capsys.readouterr().err


def test_requests_are_refused_before_anything_is_written(
    path: Path,
    command: Command,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    def never(*_: object, **__: object) -> None:
        pytest.fail("weights were written")

    monkeypatch.setattr(rehearsal, "write_random_weights", never)
    model = path.parent / "model"
    assert "lacks model.safetensors" in refused(command, capsys)
    gone = {"data.train.path": str(path.parent / "gone.jsonl")}
    assert "no file " in refused(command, capsys, "--random-weights", **gone)
    shown = refused(command, capsys, "--random-weights", **{"run.dir": str(path)})
    assert shown == f'run.dir = "{path}": {path} is a file; choose another\n'
    shown = refused(command, capsys, "--json", "/nowhere/at/all.json")
    assert shown == "command line: --json: no folder /nowhere/at\n"
    kaggle = {"model.path": "kaggle://google/gemma-3/flax/gemma3-1b-it"}
    shown = refused(command, capsys, "--random-weights", **kaggle)
    assert "provides its tokenizer only with the weights; set model.tokenizer" in shown
    (model / "tokenizer.model").unlink()
    shown = refused(command, capsys, "--random-weights")
    assert f"no tokenizer at {model}: it has neither tokenizer.model nor tokenizer.json" in shown
    (model / "config.json").unlink()
    assert "has no config.json" in refused(command, capsys, "--random-weights")


def test_a_disk_that_is_too_small_is_refused(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**6))
    shown = refused(command, capsys, "--random-weights")
    assert "a rehearsal temporarily writes 0.0 GiB there, and 0.0 are free" in shown


@pytest.mark.parametrize("weights", [False, True])
def test_a_rehearsal_needs_the_disk_of_one_checkpoint_and_an_export(
    monkeypatch: pytest.MonkeyPatch, *, weights: bool
):
    config = preset("gemma3_1b")
    shape = shape_of(config)
    # The checkpoint has the adapter and two moments; the best version and the export have it, too.
    needed = 5 * 4 * shape.adapter_parameters(config.lora)
    needed += (2 + 2 * weights) * shape.parameters
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    rehearsal._check_disk(config, shape, weights=weights)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(ValueError, match="a rehearsal temporarily writes"):
        rehearsal._check_disk(config, shape, weights=weights)
