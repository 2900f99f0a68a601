"""Controls the sizes of a run: slots and micro-batches, reduced when memory runs out.

    Workers -> call -> SizeController -> worker.prepare(sizes)

The controller decides the sizes in force and prepares worker processes for them. Each decision is
journaled. A checkpoint carries the sizes in force; a resumed run starts with them and repeats later
decisions at their steps. After `RETUNE_STEPS` steps it may choose sizes again for the measured
lengths of real rollouts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from configs.schema import Config
from pipeline.contracts.builds import Built, Ready, built_facts
from pipeline.contracts.decisions import DecisionLog, Display, RemainingTime, ShowProgress
from pipeline.contracts.memory import NothingSmaller, OutOfMemory
from pipeline.contracts.rollouts import Rollout
from pipeline.contracts.sizes import Sizes, WorkerPhase, smaller
from pipeline.contracts.speeds import Lengths, Speeds
from pipeline.contracts.workers import Resizable
from pipeline.plan.search.fitting import PlanCase, hardware_of, is_of_hardware
from pipeline.plan.size_choice import StepTimes

T = TypeVar("T")

REPLAN = "replan"
"""Journal event of a decision that changes sizes during a run."""
RETUNE_STEPS = 3
"""Steps whose rollout lengths `retune` uses."""
RETUNE_GAIN = 0.05
"""Smallest relative gain of step time for which programs are compiled again."""
POLL_S = 0.5
"""Interval in seconds for polling the progress of a compiling process."""

_DOING: dict[WorkerPhase, str] = {
    "generate": "sampling",
    "score": "scoring",
    "update": "updating",
    "publish": "publishing an adapter",
    "sync": "loading an adapter",
    "export": "exporting",
    "load": "loading the model",
}


@dataclass
class Worker:
    """A worker process.

    Attributes:
        name: in messages.
        process: the process.
        sizes: sizes that it is prepared for; None: none yet.
        logged: programs of its build log that were shown.
    """

    name: str
    process: Resizable
    sizes: Sizes | None = None
    logged: int = 0


@dataclass
class SizeController:
    """The sizes of one run.

    Attributes:
        config: of the run; says whether sizes may change.
        in_force: the sizes in force.
        display: the console.
        step: training steps done.
        compile_s: the longest compilation of a process so far, in seconds, without loading.
        room: sizes that remained in this process after out-of-memory errors, by setting.
    """

    config: Config
    in_force: Sizes
    display: Display
    step: int = 0
    compile_s: float = 0.0
    room: dict[str, int] = field(default_factory=dict)
    _log: DecisionLog | None = None
    _pending: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    _at_checkpoint: Sizes | None = None
    _earlier: list[dict[str, Any]] = field(default_factory=list)
    _measured: tuple[PlanCase, Speeds] | None = None
    _lengths: list[tuple[int, int]] = field(default_factory=list)
    _seen_steps: int = 0

    # --- checkpoints and journal

    @property
    def meta(self) -> dict[str, Any]:
        """What a checkpoint carries of the sizes."""
        if self.config.plan.fixed:
            return {}
        return {"sizes": self.in_force.to_json(), "hardware": hardware_of(self.config)}

    def resume(self, meta: Mapping[str, Any]) -> None:
        """Restores the step and the sizes of a checkpoint.

        A size that did not fit into this process stays smaller. Sizes of other hardware do not
        count.
        """
        self.step = meta["step"]
        found = meta.get("sizes")
        if found is not None and not self.config.plan.fixed and is_of_hardware(meta, self.config):
            self._at_checkpoint = Sizes.of_json(found)
            self.in_force = self._at_checkpoint.at_most(self.room)

    def record(self, log: DecisionLog) -> None:
        """Journals the decisions so far, and from now on each decision at once.

        Repeats the decisions of earlier processes of the run, each at its step.
        """
        self._log = log
        if not self.config.plan.fixed:
            decided = log.events(REPLAN)
            self._earlier = [
                entry
                for entry in decided
                if "again" not in entry and is_of_hardware(entry, self.config)
            ]
        for event, facts in self._pending:
            log.journal(event, **facts)
        self._pending.clear()
        self._write_plan()
        self._decide_again()

    def checkpointed(self, sizes: Sizes) -> None:
        """Notes that the newest checkpoint has these sizes."""
        self._at_checkpoint = sizes
        self._write_plan()

    # --- preparing processes

    async def start(self, workers: Sequence[Worker]) -> list[Ready]:
        """Prepares all processes in parallel and journals the compilation."""
        started = time.monotonic()
        ready = list(await asyncio.gather(*(self.prepare(worker) for worker in workers)))
        named = [
            Built(f"{worker.name}: {built.name}", built.seconds, built.cached)
            for worker, one in zip(workers, ready, strict=True)
            for built in one.built
        ]
        facts = {"seconds": round(time.monotonic() - started, 3), **built_facts(named)}
        cached = facts["from_cache"]
        text = f"{len(named)} programs in {facts['seconds']:.1f} s, {cached} from the cache"
        self.event("compiled", text, **facts)
        return ready

    async def prepare(self, worker: Worker) -> Ready:
        """Prepares a process for the sizes in force, if it is not; reduces them if necessary.

        Raises:
            NothingSmaller: if sizes are fixed or there are no smaller ones; a sentence.
        """
        load_s, built = 0.0, tuple[Built, ...]()
        # Another process may run out of memory while this one is prepared.
        while worker.sizes != self.in_force:
            sizes = self.in_force
            try:
                ready = await self._prepare(worker, sizes)
            except OutOfMemory as error:
                self._reduce(worker, error, sizes)
            else:
                load_s, built = load_s + ready.load_s, (*built, *ready.built)
        if built and self._log is not None:
            text = f"{worker.name}: {len(built)} programs for {_words(self.in_force)}"
            self.event("compiled", text, worker=worker.name, **built_facts(built))
        return Ready(load_s, built)

    async def call(self, worker: Worker, work: Callable[[], Awaitable[T]]) -> T:
        """Calls a prepared process; out of memory, repeats the call with the next smaller sizes.

        Raises:
            NothingSmaller: if sizes are fixed or there are no smaller ones; a sentence.
        """
        while True:
            await self.prepare(worker)
            used = self.in_force
            try:
                return await work()
            except OutOfMemory as error:
                self._reduce(worker, error, used)

    async def try_sizes(self, worker: Worker, sizes: Sizes) -> None:
        """Puts sizes in force and prepares a process for them, to measure them.

        Raises:
            OutOfMemory: if they do not fit; the previous sizes stay in force.
        """
        before, self.in_force = self.in_force, sizes
        if worker.sizes == sizes:
            return
        try:
            await self._prepare(worker, sizes)
        except OutOfMemory:
            self.in_force = before
            raise

    async def _prepare(self, worker: Worker, sizes: Sizes) -> Ready:
        """Prepares a process and shows each program when it is compiled."""
        worker.sizes = None
        task, started = asyncio.ensure_future(worker.process.prepare(sizes)), time.monotonic()
        try:
            with self.display.activity(worker.name, "programs") as show:
                ready = await self._watch(worker, task, show)
        finally:
            task.cancel()
        # Programs are compiled in parallel, the first time during loading.
        built_s = sum(built.seconds for built in ready.built)
        self.compile_s = max(self.compile_s, min(built_s, time.monotonic() - started))
        worker.sizes = sizes
        return ready

    async def _watch(self, worker: Worker, task: asyncio.Task[Ready], show: ShowProgress) -> Ready:
        """Waits for a process that prepares; shows each program when it is compiled."""
        while True:
            await asyncio.wait({task}, timeout=POLL_S)
            ready = task.result() if task.done() else None
            building = await worker.process.building()
            for number in range(max(worker.logged, building.earlier), len(building.done)):
                self.say(f"{worker.name}: {building.line(number)}")
            worker.logged = len(building.done)
            if building.total:
                show(len(building.done) - building.earlier, building.total)
            if ready is not None:
                return ready

    # --- decisions

    def put_in_force(self, sizes: Sizes, event: str, text: str, facts: Mapping[str, Any]) -> None:
        """Decides on sizes and journals why. Processes are prepared before their next call."""
        self.in_force = sizes
        self.event(event, text, **facts)
        self._write_plan()

    def use(self, case: PlanCase, speeds: Speeds) -> None:
        """Lets `step_done` choose sizes again from these measurements."""
        self._measured = (case, speeds)

    def step_done(self, rollouts: Sequence[Rollout], left: RemainingTime) -> None:
        """Counts a training step.

        Args:
            rollouts: of the step; an SFT step has none.
            left: training that is left.
        """
        if self._at_checkpoint is None:
            # Without a checkpoint a resumed run starts with the sizes of the first step.
            self._at_checkpoint = self.in_force
            self._write_plan()
        self.step += 1
        self._decide_again()
        if self._measured is None or not rollouts or self._seen_steps == RETUNE_STEPS:
            return
        self._seen_steps += 1
        completions = [rollout.completion for rollout in rollouts]
        self._lengths += [(len(one.prompt_tokens), len(one.tokens)) for one in completions]
        if self._seen_steps == RETUNE_STEPS:
            self._retune(*self._measured, left)

    def _decide_again(self) -> None:
        """Repeats decisions of earlier processes at this step, in their order.

        Skips decisions that started from other sizes: memory was smaller then or is smaller now.
        """
        for entry in self._earlier:
            if entry["step"] == self.step and entry["from"] == self.in_force.to_json():
                sizes = Sizes.of_json(entry["to"])
                text = f"step {self.step}: {_words(sizes)}, as an earlier process decided here"
                self._replan(sizes, entry["reason"], text, again=True)

    def _reduce(self, worker: Worker, error: OutOfMemory, used: Sizes) -> None:
        """Puts the next smaller sizes in force, unless another process did that already.

        Args:
            worker: the process that ran out of memory.
            error: what it raised.
            used: sizes that it worked with.
        """
        less = smaller(self.config, used, error.phase, share=error.share)
        if less is None or self.config.plan.fixed:
            raise NothingSmaller(error.phase, self._sentence(error, used, less)) from error
        before = self.in_force.to_json()
        after = self.in_force.at_most(less.to_json())
        if after == self.in_force:
            return
        self.room |= {name: size for name, size in after.to_json().items() if size < before[name]}
        text = (
            f"step {self.step}: out of memory while {_DOING[error.phase]}: {error.what}; "
            f"continuing with {_words(after, unlike=self.in_force)}"
        )
        facts = {"phase": error.phase, "worker": worker.name}
        self._replan(after, error.what, text, **facts)

    def _retune(self, case: PlanCase, speeds: Speeds, left: RemainingTime) -> None:
        """Chooses sizes again for the lengths of real rollouts.

        Only the process that measured does this, and only if the remaining steps gain more time
        than compiling for the new sizes takes.
        """
        prompts, tokens = zip(*self._lengths, strict=True)
        count = len(self._lengths)
        lengths = Lengths(sum(prompts) / count, max(1.0, sum(tokens) / count))
        times = StepTimes.of(case, speeds.limited(self.room), lengths)
        after, now = times.best, times.seconds(self.in_force)
        # Unknown if out-of-memory errors led to sizes that were never measured.
        if after is None or now is None:
            return
        best = times.seconds(after)
        assert best is not None
        if best > (1 - RETUNE_GAIN) * now or (now - best) * left.steps_of(now) <= self.compile_s:
            return
        text = (
            f"completions have {lengths.completion:.0f} tokens, not "
            f"{case.lengths.completion:.0f}: {after.slots} slots and micro-batches of "
            f"{after.micro_batch_tokens} tokens take {1 - best / now:.0%} less of a step's time"
        )
        seconds = {"from": now, "to": best}
        self._replan(after, "lengths", text, lengths=vars(lengths), seconds=seconds)

    def _replan(self, after: Sizes, reason: str, text: str, **facts: Any) -> None:
        change = {"from": self.in_force.to_json(), "to": after.to_json()}
        known = {"step": self.step, "reason": reason, "hardware": hardware_of(self.config)}
        facts = {**known, **change, **facts}
        self.put_in_force(after, REPLAN, text, facts)

    # --- messages

    def say(self, text: str) -> None:
        """Shows a line on the console."""
        self.display.say(text)

    def _sentence(self, error: OutOfMemory, used: Sizes, less: Sizes | None) -> str:
        what = f"out of memory while {_DOING[error.phase]}: {error.what}"
        if error.phase == "load":
            return what
        if error.share is not None and error.share <= 0:
            return (
                f"{what}; base, adapter and optimizer, which no size changes, leave no room: "
                "python -m launch.plan shows what would make some"
            )
        if less is None:
            return f"{what}; there is nothing smaller than {_words(used)}"
        return (
            f"{what}; plan.fixed = true forbids smaller sizes. The same command with --plan.fixed "
            f"false continues with {_words(less, unlike=used)}"
        )

    def _write_plan(self) -> None:
        if self._log is None:
            return
        kept = self._at_checkpoint
        self._log.write_plan(
            {
                "fixed": self.config.plan.fixed,
                "hardware": hardware_of(self.config),
                "in_force": self.in_force.to_json(),
                "at_checkpoint": None if kept is None else kept.to_json(),
            }
        )

    def event(self, event: str, text: str, **facts: Any) -> None:
        """Shows a line and journals it, once there is a journal."""
        if self._log is None:
            self._pending.append((event, facts))
            self.say(text)
        else:
            self._log.event(event, text, **facts)


def _words(sizes: Sizes, *, unlike: Sizes | None = None) -> str:
    """Sizes by their settings; with `unlike` those that differ, with their previous values."""
    before = {} if unlike is None else unlike.to_json()
    return " and ".join(
        f"plan.{name} = {size}" + (f" instead of {before[name]}" if before else "")
        for name, size in sizes.to_json().items()
        if before.get(name) != size
    )
