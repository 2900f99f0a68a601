"""One process of a run without Ray: the coordinator with its folder, clock and records.

The workers are given: the real actor of `tests.real_actor`, or those of `tests.stub_workers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from configs.schema import Config
from pipeline.budget import Budget, used_s
from pipeline.clock import Clock, Heartbeat, PhaseClock
from pipeline.coordinator import Coordinator
from pipeline.data.splits import LoadedData
from pipeline.data.text.prompts import PromptMaker
from pipeline.deadline import Deadline
from pipeline.plan.search.fitting import first_sizes
from pipeline.progress import Progress
from pipeline.protocols import Learner, Sampler
from pipeline.rollout.workers import Workers
from pipeline.run.console import Console
from pipeline.run.meter import Hardware, RunMeter
from pipeline.run.records import Records
from pipeline.run.run_folder import RunFolder
from pipeline.run.tracking import Tracker
from pipeline.run_context import RunContext
from rewards.base import Outcome, RewardFacts, RewardInput
from rewards.forms import recognise
from rewards.resolve import resolve
from tests.samples import CharTokenizer, make_data

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
        """Records a call and runs its actions."""
        self.calls.append(name)
        for key in (name, len(self.calls) - 1):
            if key in self.on:
                self.on.pop(key)()

    async def call(self, name: str, *, prompts: int = 0) -> None:  # noqa: ARG002
        """Lets the time of a call for a number of prompts pass, then notes it."""
        self.clock.seconds += self.durations.get(name.split(maxsplit=1)[0], 0.0)
        self.note(name)


class LocalScorer:
    """Calls the configured reward functions in this process."""

    def __init__(self, script: Script, config: Config) -> None:
        self.script = script
        self.forms = {
            part.name: recognise(resolve(part.function), part.args)
            for part in config.rewards.functions
        }

    async def score(self, inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        await self.script.call("scorer.score")
        if self.script.stop.is_set():
            await asyncio.Event().wait()  # until it is abandoned
        parts = {
            name: [outcome for _, outcome, _ in form.score(inputs)]
            for name, form in self.forms.items()
        }
        return [{name: parts[name][row] for name in parts} for row in range(len(inputs))]

    async def start(self) -> list[RewardFacts]:
        return []

    async def heartbeat(self) -> Heartbeat:
        return Heartbeat()

    async def notices(self) -> list[str]:
        return []

    async def busy_s(self) -> dict[str, float]:
        return dict.fromkeys(self.forms, 0.0)


class FakeTracker(Tracker):
    """A tracker that records its arguments."""

    def __init__(self, run_id: str | None = None) -> None:
        super().__init__("disabled", run_id=run_id)
        self.before: list[Mapping[str, Any]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.alerts: list[tuple[str, str]] = []
        self.summary: dict[str, Any] = {}

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
        pass


class Process:
    """One process of a run: rewinds to its checkpoint and coordinates, like `launch.session`.

    Args:
        config: of the run.
        learner: holds the adapter of the checkpoint.
        samplers: of the run; the learner itself in a colocated run.
        restored: the coordinator's part of the checkpoint; None: there is none.
        script: of the workers.
        data: the run's prompts.
        started: when the process started, by the clock of the script; None: now.
    """

    def __init__(
        self,
        config: Config,
        *,
        learner: Learner,
        samplers: Sequence[Sampler],
        restored: Mapping[str, Any] | None,
        script: Script,
        data: LoadedData | None = None,
        started: float | None = None,
    ) -> None:
        self.script, self.folder, self.tracker = script, RunFolder.of(config), FakeTracker()
        self.scorer = LocalScorer(script, config)
        self.records = Records(self.folder, self.tracker, Console())
        progress = Progress() if restored is None else Progress.of_meta(restored)
        self.folder.create(config)
        now = script.clock
        started = now() if started is None else started
        self.clock = Clock(started, used_before_s=used_s(self.folder), now=now)
        budget = Budget.of(config, self.folder)
        self.deadline = Deadline(config, budget.steps, budget.time_s)
        self.folder.rewind_to(progress.step)
        self.meter = RunMeter(
            self.folder, Hardware({"learner": 1, "samplers": 1}, 2), PhaseClock(now)
        )
        self.resumed_from = None if restored is None else progress.step
        self.workers = Workers(
            samplers=samplers,
            learner=learner,
            scorer=self.scorer,
            config=config,
            clock=self.clock,
            stop=script.stop,
            one_process=config.plan.placement == "colocated",
        )
        self.progress, self.config, self.data = progress, config, data or make_data()
        self.connect()

    def connect(self) -> None:
        """Makes the coordinator, from what is in the journal."""
        context = RunContext(
            self.config,
            data=self.data,
            maker=PromptMaker(self.config.prompt, CharTokenizer()),
            workers=self.workers,
            records=self.records,
            meter=self.meter,
            deadline=self.deadline,
            clock=self.clock,
            sizes=first_sizes(self.config, self.folder.plan),
            resumed_from=self.resumed_from,
        )
        self.coordinator = Coordinator(context, self.progress)

    def run(self) -> Literal["finished", "interrupted"]:
        """Runs the coordinator until the run ends or is killed."""
        try:
            return asyncio.run(self.coordinator.run())
        finally:
            self.folder.close()

    @property
    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        found = self.folder.summary
        assert found is not None
        return found

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
