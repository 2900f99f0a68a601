"""Fake samplers, learner and scorer for the coordinator, without Ray or JAX.

Results are a function of names, adapter and seed. An adapter is a hash of all training data so far:
two runs end with equal adapters only if they trained on equal rollouts in equal order.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from configs.schema import Config
from pipeline.budget import Budget, used_s
from pipeline.clock import Clock, Heartbeat, PhaseClock
from pipeline.compute.builds import Building, Ready
from pipeline.coordinator import Coordinator
from pipeline.data.packed_batch import PackedRow
from pipeline.data.splits import LoadedData
from pipeline.data.text.prompts import PromptMaker
from pipeline.deadline import Deadline
from pipeline.plan.search.fitting import first_sizes
from pipeline.plan.sizes import Sizes
from pipeline.progress import Progress
from pipeline.protocols import Learner, ProcessUse, Sampler, SamplerTimes
from pipeline.rollout.workers import Workers
from pipeline.run.console import Console
from pipeline.run.meter import Hardware, RunMeter
from pipeline.run.records import Records
from pipeline.run.run_folder import RunFolder
from pipeline.run.tracking import Tracker
from pipeline.types import (
    AdapterRef,
    Completion,
    DecodeWork,
    ExportReport,
    OpenedAdapter,
    Published,
    Restored,
    Rollout,
    RolloutRequest,
    Segment,
)
from rewards.base import Outcome, RewardFacts, RewardInput
from rewards.forms import recognise
from rewards.resolve import resolve
from tests.samples import (
    EOS,
    FRESH,
    PROBE,
    PROMPTS,
    CharTokenizer,
    changed,
    logprobs,
    make_data,
)

TIMINGS = frozenset({"time", "tokens", "goodput", "speed", "cost", "hbm", "budget", "mirror"})
"""Groups of metrics of time and machine, in which a run and the same run with a resume differ."""


class FakeClock:
    """A clock whose time is set by the test."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Killed(BaseException):
    """Simulates `kill -9`: no later code of the run is executed."""


def kill() -> None:
    """Kills the run; an action of a `Script`."""
    raise Killed


@dataclass
class Script:
    """Records the calls of the workers in order, and runs actions at chosen calls.

    Attributes:
        clock: each call advances it by its duration.
        durations: seconds of a call, by the first word of its name.
        calls: names of the calls.
        on: actions by name or index of the call; each runs once.
        stop: the coordinator's stop event.
    """

    clock: FakeClock = field(default_factory=FakeClock)
    durations: Mapping[str, float] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    on: dict[str | int, Callable[[], None]] = field(default_factory=dict)
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, name: str) -> None:
        """Records a call, advances the clock and runs the call's actions."""
        self.clock.seconds += self.durations.get(name.split(maxsplit=1)[0], 0.0)
        self.calls.append(name)
        for key in (name, len(self.calls) - 1):
            if key in self.on:
                self.on.pop(key)()


class Prepares:
    """Records the sizes passed to `prepare`; they have no effect.

    Attributes:
        sizes: the recorded sizes, in order.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.sizes: list[Sizes] = []
        self.phases = PhaseClock(script.clock)

    async def prepare(self, sizes: Sizes) -> Ready:
        self.sizes.append(sizes)
        return Ready()

    async def building(self) -> Building:
        return Building()

    async def heartbeat(self) -> Heartbeat:
        return self.phases.heartbeat()

    async def use(self) -> ProcessUse:
        return ProcessUse(self.phases.take())

    async def start_trace(self, folder: str) -> None:
        self.traced = Path(folder)

    async def stop_trace(self) -> None:
        self.traced.mkdir(parents=True)

    def note(self, phase: str, name: str) -> None:
        """Notes a call, which is a phase of the process."""
        with self.phases.during(phase):
            self.script.note(name)


class FakeSampler(Prepares):
    """Samples well-formed answers, correct or wrong, some without a stop token.

    Attributes:
        skill: share of the prompts, from the first, that a version answers correctly; None: each
            answer is correct with probability 1/2.
    """

    def __init__(self, script: Script, *, seed: int, number: int) -> None:
        super().__init__(script)
        self.name = f"sampler{number}"
        self.adapter, self.version = "", -2
        self.seed = seed
        self.aborted = asyncio.Event()
        self.done = DecodeWork()
        self.skill: Callable[[int], float] | None = None

    async def load(self, published: Published) -> str:
        self.note("sync", f"{self.name}.load {published.version}")
        self.adapter, self.version = str(published.payload), published.version
        return self.adapter

    async def generate(
        self,
        requests: Sequence[RolloutRequest],
        *,
        temperature: float,
        min_finished: int | None = None,
    ) -> list[Completion]:
        first = requests[-1].name  # the oldest requests come first
        self.note("decode", f"{self.name}.generate:{first.phase} {first.step}")
        if self.script.stop.is_set():
            await self.aborted.wait()
            raise RuntimeError("aborted")
        drawn = [self.draw(request, temperature) for request in requests]
        lengths = [completion.num_new for completion in drawn]
        rows = len(lengths) * max(lengths)
        self.done = DecodeWork({len(lengths): 1}, slot_steps=rows, tokens=sum(lengths))
        if min_finished is None:
            return drawn
        # All are decoded in parallel: the shortest end first.
        order = sorted(drawn, key=lambda completion: (completion.num_new, completion.name))
        ended = {completion.name for completion in order[:min_finished]}
        steps = order[min_finished - 1].num_new
        return [one if one.name in ended else truncated(one, steps) for one in drawn]

    def draw(self, request: RolloutRequest, temperature: float) -> Completion:
        key = request.name.key(self.seed)
        rng = np.random.default_rng([*key, int(self.adapter[:8], 16), int(1000 * temperature)])
        wrong = bool(rng.integers(2))
        if self.skill is not None:
            wrong = request.name.prompt_id > round(PROMPTS * self.skill(self.version))
        answer = 2 * request.name.prompt_id + int(wrong)
        text = f"<reasoning>{rng.integers(10**6)}</reasoning><answer>{answer}</answer>"
        ended = rng.random() < 0.8
        tokens = np.array([ord(c) for c in text] + [EOS] * ended, np.int32)
        drawn = Completion(
            name=request.name,
            prompt_tokens=request.prompt_tokens,
            segments=(Segment(tokens, logprobs(tokens, self.adapter), self.version, self.adapter),),
            stop_reason="eos" if ended else "length",
        )
        return drawn if request.partial is None else continued(request.partial, drawn)

    async def finished(self) -> list[Completion]:
        return []

    async def work(self) -> DecodeWork:
        return self.done

    async def abort(self) -> None:
        self.script.note(f"{self.name}.abort")
        self.aborted.set()

    async def resume(self) -> None:
        self.script.note(f"{self.name}.resume")
        self.aborted.clear()

    async def open_adapter(self, path: str | None) -> OpenedAdapter:
        raise NotImplementedError

    async def sampler_times(self) -> SamplerTimes:
        raise NotImplementedError


def continued(partial: Completion, drawn: Completion) -> Completion:
    """`partial`, continued with the newly sampled tokens, at least a stop token."""
    size = len(partial.tokens)
    tokens = drawn.tokens[size:] if len(drawn.tokens) > size else np.array([EOS], np.int32)
    now = changed(drawn, tokens=tokens, logprobs=logprobs(tokens, drawn.adapter_sha256))
    earlier = (segment for segment in partial.segments if len(segment.tokens))
    return replace(
        now,
        segments=(*earlier, *now.segments),
        stop_reason="eos" if tokens[-1] == EOS else "length",
    )


def truncated(drawn: Completion, new: int) -> Completion:
    """Keeps the first `new` newly sampled tokens, and always drops the last one."""
    last, size = drawn.segments[-1], min(new, drawn.num_new - 1)
    cut = changed(drawn, tokens=last.tokens[:size], logprobs=last.logprobs[:size])
    return replace(cut, stop_reason="truncated")


class Disk(dict[int, tuple[str, dict[str, Any]]]):
    """Checkpoints: the adapter and the coordinator's state, by version.

    Attributes:
        best: version and adapter of the best validation.
        previous: the adapter of the previous version, by version.
    """

    best: tuple[int, str] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.previous: dict[int, str] = {}


class FakeLearner(Prepares):
    """Continues from the newest checkpoint on `disk`.

    Attributes:
        metrics: override the metrics of each update.
        score_error: added to the scored log-probs.
        slow_saves: whether a checkpoint is complete only when it is waited for.
        rates: `rate` of each update.
    """

    def __init__(self, script: Script, *, disk: Disk) -> None:
        super().__init__(script)
        self.disk = disk
        self.version = max(disk, default=0)
        self.adapter = disk[self.version][0] if disk else FRESH
        self.previous = disk.previous.get(self.version, FRESH)
        self.metrics: dict[str, float] = {}
        self.score_error = 0.0
        self.slow_saves = False
        self.seen: list[Rollout] = []
        self.exported: list[Completion] = []
        self.rates: list[float | None] = []
        self.writing: list[Callable[[], None]] = []
        self.saving_s = 0.0

    def write(self) -> None:
        """Ends the writing of a checkpoint and of the best adapter."""
        for write in self.writing:
            write()
        self.writing.clear()

    async def micro_batch_s(self) -> float:
        raise NotImplementedError

    async def restore(self) -> Restored:
        return Restored(self.disk[self.version][1] if self.disk else None, where="nowhere")

    async def publish(self, which: AdapterRef = "current") -> Published:
        version, adapter = self.named(which)
        self.note("sync", f"learner.publish {which if which == 'probe' else version}")
        return Published(version, adapter, adapter)

    def named(self, which: AdapterRef) -> tuple[int, str]:
        """Version and adapter of a reference."""
        if which == "best":
            self.write()
            assert self.disk.best is not None
            return self.disk.best
        if which == "previous":
            return self.version - 1, self.previous
        if which == "initial":
            return 0, FRESH
        return (-1, PROBE) if which == "probe" else (self.version, self.adapter)

    async def score(
        self, completions: Sequence[Completion], *, which: AdapterRef
    ) -> list[np.ndarray]:
        self.note("score", "learner.score probe" if which == "probe" else "learner.score")
        _, adapter = self.named(which)
        return [logprobs(drawn.tokens, adapter) + self.score_error for drawn in completions]

    async def sft_update(self, sequences: Sequence[PackedRow]) -> dict[str, float]:
        self.note("update", f"learner.sft_update {self.version}")
        digest = hashlib.sha256(self.adapter.encode())
        for example in (example for packed in sequences for example in packed):
            digest.update(f"{example.id}".encode())
        self.adapter, self.version = digest.hexdigest(), self.version + 1
        learned = sum(len(e.completion_tokens) for packed in sequences for e in packed)
        return {"loss": 1.0, "grad_norm": 1.0, "lr": 1.0, **_tokens(learned)}

    async def keep_best(self) -> None:
        self.note("checkpoint", f"learner.keep_best {self.version}")
        best = (self.version, self.adapter)
        self.writing.append(lambda: setattr(self.disk, "best", best))
        if len(self.writing) == 1:  # no checkpoint is being written
            self.write()

    async def recover_best(self, version: int, sha256: str) -> None:
        self.write()
        if self.disk.best != (version, sha256):
            assert self.disk[version][0] == sha256
            self.disk.best = (version, sha256)

    async def update(
        self, rollouts: Sequence[Rollout], *, rate: float | None = None
    ) -> dict[str, float]:
        self.note("update", f"learner.update {self.version}")
        await asyncio.sleep(0)  # concurrent tasks start
        shas = {
            (rollout.completion.version, rollout.completion.adapter_sha256) for rollout in rollouts
        }
        assert {sha for version, sha in shas if version >= self.version} <= {self.adapter}
        self.seen = list(rollouts)
        self.rates.append(rate)
        digest = hashlib.sha256(f"{self.adapter}{rate or ''}".encode())
        for rollout in rollouts:
            drawn = rollout.completion
            digest.update(f"{drawn.name} {drawn.tokens.tolist()} {rollout.advantage}".encode())
            if len(drawn.segments) > 1:
                digest.update(f"{drawn.logprobs.tolist()} {drawn.versions.tolist()}".encode())
        self.previous = self.adapter
        self.adapter, self.version = digest.hexdigest(), self.version + 1
        learned = sum(len(r.completion.tokens) for r in rollouts if r.reward is not None)
        metrics = {"loss": int(self.adapter[:4], 16) / 2**16, **_tokens(learned)}
        return {**metrics, "mismatch_mean": 0.0, "mismatch_p999": 0.0, **self.metrics}

    async def save(self, meta: Mapping[str, Any]) -> None:
        self.write()
        began = self.script.clock()
        self.note("checkpoint", f"learner.save {self.version}")
        saved = self.version, (self.adapter, dict(meta)), self.previous

        def write() -> None:
            version, checkpoint, previous = saved
            self.disk.setdefault(version, checkpoint)
            self.disk.previous.setdefault(version, previous)

        self.writing.append(write)
        if not self.slow_saves:
            self.write()
        self.saving_s = self.script.clock() - began

    async def saved(self, *, wait: bool) -> float | None:
        if self.slow_saves and not wait:
            return None
        self.write()
        return self.saving_s

    async def export(
        self, folder: str, examples: Sequence[Completion], *, which: AdapterRef
    ) -> ExportReport:
        version, adapter = self.named(which)
        self.note("export", f"learner.export {version}")
        self.exported = list(examples)
        _write_export(Path(folder), f"{version} {adapter}")
        tokens = sum(len(drawn.tokens) for drawn in examples)
        return ExportReport(folder, 0.0, tokens, version)


def _write_export(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter").write_text(text)


def _tokens(learned: int) -> dict[str, float]:
    """Token metrics with as many padding positions as trained tokens."""
    return {
        "tokens_trained": float(learned),
        "tokens_padded": float(learned),
        "positions": 2.0 * learned,
        "padded_share": 0.5,
    }


class FakeScorer:
    """Calls the configured reward functions in this process."""

    def __init__(self, script: Script, config: Config) -> None:
        self.script = script
        self.forms = {
            part.name: recognise(resolve(part.function), part.args)
            for part in config.rewards.functions
        }

    async def score(self, inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        self.script.note("scorer.score")
        if self.script.stop.is_set():
            await asyncio.Event().wait()
        parts = {
            name: [outcome for _, outcome, _ in form.score(inputs)]
            for name, form in self.forms.items()
        }
        return [{name: parts[name][row] for name in parts} for row in range(len(inputs))]

    async def start(self) -> list[RewardFacts]:
        self.script.note("scorer.start")
        return []

    async def heartbeat(self) -> Heartbeat:
        return Heartbeat()

    async def notices(self) -> list[str]:
        return []

    async def busy_s(self) -> dict[str, float]:
        return dict.fromkeys(self.forms, 0.0)


def make_meter(folder: RunFolder, now: Callable[[], float]) -> RunMeter:
    """A meter on an injected clock."""
    return RunMeter(folder, Hardware({"learner": 1, "samplers": 1}, 2), PhaseClock(now))


class FakeTracker(Tracker):
    """A tracker that records its arguments."""

    def __init__(self, run_id: str | None = None) -> None:
        super().__init__("disabled", run_id=run_id)
        self.before: list[Mapping[str, Any]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.alerts: list[tuple[str, str]] = []
        self.summary: dict[str, Any] = {}
        self.exit_status: int | None = None

    def start(self, *_: Any, rows: Sequence[Mapping[str, Any]], **__: Any) -> None:
        self.before = list(rows)

    def log(self, metrics: Mapping[str, Any], *, step: int, rollouts: str | None = None) -> None:  # noqa: ARG002
        self.logged.append((step, dict(metrics)))

    def log_evaluation(self, name: str, metrics: Mapping[str, Any], **at: int) -> None:  # noqa: ARG002
        self.logged.append((at["step"], dict(metrics)))

    def alert(self, title: str, text: str, *, level: str) -> None:  # noqa: ARG002
        self.alerts.append((level, title))

    def summarize(self, summary: Mapping[str, Any]) -> None:
        self.summary = dict(summary)

    async def finish(self, *, exit_status: int) -> None:
        self.exit_status = exit_status


class Process:
    """One process of a run: restores, rewinds and runs the coordinator like `launch.session`.

    Args:
        config: of the run.
        disk: the run's checkpoints.
        data: the run's prompts.
        script: actions and durations of the workers' calls.
    """

    def __init__(
        self,
        config: Config,
        *,
        disk: Disk,
        data: LoadedData | None = None,
        script: Script | None = None,
    ) -> None:
        self.script = script or Script()
        self.folder, self.disk = RunFolder.of(config), disk
        self.tracker = FakeTracker()
        self.learner = FakeLearner(self.script, disk=disk)
        self.samplers = [
            FakeSampler(self.script, seed=config.run.seed, number=number)
            for number in range(config.plan.num_samplers)
        ]
        self.scorer = FakeScorer(self.script, config)
        self.sizes = first_sizes(config, self.folder.plan)
        self.records = Records(self.folder, self.tracker, Console())
        restored = disk[self.learner.version][1] if disk else None
        progress = Progress.of_meta(restored) if restored else Progress()
        self.folder.create(config)
        self.clock = Clock(
            started=self.script.clock(), used_before_s=used_s(self.folder), now=self.script.clock
        )
        budget = Budget.of(config, self.folder)
        self.deadline = Deadline(config, budget.steps, budget.time_s)
        self.folder.rewind_to(progress.step)
        self.meter = make_meter(self.folder, self.script.clock)
        self.resumed_from = progress.step if restored else None
        self.progress, self.config, self.data = progress, config, data or make_data()
        self.connect()

    def connect(
        self,
        *,
        samplers: Sequence[Sampler] | None = None,
        learner: Learner | None = None,
        one_process: bool = False,
    ) -> None:
        """Makes the coordinator and its workers, of the fakes or of others."""
        self.deadline.restart_s = self.clock.elapsed_s - self.clock.used_before_s
        self.workers = Workers(
            samplers=samplers or self.samplers,
            learner=learner or self.learner,
            scorer=self.scorer,
            sizes=self.sizes,
            config=self.config,
            clock=self.clock,
            stop=self.script.stop,
            one_process=one_process,
        )
        self.coordinator = Coordinator(
            self.config,
            data=self.data,
            maker=PromptMaker(self.config.prompt, CharTokenizer()),
            workers=self.workers,
            records=self.records,
            meter=self.meter,
            deadline=self.deadline,
            clock=self.clock,
            progress=self.progress,
            resumed_from=self.resumed_from,
        )

    def run(self) -> Literal["finished", "interrupted"]:
        """Runs the coordinator until the run ends or is killed."""
        try:
            return asyncio.run(self.coordinator.run())
        finally:
            self.folder.close()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Journal entries of one kind, without time and kind."""
        return [
            {key: value for key, value in entry.items() if key not in {"time", "event"}}
            for entry in self.folder.events(kind)
        ]


def validated(folder: RunFolder) -> list[int]:
    """Steps with a valid validation result, ascending."""
    entries = folder.valid_entries("evaluated")
    return sorted({entry["step"] for entry in entries if entry["name"] == "validation"})


def left_behind(folder: RunFolder) -> dict[str, Any]:
    """The parts of a run's folder that a resume must not change."""
    summary = {
        key: value
        for key, value in (folder.summary or {}).items()
        if key not in {"wall_s", "resumed_from", "time", "goodput", "speed", "cost"}
    }
    if summary:
        summary["faults"] = {**summary["faults"], "restarts": 0}
    metrics = [
        {key: value for key, value in row.items() if key.partition("/")[0] not in TIMINGS}
        | {"faults/restarts": 0.0}
        for row in folder.metrics
    ]
    rollouts = {
        path.name: path.read_bytes()
        for path in folder.rollouts.iterdir()
        if ".superseded" not in path.suffixes
    }
    return {"summary": summary, "metrics": metrics, "rollouts": rollouts}
