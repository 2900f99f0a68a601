"""Evaluations of a run: before training, validations, and the final evaluation.

The test split and the further sets are evaluated twice: before the first step and after the last
one. In between only the validation split is evaluated; the version with the best validation is kept
and exported. When to evaluate is the coordinator's decision.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import ceil
from typing import Any

from pipeline.clock import Stopwatch
from pipeline.deadline import evaluation_part
from pipeline.evaluate import evaluation
from pipeline.evaluate.evaluation import Answer, Evaluation
from pipeline.evaluate.examples import COUNT, recorded_examples
from pipeline.evaluate.notices import record_notice
from pipeline.evaluate.recorded import (
    best_facts,
    comparable_since,
    is_better,
    last_entry,
)
from pipeline.evaluate.summary import prompts_of
from pipeline.rollout.dispatch import counting
from pipeline.rollout.workers import OutOfTime
from pipeline.run.history import rewards_version
from pipeline.run_context import RunContext
from pipeline.types import Completion, Prompt

_PIECES = (0.5, 0.75, 1.0)
"""Ends of the pieces, as shares of the prompts, of a set for which time may be too short."""


class EvaluationSchedule:
    """Evaluations of one run, and which version is the best.

    Attributes:
        best_facts: for `summary.json`: the best version and the last one, by validation; None:
            `load_best` has found none.
    """

    def __init__(self, run: RunContext) -> None:
        data = run.data
        self._run = run
        self._since = comparable_since(run.config)
        self._validation = data.validation.prompts if data.validation else ()
        self._tests = {"test": data.test.prompts} | {
            name: split.prompts for name, split in data.sets.items()
        }
        self._sampled: Sequence[Completion] = ()
        entries = run.folder.valid_entries("evaluated", since=self._since)
        self._validated = {one["step"]: one for one in entries if one["name"] == "validation"}
        self.best_facts: dict[str, Any] | None = None

    @property
    def validated(self) -> frozenset[int]:
        """Steps that need no further validation."""
        return frozenset(self._validated)

    @property
    def validations(self) -> list[dict[str, Any]]:
        """The journal entries of the validations that count, in the order of their steps."""
        return [self._validated[step] for step in sorted(self._validated)]

    @property
    def best(self) -> dict[str, Any] | None:
        """The journal entry of the best validation so far: by the metric, then the mean reward.

        Of equal ones it is the earliest. A validation of which no answer has a score is none.
        """
        best: dict[str, Any] | None = None
        for entry in self.validations:
            if is_better(entry, best):
                best = entry
        return best

    async def examples(self) -> Sequence[Completion]:
        """Answers to compare two ways of scoring: of the last evaluation, or recorded ones."""
        if not self._sampled:  # by this process
            longest = self._run.config.rollout.max_tokens
            found = recorded_examples(
                self._run.folder, self._run.maker.tokenizer, max_tokens=longest
            )
            self._sampled = found or await self._sample("test", self._tests["test"][:COUNT], None)
        return self._sampled[:COUNT]

    # --- before training

    async def evaluate_before(self, step: int, deadline: float | None) -> None:
        """Evaluates the policy at the start of the run on each test set, if the folder lacks it.

        Args:
            step: training steps done.
            deadline: when the evaluation is abandoned.

        Raises:
            OutOfTime: at the deadline.
        """
        recorded = self._recorded_before()
        missing = [name for name in self._tests if name not in recorded]
        if not missing:
            return
        if step:
            await self._run.workers.publish("initial")
        try:
            for name in missing:
                found = await self._timed(name, self._tests[name], deadline)
                self._record(f"{name}_before", 0, found)
        finally:
            if step:
                await self._run.workers.publish()

    def _recorded_before(self) -> dict[str, Evaluation]:
        """Evaluations before training in the run folder."""
        entries = {
            name: last_entry(self._run.folder, f"{name}_before", since=self._since)
            for name in self._tests
        }
        return {name: self._evaluation(entry) for name, entry in entries.items() if entry}

    # --- validation

    async def validate(
        self, step: int, deadline: float | None, *, save: Callable[[], Awaitable[None]]
    ) -> None:
        """Validates the current version; keeps its adapter if it is the best so far.

        Args:
            step: the current version.
            deadline: when the validation is abandoned.
            save: writes a checkpoint before the adapter is kept: a resumed run must find this
                version.

        Raises:
            OutOfTime: at the deadline.
        """
        found = await self._timed("validation", self._validation, deadline)
        rewards = rewards_version(self._run.folder.entries())
        if is_better({**found.means, "rewards_version": rewards}, self.best):
            await save()
            await self._run.workers.learner.keep_best()
        file = f"validation_{step:06d}"
        self._validated[step] = self._record("validation", step, found, file=file)
        if found.mean is None:
            self._run.records.event(
                "validation_excluded",
                f"step {step}: no answer of the validation has a score by eval.metric = "
                f'"{self._run.config.metric}", so this version is not compared with others',
                step=step,
            )

    async def recover_best(self) -> None:
        """Ensures that the file of the best adapter holds it: a kill may come before it does.

        Raises:
            DamagedFileError: if neither the file nor the checkpoint of the best version is there.
        """
        best = self.best
        if best is not None:
            await self._run.workers.learner.recover_best(best["step"], best["adapter_sha256"])

    # --- the end of the run

    async def load_best(self, step: int) -> None:
        """Loads the best version into the samplers, after `step` training steps."""
        best = self.best
        if best is None:
            return
        at, last = best["step"], self._validated[max(self._validated)]
        if at != step:
            published = await self._run.workers.publish("best")
            assert published.version == at, (published.version, at)
        facts, text = best_facts(best, last)
        compared = evaluation.compare(self._evaluation(last), self._evaluation(best))
        paired = ("paired_difference", "paired_ci95", "paired_p")
        self.best_facts = facts | {key: compared[key] for key in paired}
        self._run.records.event("best", text, **self.best_facts)

    async def test(
        self, step: int, deadline: float | None, *, share: float = 1.0
    ) -> dict[str, Any]:
        """Evaluates the loaded version on each test set, unless an earlier end has done so.

        Args:
            step: training steps done.
            deadline: when the evaluation is abandoned.
            share: share of each set's prompts to evaluate, the first ones; base and tuned policy
                are compared on these.

        Returns:
            For `summary.json`: the test split before and after, and each further set under `sets`.
            If the deadline left no time, only the evaluation before training.
        """
        before = self._recorded_before()
        compared: dict[str, Any] = {}
        version = step if self.best_facts is None else self.best_facts["step"]
        for name in self._tests:
            result = await self._test(
                name,
                before.get(name),
                version=version,
                step=step,
                share=share,
                deadline=deadline,
            )
            if name == "test":
                compared = result
            else:
                compared.setdefault("sets", {})[name] = result
        return compared

    async def _test(
        self,
        name: str,
        before: Evaluation | None,
        *,
        version: int,
        step: int,
        share: float,
        deadline: float | None,
    ) -> dict[str, Any]:
        """The result of one set: of recorded answers of this version, unless more are possible."""
        assert self._run.workers.published is not None
        prompts, adapter = self._tests[name], self._run.workers.published.sha256
        entry = last_entry(self._run.folder, f"{name}_after", since=self._since)
        if entry is not None and entry["adapter_sha256"] != adapter:
            entry = None
        known = 0 if entry is None else prompts_of(entry)
        if known < len(prompts):
            found, sampled = await self._evaluate_share(name, prompts, share, deadline)
            count = len(sampled) // self._run.config.eval.samples
            if count < len(prompts):
                self._run.records.event(
                    "evaluation_shortened",
                    f"{name}: there is time for {count} of {len(prompts)} prompts",
                    name=name,
                    prompts=count,
                    of=len(prompts),
                )
            if count > known:
                entry, known = None, count
                self._record(f"{name}_after", step, found, version=version)
                if name == "test":
                    self._sampled = sampled
        if not known:
            return {} if before is None else {"before": before.summary()}
        if entry is not None:
            found = self._evaluation(entry)
        if before is None:
            return {"after": found.summary()}
        result = evaluation.compare(before.first(known), found)
        self._run.records.comparison(name, result)
        return result

    # --- single evaluations

    async def _timed(
        self, name: str, prompts: Sequence[Prompt], deadline: float | None
    ) -> Evaluation:
        """An evaluation that the end of the run repeats; measures its duration."""
        watch = Stopwatch(self._run.clock.now)
        found, self._sampled = await self._evaluate(name, prompts, deadline)
        part, seconds, now_s = evaluation_part(name), watch.total_s, self._run.now_s
        self._run.deadline.parts.observe(part, seconds)
        # A resumed run reads it.
        self._run.records.journal("reserved", reason=part, seconds=seconds, elapsed_s=now_s)
        return found

    async def _evaluate(
        self, name: str, prompts: Sequence[Prompt], deadline: float | None
    ) -> tuple[Evaluation, list[Completion]]:
        completions = await self._sample(name, prompts, deadline)
        scored = self._run.config.uses_rewards or name == "validation"
        found = await evaluation.evaluate(
            prompts,
            completions,
            config=self._run.config,
            maker=self._run.maker,
            score=partial(self._run.workers.score, deadline=deadline) if scored else None,
        )
        return found, completions

    async def _sample(
        self, name: str, prompts: Sequence[Prompt], deadline: float | None
    ) -> list[Completion]:
        requests = evaluation.requests(prompts, phase=name, samples=self._run.config.eval.samples)
        with self._run.records.activity(name, "answers") as show:
            completions, _ = await self._run.workers.generate(
                requests,
                temperature=self._run.config.eval.temperature,
                deadline=deadline,
                report=counting(show, len(requests)),
            )
        return completions

    async def _evaluate_share(
        self, name: str, prompts: Sequence[Prompt], share: float, deadline: float | None
    ) -> tuple[Evaluation, list[Completion]]:
        """Evaluates as many of the first prompts as time allows, in pieces if time is short."""
        count = ceil(share * len(prompts))
        ends = [ceil(part * count) for part in ((1.0,) if share == 1 else _PIECES)]
        answers: list[Answer] = []
        sampled: list[Completion] = []
        try:
            for start, end in pairwise([0, *ends]):
                if start < end:
                    found, new = await self._evaluate(name, prompts[start:end], deadline)
                    answers += found.answers
                    sampled += new
        except OutOfTime:
            pass
        config = self._run.config
        return Evaluation(tuple(answers), config.metric, config.has_accuracy_reward), sampled

    def _evaluation(self, entry: Mapping[str, Any]) -> Evaluation:
        """The recorded answers; raises `DamagedFileError` as `RunFolder.read_rollouts`."""
        rows, config = self._run.folder.read_rollouts(entry["file"]), self._run.config
        return Evaluation.of(rows, metric=config.metric, of_accuracy=config.has_accuracy_reward)

    def _record(self, name: str, step: int, found: Evaluation, **more: Any) -> dict[str, Any]:
        """Records answers of the loaded adapter; see `Records.evaluation`."""
        records, published = self._run.records, self._run.workers.published
        assert published is not None
        for part, errors in found.errors.items():
            records.event(
                "evaluation_errors",
                f"{name}: {len(errors)} answer(s) without reward {part!r}, first: {errors[0]}",
                evaluation=name,
                step=step,
                name=part,
                count=len(errors),
                first=errors[0],
            )
        entry = records.evaluation(
            name, step, found.summary(), answers=found.rows, adapter=published.sha256, **more
        )
        if step == 0:
            record_notice(records, name, step, found, config=self._run.config)
        return entry
