"""Runs every phase of a run once at its largest size, in a run's order.

    start -> calibration -> probe -> SFT update -> sync -> prefill of each bucket -> decode
          -> fewer slots -> rewards -> score -> update -> sync -> evaluation -> checkpoint
          -> restore -> export

Calls the workers as the coordinator does, without Ray or JAX. Running out of memory reduces sizes
as in a run; any other failure ends the rehearsal.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from configs.schema import Config
from launch.rehearsal import workload
from launch.rehearsal.expected import Target
from launch.rehearsal.report import Failure, PhaseOutcome, Result, Rows
from pipeline.contracts.adapters import AdapterRef, Published, Restored
from pipeline.contracts.builds import Built
from pipeline.contracts.memory import OutOfMemory
from pipeline.contracts.rollouts import Completion, DecodeWork, Prompt, RolloutRequest
from pipeline.contracts.sizes import Sizes, sized
from pipeline.contracts.workers import ReportsMemory
from pipeline.evaluate import evaluation
from pipeline.evaluate.exports import COMPARED
from pipeline.inputs.dataset.batching import batch_shape
from pipeline.inputs.dataset.splits import LoadedData
from pipeline.inputs.text.prompts import PromptMaker
from pipeline.inputs.text.tokenizer import Tokenizer
from pipeline.plan.size_choice import StepTimes
from pipeline.rollout.scoring import reward_inputs
from pipeline.rollout.workers import Workers
from rewards.base import Outcome, Tags

_Phase = tuple[str, Callable[[], Awaitable[PhaseOutcome]]]


@dataclass(frozen=True)
class Setup:
    """Workers and inputs of a rehearsal.

    Attributes:
        config: with a temporary run folder.
        data: the run's.
        tokenizer: the model's.
        workers: samplers, learner and reward workers.
        processes: that hold devices.
        calibrate: measures sizes and applies the best ones, if they are not fixed.
        restore: makes the learner restore its newest checkpoint.
        export: the folder to export into.
        target: of the plan; None: there is no plan.
    """

    config: Config
    data: LoadedData
    tokenizer: Tokenizer
    workers: Workers
    processes: Sequence[ReportsMemory]
    calibrate: Callable[[], Awaitable[StepTimes | None]]
    restore: Callable[[], Awaitable[Restored]]
    export: Path
    target: Target | None


@dataclass
class Rehearsal:
    """One rehearsal.

    Attributes:
        setup: workers and inputs.
        say: prints a line.
        now: clock in seconds.
    """

    setup: Setup
    say: Callable[[str], None]
    now: Callable[[], float] = time.monotonic
    _completions: list[Completion] = field(default_factory=list)
    _scored: list[Completion] = field(default_factory=list)
    _first: Sizes = field(init=False)
    _work: DecodeWork = field(default_factory=DecodeWork)
    _rows: Rows = field(init=False)
    _workers: Workers = field(init=False)

    def __post_init__(self) -> None:
        """Begins with the current sizes."""
        setup = self.setup
        self._workers = setup.workers
        self._first = setup.workers.sizes.in_force
        self._rows = Rows(setup.processes, setup.target)

    async def start(self, *, waited_s: float) -> None:
        """Loads the base and compiles, as two phases.

        Args:
            waited_s: seconds until the devices were reserved.

        Raises:
            ValueError: for mistakes in devices, weights or rewards.
            FileNotFoundError: if weights or tokenizer are missing.
            OutOfMemory: if even the smallest sizes do not fit.
        """
        setup = self.setup
        load_s = await setup.workers.start()
        built = await self._built()
        cached = sum(one.cached for one in built)
        await self._rows.add(
            self._config,
            "start and load",
            waited_s + load_s,
            PhaseOutcome(f"load {load_s:.1f} s", lambda expected: expected.times.start),
        )
        note = f"{len(built)} programs, {cached} from the cache; sum of their times"
        await self._rows.add(
            self._config,
            "compile",
            sum(one.seconds for one in built),
            PhaseOutcome(note, lambda expected: expected.times.compile),
        )

    async def run(self) -> Result:
        """Runs all other phases, until one fails."""
        failure = None
        for name, work in self._phases():
            self.say(f"rehearsing: {name}")
            began = self.now()
            try:
                outcome = await work()
                await self._rows.add(self._config, name, self.now() - began, outcome)
            except Exception as error:  # noqa: BLE001  # any error is reported, exit status 1
                failure = Failure(name, _describe(error))
                break
        sizes = self.setup.workers.sizes.in_force
        return Result(tuple(self._rows.rows), failure, self._first, sizes, self._rows.limit)

    def _phases(self) -> Iterator[_Phase]:
        # Lazily: after running out of memory the following phases have smaller sizes.
        config = self.setup.config
        if not config.plan.fixed:
            yield "calibration", self._calibrate
        yield "probe", self._probe
        if config.run.has_sft_phase:
            yield "SFT update", self._sft_update
        yield "first sync", self._sync
        for bucket in reversed(config.prompt_buckets):
            yield f"prefill of {bucket}", partial(self._prefill, bucket)
        yield "decode", self._decode
        for slots in self._config.plan.slot_ladder[1:]:
            yield f"decode in {slots} slots", partial(self._decode_in_slots, slots)
        yield "rewards", self._reward
        yield "score", self._score
        yield "update", self._update
        yield "sync", self._sync
        yield "evaluation", self._evaluate
        yield "checkpoint", self._save
        yield "restore", self._restore
        yield "export", self._export

    async def _calibrate(self) -> PhaseOutcome:
        calibrated = await self.setup.calibrate()
        # The chosen sizes are the reference: choosing smaller ones is not running out of memory.
        self._first = self.setup.workers.sizes.in_force
        if calibrated is None:
            return PhaseOutcome("nothing is measured")
        return PhaseOutcome(f"about {calibrated.tokens_per_s:,.0f} trained tokens a second")

    async def _probe(self) -> PhaseOutcome:
        largest = await self._workers.probe(self.setup.data.train.prompts)
        return PhaseOutcome(f"sampler and learner agree to {largest:.1e}")

    async def _sync(self) -> PhaseOutcome:
        published = await self._workers.publish()
        return PhaseOutcome(f"version {published.version}", lambda expected: expected.sync())

    async def _prefill(self, bucket: int) -> PhaseOutcome:
        requests = workload.prefill_requests(
            self._config, self._train, bucket=bucket, published=self._published
        )
        await self._generate(requests)
        programs = (f"prefill {bucket}", f"fill {bucket}")
        return self._sampling_outcome(
            f"{len(requests)} prompts of {bucket}, 1 segment", bucket, programs
        )

    async def _decode(self) -> PhaseOutcome:
        requests = workload.decode_requests(self._config, self._train)
        self._completions = await self._generate(requests)
        slots = self._config.slots
        new = self._config.rollout.max_new_tokens
        note = f"{len(requests)} rollouts in {slots} slots, {new} tokens each"
        return self._sampling_outcome(note, self._longest, (f"segment {slots}",))

    async def _decode_in_slots(self, slots: int) -> PhaseOutcome:
        requests = workload.segment_requests(self._config, self._train, slots=slots)
        await self._generate(requests)
        return self._sampling_outcome("1 segment", self._longest, (f"segment {slots}",))

    async def _generate(
        self, requests: Sequence[RolloutRequest], *, temperature: float | None = None
    ) -> list[Completion]:
        if temperature is None:
            temperature = self._config.rollout.temperature
        completions, self._work = await self._workers.generate(requests, temperature=temperature)
        return completions

    async def _reward(self) -> PhaseOutcome:
        config = self._config
        prompts = {prompt.id: prompt for prompt in self._train}
        maker = PromptMaker(config.prompt, self.setup.tokenizer)
        inputs = reward_inputs(self._completions, prompts, maker=maker, tags=Tags.of(config.prompt))
        outcomes = await self._workers.scorer.score(inputs)
        for part in config.rewards.functions:
            _check_rewarded(part.name, [row[part.name] for row in outcomes])
        note = f"{len(inputs)} completions, {_failed(outcomes)} calls without a value"
        return PhaseOutcome(note, lambda expected: expected.rewards(len(inputs)))

    async def _score(self) -> PhaseOutcome:
        rows = workload.update_rows(self._config)
        completions = workload.full_completions(self._config, self._completions, self._published)
        scored = await self._workers.learner.score(completions, which="current")
        self._scored = [
            replace(one, logprobs=logprobs, processed_logprobs=None)
            for one, logprobs in zip(completions, scored, strict=True)
        ]
        return PhaseOutcome(
            self._rows_note(rows),
            lambda expected: expected.scoring(rows),
            self._row_programs("score"),
        )

    async def _sft_update(self) -> PhaseOutcome:
        sequences = workload.sft_rows(self._config, self._train)
        await self._workers.learner.sft_update(sequences)
        rows = len(sequences)
        return PhaseOutcome(
            self._rows_note(rows),
            lambda expected: expected.sft_update(rows),
            self._row_programs("sft_gradient"),
        )

    async def _update(self) -> PhaseOutcome:
        config, rows = self._config, workload.update_rows(self._config)
        rate = config.learner.lr if config.plans_decay else None
        metrics = await self._workers.learner.update(
            workload.training_rollouts(self._scored), rate=rate
        )
        programs = self._row_programs("gradient")
        if config.learner.uses_reference_top_k:
            programs += self._row_programs("reference_top_k")
        note = f"{self._rows_note(rows)}, {metrics['tokens_trained']:,.0f} tokens"
        return PhaseOutcome(note, lambda expected: expected.update(rows), programs)

    async def _evaluate(self) -> PhaseOutcome:
        config, protocol = self._config, self._config.eval
        prompts = workload.evaluation_prompts(config, self.setup.data.test.prompts)
        requests = evaluation.requests(prompts, phase="test", samples=protocol.samples)
        completions = await self._generate(requests, temperature=protocol.temperature)
        judged = evaluation.judge(
            prompts,
            completions,
            maker=PromptMaker(config.prompt, self.setup.tokenizer),
            tags=Tags.of(config.prompt),
            extraction=protocol.extraction,
        )
        note = (
            f"{len(completions)} answers to {len(prompts)} prompts, {judged.correct.sum()} correct"
        )
        return self._sampling_outcome(note, self._longest, ())

    async def _save(self) -> PhaseOutcome:
        learner, validates = self._workers.learner, self._config.eval.validates
        await learner.save({"rehearsal": self._published.version})
        if validates:
            await learner.keep_best()
        return PhaseOutcome("", lambda expected: expected.times.checkpoint)

    async def _restore(self) -> PhaseOutcome:
        before, restored = self._published, await self.setup.restore()
        saved = (restored.meta or {}).get("rehearsal")
        after = await self._workers.publish()
        if restored.damaged or saved != before.version or after.sha256 != before.sha256:
            damaged = "; ".join(restored.damaged) or f"version {saved}, {after.sha256[:12]}"
            raise RuntimeError(
                f"restored another adapter than version {before.version}, {before.sha256[:12]}: "
                f"{damaged}"
            )
        return PhaseOutcome(f"version {after.version}, the same adapter")

    async def _export(self) -> PhaseOutcome:
        which: AdapterRef = "best" if self._config.eval.validates else "current"
        folder = self.setup.export
        report = await self._workers.learner.export(
            str(folder), self._scored[:COMPARED], which=which
        )
        equal = (
            "identical values"
            if report.max_difference is None
            else f"log-probs within {report.max_difference:.1e}"
        )
        gib = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**30
        return PhaseOutcome(f"{gib:.3g} GiB, {equal}", lambda expected: expected.times.export)

    @property
    def _config(self) -> Config:
        """The configuration with the current sizes."""
        return sized(self.setup.config, self.setup.workers.sizes.in_force)

    @property
    def _train(self) -> Sequence[Prompt]:
        return self.setup.data.train.prompts

    @property
    def _longest(self) -> int:
        return self._config.rollout.max_prompt_tokens

    @property
    def _published(self) -> Published:
        assert self._workers.published is not None, "an adapter is published first"
        return self._workers.published

    def _sampling_outcome(self, note: str, seq: int, programs: tuple[str, ...]) -> PhaseOutcome:
        work = self._work
        return PhaseOutcome(note, lambda expected: expected.sampling(work, seq=seq), programs)

    def _row_programs(self, kind: str) -> tuple[str, ...]:
        return tuple(f"{kind} {rows}" for rows in batch_shape(self._config, pad=0).sizes)

    def _rows_note(self, rows: int) -> str:
        sizes = batch_shape(self._config, pad=0).split(rows)
        counted = " and ".join(f"{sizes.count(n)} x {n}" for n in dict.fromkeys(sizes))
        return f"{counted} rows of {self._config.row_tokens}"

    async def _built(self) -> list[Built]:
        workers = self._workers.processes
        return [built for one in workers for built in (await one.process.building()).done]


def _check_rewarded(name: str, outcomes: Sequence[Outcome]) -> None:
    """Refuses a reward function without any value; a run only counts single failed calls."""
    if any(outcome.value is not None for outcome in outcomes):
        return
    raise RuntimeError(
        f"rewards.functions {name}: no value for any of {len(outcomes)} completions: "
        f"{outcomes[0].error}"
    )


def _failed(outcomes: Sequence[Mapping[str, Outcome]]) -> int:
    return sum(outcome.value is None for row in outcomes for outcome in row.values())


def _describe(error: Exception) -> str:
    text = str(error).strip()
    is_ours = isinstance(error, RuntimeError | ValueError | OutOfMemory) and text
    return text if is_ours else f"{type(error).__name__}: {text}"
