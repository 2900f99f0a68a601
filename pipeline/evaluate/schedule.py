"""Evaluations of a run: before training, validations, and the final evaluation.

The test split and the further sets are evaluated twice: before the first step and after the last
one. In between only the validation split is evaluated; the version with the best validation is kept
and exported. When to evaluate is the coordinator's decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from math import ceil
from typing import Any

from pipeline.deadline import evaluation_part
from pipeline.evaluate import evaluation
from pipeline.evaluate.evaluation import Answer, Evaluation
from pipeline.evaluate.examples import COUNT, recorded_examples
from pipeline.evaluate.notices import EVALUATION_NOTICE, evaluation_notice
from pipeline.evaluate.recorded import best_facts, best_of, evaluations, is_better
from pipeline.rollout.dispatch import counting
from pipeline.rollout.workers import OutOfTime
from pipeline.run.history import rewards_version
from pipeline.run_context import RunContext
from pipeline.types import Completion, Prompt

_PIECES = (0.5, 0.75, 1.0)
"""Ends of the pieces, as shares of the prompts, of a set for which time may be too short."""


class EvaluationSchedule:
    """Evaluations of one run, and which version is the best.

    `best_facts` is for `summary.json`: the best version and the last one, by validation; None:
    `load_best` has found none.
    """

    def __init__(self, run: RunContext) -> None:
        data = run.data
        self._run = run
        self._validation = data.validation.prompts if data.validation else ()
        self._tests = {"test": data.test.prompts} | {
            name: split.prompts for name, split in data.sets.items()
        }
        self._sampled: Sequence[Completion] = ()
        self._validated = {one["step"]: one for one in self._entries("validation")}
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
        """The journal entry of the best validation so far; see `recorded.best_of`."""
        return best_of(self.validations)

    async def examples(self) -> Sequence[Completion]:
        """Answers to compare two ways of scoring: of the last evaluation, or recorded ones."""
        if not self._sampled:  # by this process
            run = self._run
            longest = run.config.rollout.max_tokens
            self._sampled = recorded_examples(run.folder, run.maker.tokenizer, max_tokens=longest)
        if not self._sampled:
            self._sampled = await self._sample("test", self._tests["test"][:COUNT], None)
        return self._sampled[:COUNT]

    # --- before training

    async def evaluate_before(self, step: int, deadline: float | None) -> None:
        """Evaluates the policy at the start of the run on each test set, if the folder lacks it.

        `step` training steps are done. Raises `OutOfTime` at the deadline.
        """
        missing = [name for name in self._tests if not self._entries(f"{name}_before")]
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

    # --- validation

    async def validate(
        self, step: int, deadline: float | None, *, save: Callable[[], Awaitable[None]]
    ) -> None:
        """Validates the current version, `step`; keeps its adapter if it is the best so far.

        `save` writes a checkpoint before the adapter is kept: a resumed run must find this version.
        Raises `OutOfTime` at the deadline.
        """
        found = await self._timed("validation", self._validation, deadline)
        rewards = rewards_version(self._run.folder.entries())
        if is_better({**found.means, "rewards_version": rewards}, self.best):
            await save()
            await self._run.workers.learner.keep_best()
        file = f"validation_{step:06d}"
        self._validated[step] = self._record("validation", step, found, file=file)

    async def recover_best(self) -> None:
        """Ensures that the file of the best adapter holds it: a kill may come before it does."""
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
        compared = evaluation.compare(self._of_entry(last), self._of_entry(best))
        paired = ("paired_difference", "paired_ci95", "paired_p")
        self.best_facts = facts | {key: compared[key] for key in paired}
        self._run.records.event("best", text, **self.best_facts)

    async def test(
        self, step: int, deadline: float | None, *, share: float = 1.0
    ) -> dict[str, Any]:
        """Evaluates the loaded version on each test set, unless an earlier end has done so.

        `share` is that of each set's prompts to evaluate, the first ones, on which base and tuned
        policy are compared. At the deadline what has no answers is left out.

        Returns:
            For `summary.json`: the test split before and after, and each further set under `sets`.
        """
        compared = {
            name: await self._test(name, step, deadline, share=share) for name in self._tests
        }
        test = compared.pop("test")
        return test | {"sets": compared} if compared else test

    async def _test(
        self, name: str, step: int, deadline: float | None, *, share: float
    ) -> dict[str, Any]:
        """The result of one set: of the recorded answers of this version, if there are any."""
        run, prompts = self._run, self._tests[name]
        assert run.workers.published is not None
        before = self._recorded(f"{name}_before")
        found = self._recorded(f"{name}_after", adapter=run.workers.published.sha256)
        if found is None:
            found = await self._evaluate_share(name, prompts, share, deadline)
            if (count := found.prompts) < len(prompts):
                facts = {"name": name, "prompts": count, "of": len(prompts)}
                text = f"{name}: there is time for {count} of {len(prompts)} prompts"
                run.records.event("evaluation_shortened", text, **facts)
            if not count:
                return {} if before is None else {"before": before.summary()}
            version = step if self.best_facts is None else self.best_facts["step"]
            self._record(f"{name}_after", step, found, version=version)
        if before is None:
            return {"after": found.summary()}
        result = evaluation.compare(before.first(found.prompts), found)
        run.records.comparison(name, result)
        return result

    # --- single evaluations

    async def _timed(
        self, name: str, prompts: Sequence[Prompt], deadline: float | None
    ) -> Evaluation:
        """An evaluation that the end of the run repeats; measures its duration."""
        began_s = self._run.now_s
        found = await self._evaluate(name, prompts, deadline)
        self._run.observe(evaluation_part(name), began_s)
        return found

    async def _evaluate(
        self, name: str, prompts: Sequence[Prompt], deadline: float | None
    ) -> Evaluation:
        run = self._run
        self._sampled = await self._sample(name, prompts, deadline)
        scored = run.config.uses_rewards or name == "validation"
        return await evaluation.evaluate(
            prompts,
            self._sampled,
            config=run.config,
            maker=run.maker,
            score=partial(run.workers.score, deadline=deadline) if scored else None,
        )

    async def _sample(
        self, name: str, prompts: Sequence[Prompt], deadline: float | None
    ) -> Sequence[Completion]:
        run, settings = self._run, self._run.config.eval
        requests = evaluation.requests(prompts, phase=name, samples=settings.samples)
        with run.records.activity(name, "answers") as show:
            completions, _ = await run.workers.generate(
                requests,
                temperature=settings.temperature,
                deadline=deadline,
                report=counting(show, len(requests)),
            )
        return completions

    async def _evaluate_share(
        self, name: str, prompts: Sequence[Prompt], share: float, deadline: float | None
    ) -> Evaluation:
        """Evaluates as many of the first prompts as time allows, in pieces if time is short."""
        count = ceil(share * len(prompts))
        ends = [ceil(part * count) for part in ((1.0,) if share == 1 else _PIECES)]
        answers: list[Answer] = []
        with suppress(OutOfTime):
            for start, end in pairwise([0, *ends]):
                if start < end:
                    answers += (await self._evaluate(name, prompts[start:end], deadline)).answers
        config = self._run.config
        return Evaluation(tuple(answers), config.metric, config.has_accuracy_reward)

    def _entries(self, name: str) -> list[dict[str, Any]]:
        """The journal entries of an evaluation that count."""
        uses_rewards = self._run.config.uses_rewards
        entries = evaluations(self._run.folder.entries(), uses_rewards=uses_rewards)
        return [entry for entry in entries if entry["name"] == name]

    def _recorded(self, name: str, *, adapter: str | None = None) -> Evaluation | None:
        """The last recorded answers, if they are of this adapter; None: there are none."""
        entries = self._entries(name)
        if not entries or adapter not in {None, entries[-1]["adapter_sha256"]}:
            return None
        return self._of_entry(entries[-1])

    def _of_entry(self, entry: Mapping[str, Any]) -> Evaluation:
        rows, config = self._run.folder.read_rollouts(entry["file"]), self._run.config
        return Evaluation.of(rows, metric=config.metric, of_accuracy=config.has_accuracy_reward)

    def _record(self, name: str, step: int, found: Evaluation, **more: Any) -> dict[str, Any]:
        """Records answers of the loaded adapter; see `Records.evaluation`."""
        records, published = self._run.records, self._run.workers.published
        assert published is not None
        for part, count in Counter(part for part, _ in found.errors).items():
            first = next(why for failed, why in found.errors if failed == part)
            text = f"{name}: {count} answer(s) without reward {part!r}, first: {first}"
            facts = {"evaluation": name, "step": step, "name": part, "count": count, "first": first}
            records.event("evaluation_errors", text, **facts)
        entry = records.evaluation(
            name, step, found.summary(), answers=found.rows, adapter=published.sha256, **more
        )
        told = step or any(records.folder.events(EVALUATION_NOTICE))
        if not told and (why := evaluation_notice(found, self._run.config)) is not None:
            what = f"{name}: {why}"
            shown = f"WARNING: {what}"
            records.event(EVALUATION_NOTICE, shown, evaluation=name, step=step, what=what)
        return entry
