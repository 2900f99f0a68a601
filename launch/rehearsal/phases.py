"""Every phase of a run once, as full as it can be, in a run's order.

    start -> calibration -> probe -> warm start -> sync -> prefill of each bucket -> decode
          -> fewer slots -> rewards -> score -> update -> sync -> evaluation -> checkpoint
          -> restore -> export

Commands workers as the coordinator does, and knows neither Ray nor JAX. Decides nothing about the
run: what runs out of memory is answered by the balance, what fails otherwise ends the rehearsal.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from configs.schema import Config
from launch.rehearsal import full
from launch.rehearsal.account import Account, Did, Failure, Process, Result
from launch.rehearsal.expected import Target
from pipeline.contracts.adapters import AdapterRef, Published, Restored
from pipeline.contracts.builds import Built
from pipeline.contracts.memory import OutOfMemory
from pipeline.contracts.rollouts import Completion, DecodeWork, Prompt, RolloutRequest
from pipeline.contracts.sizes import Sizes, sized
from pipeline.evaluate import evaluation
from pipeline.evaluate.exports import COMPARED
from pipeline.inputs.dataset.batching import batch_shape
from pipeline.inputs.dataset.splits import LoadedData
from pipeline.inputs.text.prompts import PromptMaker
from pipeline.inputs.text.tokenizer import Tokenizer
from pipeline.plan.choice import Calibrated
from pipeline.rollout.scoring import reward_inputs
from pipeline.rollout.workers import Workers
from rewards.base import Outcome, Tags

_Phase = tuple[str, Callable[[], Awaitable[Did]]]


@dataclass(frozen=True)
class Stage:
    """Who takes part, and with what.

    Attributes:
        config: of the rehearsal: its run folder is a temporary one.
        data: the run's.
        tokenizer: the model's.
        workers: samplers, learner and reward workers.
        processes: that hold devices.
        calibrate: measures sizes and puts the best in force, where they are not fixed.
        restore: lets the learner go on from its newest checkpoint.
        export: the folder to export into.
        target: what the plan is made for; None: nothing is planned.
    """

    config: Config
    data: LoadedData
    tokenizer: Tokenizer
    workers: Workers
    processes: Sequence[Process]
    calibrate: Callable[[], Awaitable[Calibrated | None]]
    restore: Callable[[], Awaitable[Restored]]
    export: Path
    target: Target | None


@dataclass
class Rehearsal:
    """One rehearsal.

    Attributes:
        stage: see there.
        say: says a line.
        now: reads the clock, in seconds.
    """

    stage: Stage
    say: Callable[[str], None]
    now: Callable[[], float] = time.monotonic
    _drawn: list[Completion] = field(default_factory=list)
    _scored: list[Completion] = field(default_factory=list)
    _first: Sizes = field(init=False)
    _work: DecodeWork = field(default_factory=DecodeWork)
    _account: Account = field(init=False)
    _workers: Workers = field(init=False)

    def __post_init__(self) -> None:
        """Nothing is done yet."""
        stage = self.stage
        self._workers = stage.workers
        self._first = stage.workers.sizes.in_force
        self._account = Account(stage.processes, stage.target)

    async def start(self, *, waited_s: float) -> None:
        """Loads the base and compiles; tells both as phases.

        Args:
            waited_s: until the processes had their devices.

        Raises:
            ValueError: what is wrong with devices, weights or rewards.
            FileNotFoundError: likewise.
            OutOfMemory: if there are no sizes with which they can begin.
        """
        stage = self.stage
        load_s = await stage.workers.start()
        built = await self._built()
        cached = sum(one.cached for one in built)
        await self._account.write(
            self._config,
            "start and load",
            waited_s + load_s,
            Did(f"load {load_s:.1f} s", lambda expected: expected.parts.start),
        )
        note = f"{len(built)} programs, {cached} from the cache; one after the other"
        await self._account.write(
            self._config,
            "compile",
            sum(one.seconds for one in built),
            Did(note, lambda expected: expected.parts.compile),
        )

    async def run(self) -> Result:
        """All other phases, until one fails."""
        failure = None
        for name, work in self._phases():
            self.say(f"rehearsing: {name}")
            began = self.now()
            try:
                did = await work()
                await self._account.write(self._config, name, self.now() - began, did)
            except Exception as error:  # noqa: BLE001  # whatever it is: told, exit status 1
                failure = Failure(name, _words(error))
                break
        sizes = self.stage.workers.sizes.in_force
        return Result(tuple(self._account.rows), failure, self._first, sizes, self._account.limit)

    def _phases(self) -> Iterator[_Phase]:
        # Lazily: after a lack of memory the following phases have other sizes.
        config = self.stage.config
        if not config.plan.fixed:
            yield "calibration", self._calibrate
        yield "probe", self._probe
        if config.run.warm_start:
            yield "warm start", self._imitate
        yield "first sync", self._sync
        for bucket in reversed(config.prompt_buckets):
            yield f"prefill of {bucket}", partial(self._read, bucket)
        yield "decode", self._draw
        for slots in self._config.plan.slot_ladder[1:]:
            yield f"decode in {slots} slots", partial(self._draw_in, slots)
        yield "rewards", self._reward
        yield "score", self._score
        yield "update", self._update
        yield "sync", self._sync
        yield "evaluation", self._evaluate
        yield "checkpoint", self._save
        yield "restore", self._restore
        yield "export", self._export

    async def _calibrate(self) -> Did:
        found = await self.stage.calibrate()
        # What is chosen is not for want of memory.
        self._first = self.stage.workers.sizes.in_force
        if found is None:
            return Did("nothing is measured")
        return Did(f"about {found.choice.tokens_per_s:,.0f} trained tokens a second")

    async def _probe(self) -> Did:
        largest = await self._workers.probe(self.stage.data.train.prompts)
        return Did(f"sampler and learner agree to {largest:.1e}")

    async def _sync(self) -> Did:
        published = await self._workers.publish()
        return Did(f"version {published.version}", lambda expected: expected.sync())

    async def _read(self, bucket: int) -> Did:
        requests = full.to_read(self._config, self._train, bucket=bucket, published=self._published)
        await self._generate(requests)
        programs = (f"prefill {bucket}", f"fill {bucket}")
        return self._drawn_as(f"{len(requests)} prompts of {bucket}, 1 segment", bucket, programs)

    async def _draw(self) -> Did:
        requests = full.to_draw(self._config, self._train)
        self._drawn = await self._generate(requests)
        slots = self._config.slots
        new = self._config.rollout.max_new_tokens
        note = f"{len(requests)} rollouts in {slots} slots, each kept for {new} tokens"
        return self._drawn_as(note, self._longest, (f"segment {slots}",))

    async def _draw_in(self, slots: int) -> Did:
        requests = full.to_draw_in(self._config, self._train, slots=slots)
        await self._generate(requests)
        return self._drawn_as("1 segment", self._longest, (f"segment {slots}",))

    async def _generate(self, requests: Sequence[RolloutRequest]) -> list[Completion]:
        temperature = self._config.rollout.temperature
        return await self._generated(requests, temperature)

    async def _generated(
        self, requests: Sequence[RolloutRequest], temperature: float
    ) -> list[Completion]:
        completions, self._work = await self._workers.generate(requests, temperature=temperature)
        return completions

    async def _reward(self) -> Did:
        config = self._config
        prompts = {prompt.id: prompt for prompt in self._train}
        maker = PromptMaker(config.prompt, self.stage.tokenizer)
        inputs = reward_inputs(self._drawn, prompts, maker=maker, tags=Tags.of(config.prompt))
        outcomes = await self._workers.scorer.score(inputs)
        for part in config.rewards.functions:
            _check_rewarded(part.name, [row[part.name] for row in outcomes])
        note = f"{len(inputs)} completions, {_failed(outcomes)} calls without a value"
        return Did(note, lambda expected: expected.rewards(len(inputs)))

    async def _score(self) -> Did:
        rows = full.learned_rows(self._config)
        completions = full.to_score(self._config, self._drawn, self._published)
        scored = await self._workers.learner.score(completions, which="current")
        self._scored = [
            replace(one, logprobs=logprobs, processed_logprobs=None)
            for one, logprobs in zip(completions, scored, strict=True)
        ]
        return Did(
            self._rows_note(rows),
            lambda expected: expected.scoring(rows),
            self._of_rows("score"),
        )

    async def _imitate(self) -> Did:
        sequences = full.to_imitate(self._config, self._train)
        await self._workers.learner.sft_update(sequences)
        rows = len(sequences)
        return Did(
            self._rows_note(rows),
            lambda expected: expected.imitating(rows),
            self._of_rows("sft_gradient"),
        )

    async def _update(self) -> Did:
        config, rows = self._config, full.learned_rows(self._config)
        rate = config.learner.lr if config.plans_decay else None
        learned = await self._workers.learner.update(full.to_learn(self._scored), rate=rate)
        programs = self._of_rows("gradient")
        if config.learner.uses_reference_top_k:
            programs += self._of_rows("reference_top_k")
        note = f"{self._rows_note(rows)}, {learned['tokens_trained']:,.0f} tokens"
        return Did(note, lambda expected: expected.learning(rows), programs)

    async def _evaluate(self) -> Did:
        config, protocol = self._config, self._config.eval
        prompts = full.to_answer(config, self.stage.data.test.prompts)
        requests = evaluation.requests(prompts, phase="test", samples=protocol.samples)
        drawn = await self._generated(requests, protocol.temperature)
        found = evaluation.judge(
            prompts,
            drawn,
            maker=PromptMaker(config.prompt, self.stage.tokenizer),
            tags=Tags.of(config.prompt),
            extraction=protocol.extraction,
        )
        note = f"{len(drawn)} answers to {len(prompts)} prompts, {found.correct.sum()} right"
        return self._drawn_as(note, self._longest, ())

    async def _save(self) -> Did:
        learner, validates = self._workers.learner, self._config.eval.validates
        await learner.save({"rehearsal": self._published.version})
        if validates:
            await learner.keep_best()
        return Did("", lambda expected: expected.parts.checkpoint)

    async def _restore(self) -> Did:
        before, found = self._published, await self.stage.restore()
        saved = (found.meta or {}).get("rehearsal")
        after = await self._workers.publish()
        if found.damaged or saved != before.version or after.sha256 != before.sha256:
            damaged = "; ".join(found.damaged) or f"version {saved}, {after.sha256[:12]}"
            raise RuntimeError(
                f"not what was saved, version {before.version}, {before.sha256[:12]}: {damaged}"
            )
        return Did(f"version {after.version}, the same adapter")

    async def _export(self) -> Did:
        which: AdapterRef = "best" if self._config.eval.validates else "current"
        folder = self.stage.export
        report = await self._workers.learner.export(
            str(folder), self._scored[:COMPARED], which=which
        )
        equal = (
            "the same numbers"
            if report.max_difference is None
            else f"log-probs within {report.max_difference:.1e}"
        )
        gib = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**30
        return Did(f"{gib:.3g} GiB, {equal}", lambda expected: expected.parts.export)

    @property
    def _config(self) -> Config:
        """With the sizes in force."""
        return sized(self.stage.config, self.stage.workers.sizes.in_force)

    @property
    def _train(self) -> Sequence[Prompt]:
        return self.stage.data.train.prompts

    @property
    def _longest(self) -> int:
        return self._config.rollout.max_prompt_tokens

    @property
    def _published(self) -> Published:
        assert self._workers.published is not None, "a version was published first"
        return self._workers.published

    def _drawn_as(self, note: str, seq: int, programs: tuple[str, ...]) -> Did:
        work = self._work
        return Did(note, lambda expected: expected.drawing(work, seq=seq), programs)

    def _of_rows(self, kind: str) -> tuple[str, ...]:
        return tuple(f"{kind} {rows}" for rows in batch_shape(self._config, pad=0).sizes)

    def _rows_note(self, rows: int) -> str:
        sizes = batch_shape(self._config, pad=0).split(rows)
        counted = " and ".join(f"{sizes.count(n)} x {n}" for n in dict.fromkeys(sizes))
        return f"{counted} rows of {self._config.row_tokens}"

    async def _built(self) -> list[Built]:
        workers = self._workers.processes
        return [built for one in workers for built in (await one.process.building()).done]


def _check_rewarded(name: str, outcomes: Sequence[Outcome]) -> None:
    """One that gives no value at all is broken; a few without one are counted in a run, too."""
    if any(outcome.value is not None for outcome in outcomes):
        return
    raise RuntimeError(
        f"rewards.functions {name}: no value for any of {len(outcomes)} completions: "
        f"{outcomes[0].error}"
    )


def _failed(outcomes: Sequence[Mapping[str, Outcome]]) -> int:
    return sum(outcome.value is None for row in outcomes for outcome in row.values())


def _words(error: Exception) -> str:
    text = str(error).strip()
    told = isinstance(error, RuntimeError | ValueError | OutOfMemory) and text
    return text if told else f"{type(error).__name__}: {text}"
