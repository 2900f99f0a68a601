"""The balance between work and memory: which sizes are in force, and smaller ones when they fail.

    coordinator -> [BalancedSampler, BalancedLearner] -> workers
                      ^   out of memory: the next smaller sizes, compiled, and the same again   |
                      +-------------------------------------------------------------------------+

Stands between the coordinator and the workers with their Protocols on both sides, so neither knows.
A phase that is done again is asked for the same by name, so nothing is lost or counted twice. Each
decision is journaled; a checkpoint carries the sizes in force, a resume begins with those and takes
later decisions again where they were taken.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from configs.schema import Config
from pipeline.contracts.builds import Built, Ready, built_facts, built_line
from pipeline.contracts.memory import NothingSmaller, OutOfMemory
from pipeline.contracts.rollouts import Rollout
from pipeline.contracts.sizes import Phase, Sizes, smaller
from pipeline.contracts.workers import (
    Resizable,
)
from pipeline.plan.search.fitting import first_sizes
from pipeline.run.records import Records
from pipeline.run.run_folder import RunFolder

T = TypeVar("T")

REPLAN = "replan"
"""Journal entries of decisions that change sizes while a run goes on."""
POLL_S = 0.5
"""How often a process that compiles is asked how far it is."""

_DOING: dict[Phase, str] = {
    "generate": "drawing",
    "score": "scoring",
    "update": "learning",
    "publish": "handing over an adapter",
    "sync": "taking over an adapter",
    "export": "exporting",
    "load": "loading the model",
}


@dataclass
class Worker:
    """A process, and what it is prepared for.

    Attributes:
        name: what it is called in what is said.
        process: it.
        sizes: that it is prepared for; None: for none yet.
        told: programs of its log that were said.
    """

    name: str
    process: Resizable
    sizes: Sizes | None = None
    told: int = 0


@dataclass(frozen=True)
class _Decision:
    """Smaller sizes, and why."""

    error: OutOfMemory
    before: Sizes
    after: Sizes


@dataclass
class Balance:
    """The sizes of one run.

    Attributes:
        config: what is wanted, and whether sizes may change.
        sizes: in force.
        say: says a line, until there are records.
        step: steps learned from.
        records: where decisions are written down; None: not yet, they are kept until then.
        revise: is shown what each step has learned from, and may put other sizes in force.
        prepared_s: the longest that programs of a process have taken so far, loading not counted.
    """

    config: Config
    sizes: Sizes
    say: Callable[[str], None]
    step: int = 0
    records: Records | None = None
    revise: Callable[[Sequence[Rollout]], None] | None = None
    prepared_s: float = 0.0
    _kept: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    _at_checkpoint: Sizes | None = None
    _room: dict[str, int] = field(default_factory=dict)
    _before: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def of(
        config: Config,
        folder: RunFolder,
        *,
        say: Callable[[str], None],
        sizes: Sizes | None = None,
    ) -> Balance:
        """Begins with `sizes`, else with those of the run's newest checkpoint, given or planned."""
        recorded = None if config.plan.fixed else folder.plan
        return Balance(config, first_sizes(config, recorded) if sizes is None else sizes, say)

    def resume(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Takes what a checkpoint says of sizes, and returns the rest of what it says.

        Where this process had no room for them, what it has room for stays.
        """
        rest = dict(meta)
        found = rest.pop("sizes", None)
        if found is not None and not self.config.plan.fixed:
            self._at_checkpoint = Sizes.of_json(found)
            room = {name: min(size, found[name]) for name, size in self._room.items()}
            self.sizes = replace(self._at_checkpoint, **room)
        return rest

    def record(self, records: Records) -> None:
        """Writes down what was decided so far, and from now on at once.

        What earlier processes of the run decided is decided again, each at its step.
        """
        self.records = records
        if not self.config.plan.fixed:
            decided = records.folder.events(REPLAN)
            self._before = [entry for entry in decided if "again" not in entry]
        for event, facts in self._kept:
            records.folder.journal(event, **facts)
        self._kept.clear()
        self._write_plan()
        self._decide_again()

    async def start(self, workers: Sequence[Worker]) -> list[Ready]:
        """Prepares all, side by side; a journal entry says what for."""
        started = time.monotonic()
        ready = list(await asyncio.gather(*(self._fit(worker) for worker in workers)))
        named = [
            Built(f"{worker.name}: {built.name}", built.seconds, built.cached)
            for worker, one in zip(workers, ready, strict=True)
            for built in one.built
        ]
        facts = {"seconds": round(time.monotonic() - started, 3), **built_facts(named)}
        cached = facts["from_cache"]
        text = f"{len(named)} programs in {facts['seconds']:.1f} s, {cached} from the cache"
        self._note("compiled", text, **facts)
        return ready

    async def hold(self, worker: Worker, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`, which is done again with smaller sizes as often as it takes.

        Raises:
            NothingSmaller: if sizes are fixed, or there are no smaller ones; a sentence.
        """
        while True:
            # Another one may run out of memory while this one is prepared.
            while worker.sizes != self.sizes:
                await self._fit(worker)
            used = self.sizes
            try:
                return await work()
            except OutOfMemory as error:
                await self._fit(worker, self._decide(error, used))

    async def prepare(self, worker: Worker, sizes: Sizes) -> None:
        """Puts sizes in force and prepares a process for them, to try them.

        Raises:
            OutOfMemory: if they are too much; the sizes before are in force.
        """
        before, self.sizes = self.sizes, sizes
        if worker.sizes == sizes:
            return
        worker.sizes = None
        try:
            await self._prepare(worker, sizes)
        except OutOfMemory:
            self.sizes = before
            raise
        worker.sizes = sizes

    def put_in_force(self, sizes: Sizes, event: str, text: str, facts: Mapping[str, Any]) -> None:
        """Takes a decision; a journal entry says why. Processes follow before they work."""
        self.sizes = sizes
        self._note(event, text, **facts)
        self._write_plan()

    def learned(self, rollouts: Sequence[Rollout] = ()) -> None:
        """Counts a step; worked examples are no rollouts."""
        if self._at_checkpoint is None:
            # Until there is a checkpoint a resume begins with what the first step had.
            self._at_checkpoint = self.sizes
            self._write_plan()
        self.step += 1
        self._decide_again()
        if self.revise is not None and rollouts:
            self.revise(rollouts)

    def _decide_again(self) -> None:
        """Takes decisions of earlier processes at this step, in their order.

        But for those that were taken of other sizes: there was less memory then, or there is now.
        """
        for entry in self._before:
            if entry["step"] == self.step and entry["from"] == self.sizes.to_json():
                sizes = Sizes.of_json(entry["to"])
                facts = {name: entry[name] for name in ("step", "reason", "from", "to")}
                facts["again"] = True
                text = f"step {self.step}: {_words(sizes)}, as was decided here before"
                self.put_in_force(sizes, REPLAN, text, facts)

    def checkpointed(self) -> None:
        """Notes that the newest checkpoint has the sizes in force."""
        self._at_checkpoint = self.sizes
        self._write_plan()

    def _decide(self, error: OutOfMemory, used: Sizes) -> _Decision | None:
        """Puts the next smaller sizes in force; None: another process has brought that about."""
        less = smaller(self.config, used, error.phase, share=error.share)
        if less is None or self.config.plan.fixed:
            raise NothingSmaller(error.phase, self._sentence(error, used, less)) from error
        before = self.sizes
        after = before.at_most(less)
        if after == before:
            return None
        self.sizes = after
        lowered = set(after.to_json().items()) - set(before.to_json().items())
        self._room |= dict(lowered)
        self._write_plan()
        return _Decision(error, before, after)

    async def _fit(self, worker: Worker, decision: _Decision | None = None) -> Ready:
        """Prepares a process for the sizes in force, if it is not."""
        while True:
            sizes, failed = self.sizes, None
            if worker.sizes == sizes:
                return Ready()
            try:
                ready = await self._prepare(worker, sizes)
            except OutOfMemory as error:
                ready, failed = Ready(), error
            else:
                worker.sizes = sizes
            if decision is not None:
                self._journal(worker, decision, ready)
            elif ready.built and self.records is not None:
                text = f"{worker.name}: {len(ready.built)} programs for {_words(sizes)}"
                self._note("compiled", text, worker=worker.name, **built_facts(ready.built))
            if failed is None:
                return ready
            decision = self._decide(failed, sizes)

    async def _prepare(self, worker: Worker, sizes: Sizes) -> Ready:
        """Says each program when it is compiled."""
        task, before = asyncio.ensure_future(worker.process.prepare(sizes)), worker.told
        started = time.monotonic()
        try:
            while True:
                await asyncio.wait({task}, timeout=POLL_S)
                ready = task.result() if task.done() else None
                building = await worker.process.building()
                for number in range(worker.told, len(building.done)):
                    built = building.done[number]
                    line = built_line(
                        built, number=number + 1 - before, total=building.total - before
                    )
                    self.say_line(f"{worker.name}: {line}")
                worker.told = len(building.done)
                if ready is not None:
                    # Programs are compiled side by side, and the first time beside loading.
                    built_s = sum(built.seconds for built in ready.built)
                    took_s = min(built_s, time.monotonic() - started)
                    self.prepared_s = max(self.prepared_s, took_s)
                    return ready
        finally:
            task.cancel()

    def _journal(self, worker: Worker, decision: _Decision, ready: Ready) -> None:
        error, before, after = decision.error, decision.before, decision.after
        self._note(
            REPLAN,
            f"step {self.step}: out of memory while {_DOING[error.phase]}: {error.what}; going on "
            f"with {_words(after, unlike=before)}",
            step=self.step,
            phase=error.phase,
            worker=worker.name,
            reason=error.what,
            **{"from": before.to_json(), "to": after.to_json()},
            **built_facts(ready.built),
        )

    def _sentence(self, error: OutOfMemory, used: Sizes, less: Sizes | None) -> str:
        told = f"out of memory while {_DOING[error.phase]}: {error.what}"
        if error.phase == "load":
            return told
        if error.share is not None and error.share <= 0:
            return (
                f"{told}; what is there whatever the sizes, base, adapter and optimizer, leaves no "
                "room for any: python -m launch.plan tells what would make some"
            )
        if less is None:
            return f"{told}; there is nothing smaller than {_words(used)}"
        return (
            f"{told}; plan.fixed = true forbids smaller sizes. The same command with --plan.fixed "
            f"false goes on with {_words(less, unlike=used)}"
        )

    def _write_plan(self) -> None:
        if self.records is None:
            return
        kept = self._at_checkpoint
        self.records.folder.write_plan(
            {
                "fixed": self.config.plan.fixed,
                "in_force": self.sizes.to_json(),
                "at_checkpoint": None if kept is None else kept.to_json(),
            }
        )

    def _note(self, event: str, text: str, **facts: Any) -> None:
        if self.records is None:
            self._kept.append((event, facts))
            self.say(text)
        else:
            self.records.event(event, text, **facts)

    def say_line(self, text: str) -> None:
        """Says a line, wherever that is done now."""
        (self.say if self.records is None else self.records.console.say)(text)


def _words(sizes: Sizes, *, unlike: Sizes | None = None) -> str:
    """Sizes by their settings; with `unlike` those that differ from it, and what they were."""
    before = {} if unlike is None else unlike.to_json()
    return " and ".join(
        f"plan.{name} = {size}" + (f" instead of {before[name]}" if before else "")
        for name, size in sizes.to_json().items()
        if before.get(name) != size
    )
