"""When the policy is examined, on what, and which version of it is the best.

Test and the further sets are read twice: before the first step and after the last one. In between
only the validation split is; the version that did best on it is kept and is what is exported.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any

from configs.schema import Config
from pipeline.contracts.adapters import AdapterRef
from pipeline.contracts.clock import Stopwatch
from pipeline.contracts.record_files import DamagedFileError
from pipeline.contracts.rollouts import Completion, Prompt
from pipeline.control.deadline import Deadline
from pipeline.control.reserve import VALIDATION
from pipeline.control.reserve import evaluation as part_of
from pipeline.evaluate import evaluation
from pipeline.evaluate.earlier import earlier_result
from pipeline.evaluate.evaluation import Answer, Evaluation
from pipeline.inputs.dataset.splits import LoadedData
from pipeline.inputs.text.prompts import PromptMaker
from pipeline.inputs.text.tokenizer import Tokenizer
from pipeline.rollout.team import OutOfTime, Team
from pipeline.run.records import Records
from pipeline.run.run_folder import RunFolder
from rewards.base import Tags

_MINUTE_S = 60.0
_DUE = "validation_due"
_PIECES = (0.5, 0.75, 1.0)
"""Where the pieces end in which a set is read when there may be no time for all of it."""


@dataclass(frozen=True)
class Result:
    """What came out at the end.

    Attributes:
        compared: for `summary.json`: the test split before and after, and each further set. Where
            the deadline left no time for one, what it said when the run had ended before, with the
            `step` that it said that of, or else only what was before. Without what was before,
            where that was damaged and there was no time to measure it again.
        best: for `summary.json`: the exported version and the last one, by validation; None
            without a validation split.
        which: the adapter that was tested and is to be exported.
    """

    compared: dict[str, Any]
    best: dict[str, Any] | None
    which: AdapterRef

    @property
    def tested(self) -> bool:
        """Whether the test split says something of what is to be exported."""
        return "after" in self.compared and "step" not in self.compared


class EvaluationSchedule:
    """Evaluations of one run.

    Args:
        config: the protocol, and when to validate.
        data: the splits.
        tokenizer: for turning completions into text.
        team: who answers.
        records: where it is written down, and found again after a resume.
        deadline: is told how long the evaluations take.
    """

    def __init__(
        self,
        config: Config,
        *,
        data: LoadedData,
        tokenizer: Tokenizer,
        team: Team,
        records: Records,
        deadline: Deadline,
    ) -> None:
        self._config = config.eval
        self._tags = Tags.of(config.prompt)
        self._validation = data.validation.prompts if data.validation else ()
        self._tests = {"test": data.test.prompts} | {
            name: split.prompts for name, split in data.sets.items()
        }
        self._maker = PromptMaker(config.prompt, tokenizer)
        self._team = team
        self._records = records
        self._folder = records.folder
        self._deadline = deadline
        self._drawn: list[Completion] = []
        self._validated = _validations(self._folder)
        self._read: dict[int, Evaluation] = {}
        measured = list(self._folder.events("reserved"))
        deadline.reserve.read(measured)
        # On the run's own clock: a process may end before the minutes are over.
        ended_s = [entry["elapsed_s"] for entry in measured if entry["reason"] == VALIDATION]
        self._validated_at_s = max(ended_s, default=0.0)
        self._was_due = {entry["step"] for entry in self._folder.events(_DUE)}

    async def before(self, step: int) -> dict[str, Evaluation]:
        """The policy that the run began with, on each test set: from the run folder, or measured.

        Args:
            step: steps done so far.
        """
        found = self.recorded_before()
        missing = [name for name in self._tests if name not in found]
        if missing:
            async with self._in_force("initial" if step else "current"):
                for name in missing:
                    if self._is_initial(name):
                        found[name] = await self._timed(name, self._tests[name])
                        self._record(f"{name}_before", 0, found[name])
        return found

    def _is_initial(self, name: str) -> bool:
        """Whether the adapter in force is the one that was measured before, as far as is known."""
        entry, published = self._last(f"{name}_before"), self._team.published
        assert published is not None
        if entry is None or entry["adapter_sha256"] == published.sha256:
            return True
        self._records.event(
            "before_lost",
            f"{name}: what was measured before the first step is damaged and cannot be measured "
            "again: lora.start is another adapter than it was; the summary goes without it",
            name=name,
        )
        return False

    def recorded_before(self) -> dict[str, Evaluation]:
        """What the run folder has of `before`, by test set; damaged answers are journaled."""
        found = {}
        for name in self._tests:
            entry = self._last(f"{name}_before")
            try:
                if entry is not None:
                    found[name] = Evaluation.of(self._folder.read_answers(entry))
            except DamagedFileError as error:
                self._tell_damaged(error)
        return found

    def _last(self, name: str) -> dict[str, Any] | None:
        """The last entry of an evaluation of this name."""
        entries = [e for e in self._folder.valid_entries("evaluated") if e["name"] == name]
        return entries[-1] if entries else None

    def _record(self, name: str, step: int, found: Evaluation, **more: Any) -> dict[str, Any]:
        """Records answers that the adapter in force gave; see `Records.evaluation`."""
        assert self._team.published is not None
        adapter = self._team.published.sha256
        summary, rows = found.summary(), found.rows
        return self._records.evaluation(name, step, summary, answers=rows, adapter=adapter, **more)

    @property
    def test_prompts(self) -> int:
        """Prompts of the test split."""
        return len(self._tests["test"])

    async def examples(self, count: int) -> list[Completion]:
        """Some answers, for comparing two ways to score them: those of the last evaluation."""
        if not self._drawn:
            prompts = self._tests["test"][:count]
            self._drawn = (await self._examine("test", prompts))[1]
        return self._drawn[:count]

    def is_due(self, step: int, *, last: bool = False) -> bool:
        """Whether the validation split is to be read now; once a step, whatever interrupts.

        By the clock what was decided at a step holds for whoever comes to that step once more.
        """
        config = self._config
        if not config.validates or step in self._validated:
            return False
        if last or step == 0:
            return True
        if config.every_minutes is None:
            return step % config.every_steps == 0
        if step <= max(self._was_due, default=0):
            return step in self._was_due
        passed_s = self._deadline.clock.elapsed_s - self._validated_at_s
        return passed_s >= _MINUTE_S * config.every_minutes

    async def validate(self, step: int, *, save: Callable[[], Awaitable[None]]) -> None:
        """Reads the validation split; keeps the adapter if it is the best so far.

        Args:
            step: the version in force.
            save: writes a checkpoint. What is kept must not be newer than what a resume finds.
        """
        self._decide(step)
        found = await self._timed("validation", self._validation)
        best = self.best
        if best is None or found.accuracy.accuracy > best["accuracy"]:
            await save()
            await self._team.learner.keep_best()
        self._record_validation(step, found)
        self._validated_at_s = self._deadline.clock.elapsed_s

    def _record_validation(self, step: int, found: Evaluation) -> None:
        file = f"validation_{step:06d}"
        self._validated[step] = self._record("validation", step, found, file=file)
        self._read[step] = found

    async def repair(self, step: int, *, save: Callable[[], Awaitable[None]]) -> None:
        """Makes sure that the end finds the best adapter and the answers that it compares.

        What is missing or damaged is taken from another place in the run folder, or else measured
        again. Where the best adapter is nowhere, only the current one can be exported.

        Args:
            step: the version in force.
            save: as for `validate`.
        """
        known = bool(self._validated)
        await self.recover_best(step, save=save)
        if known and not self._validated:
            await self.validate(step, save=save)
        needed = {step} if self.best is None else {step, self.best["step"]}
        for at in sorted(needed & self._validated.keys()):
            try:
                self._answers(at)
            except DamagedFileError as error:
                self._tell_damaged(error)
                async with self._in_force("current" if at == step else "best"):
                    found = await self._timed("validation", self._validation)
                    self._record_validation(at, found)

    async def recover_best(self, step: int, *, save: Callable[[], Awaitable[None]]) -> None:
        """The part of `repair` that measures nothing: the best adapter is there, or given up."""
        best = self.best
        if best is None:
            return
        lost = best["step"]
        file = await self._team.learner.recover_best(lost, best["adapter_sha256"])
        what = f"the file of the best adapter, of step {lost}, was missing or damaged"
        if file == "recovered":
            self._records.event("best_recovered", f"{what}; it is written again", step=lost)
        if file != "lost":
            return
        gone = sorted(self._validated.keys() - {step})
        self._records.event(
            "best_lost",
            f"{what}, and neither checkpoints nor export have it; from now on the best is looked "
            f"for from step {step} on",
            step=step,
            lost=lost,
            gone=gone,
        )
        for at in gone:
            del self._validated[at]
        if step in self._validated:
            await save()
            await self._team.learner.keep_best()

    @asynccontextmanager
    async def _in_force(self, which: AdapterRef) -> AsyncIterator[None]:
        """Puts an adapter in force, and the current one again afterwards."""
        if which == "current":
            yield
            return
        await self._team.publish(which)
        try:
            yield
        finally:
            await self._team.publish()

    def _tell_damaged(self, error: DamagedFileError) -> None:
        self._records.event("answers_damaged", f"{error}; measuring again", what=str(error))

    def _decide(self, step: int) -> None:
        """Journals, before anything can interrupt it, that this step is one to validate at.

        Whoever does the step again validates there, whatever the clock says then.
        """
        if self._config.every_minutes is not None and step not in self._was_due:
            self._was_due.add(step)
            elapsed_s = self._deadline.clock.elapsed_s
            self._folder.journal(_DUE, step=step, elapsed_s=elapsed_s)

    @property
    def best(self) -> dict[str, Any] | None:
        """The journal's entry of the best validation so far, the earliest of equals."""
        validated = [self._validated[step] for step in sorted(self._validated)]
        return max(validated, key=lambda entry: entry["accuracy"], default=None)

    async def after(self, step: int, *, before: dict[str, Evaluation]) -> Result:
        """The best version by validation, or without one the last, on each test set."""
        return await self.test(step, await self.recall(step), before=before)

    async def test(
        self,
        step: int,
        recalled: tuple[AdapterRef, dict[str, Any] | None],
        *,
        before: dict[str, Evaluation],
        share: float = 1.0,
    ) -> Result:
        """What was recalled, on each test set; not again if the run had ended with it before.

        Args:
            step: steps done by now.
            recalled: what `recall` returned.
            before: what `before` returned.
            share: of each set's prompts, the first ones, that there is time for; both sides are
                compared on what was read.
        """
        which, best = recalled
        compared: dict[str, Any] = {}
        version = step if best is None else best["step"]
        for name in self._tests:
            result = await self._test(
                name, before.get(name), version=version, step=step, share=share
            )
            if name == "test":
                compared = result
            else:
                compared.setdefault("sets", {})[name] = result
        return Result(compared, best, which)

    async def _test(
        self, name: str, before: Evaluation | None, *, version: int, step: int, share: float
    ) -> dict[str, Any]:
        """The result of one set: what is read now, unless there is an earlier one that says more.

        Of another version an earlier one only is better than none.
        """
        assert self._team.published is not None
        prompts, adapter = self._tests[name], self._team.published.sha256
        earlier = earlier_result(self._folder, name, adapter=adapter)
        known = 0 if earlier is None or "step" in earlier else earlier["after"]["n"]
        if earlier is not None and known == len(prompts):
            return earlier
        found, drawn = await self._examine_some(name, prompts, share=share)
        count = len(drawn) // self._config.samples
        if count < len(prompts):
            self._records.event(
                "evaluation_shortened",
                f"{name}: time is left for {count} of {len(prompts)} prompts",
                name=name,
                prompts=count,
                of=len(prompts),
            )
        if count <= known:
            return earlier or ({} if before is None else {"before": before.summary()})
        self._record(f"{name}_after", step, found, version=version)
        if name == "test":
            self._drawn = drawn
        if before is None:
            return {"after": found.summary()}
        result = evaluation.compare(before.first(count), found)
        self._records.comparison(name, result)
        return result

    async def recall(self, step: int) -> tuple[AdapterRef, dict[str, Any] | None]:
        """Puts the best version in force.

        Returns:
            Which adapter that is and what `Result.best` says of it.
        """
        best = self.best
        if best is None:
            return "current", None
        at, last = best["step"], self._validated[max(self._validated)]
        which: AdapterRef = "current"
        if at != step:
            published = await self._team.publish("best")
            assert published.version == at, (published.version, at)
            which = "best"
        facts = {
            "step": at,
            "accuracy": best["accuracy"],
            "last_step": last["step"],
            "last_accuracy": last["accuracy"],
            **self._paired(last["step"], at),
        }
        self._records.event(
            "best",
            f"best by validation: step {at} with {facts['accuracy']:.1%}; "
            f"the last, step {facts['last_step']}, has {facts['last_accuracy']:.1%}",
            **facts,
        )
        return which, facts

    def _paired(self, last: int, best: int) -> dict[str, Any]:
        """The difference between two validations; nothing where there was no time to repair one."""
        try:
            compared = evaluation.compare(self._answers(last), self._answers(best))
        except DamagedFileError:
            return {}
        return {key: compared[key] for key in ("paired_difference", "paired_ci95", "paired_p")}

    async def _timed(self, name: str, prompts: Sequence[Prompt]) -> Evaluation:
        """An evaluation that will be done again at the end, and how long it takes."""
        watch = Stopwatch(self._deadline.clock.now)
        found, self._drawn = await self._examine(name, prompts)
        self._deadline.reserve.observe(part_of(name), watch.total_s)
        self._folder.journal(
            "reserved",
            reason=part_of(name),
            seconds=watch.total_s,
            elapsed_s=self._deadline.clock.elapsed_s,
        )
        return found

    async def _examine(
        self, name: str, prompts: Sequence[Prompt]
    ) -> tuple[Evaluation, list[Completion]]:
        completions = await self._team.generate(
            evaluation.requests(prompts, phase=name, samples=self._config.samples),
            temperature=self._config.temperature,
        )
        found = evaluation.judge(
            prompts,
            completions,
            maker=self._maker,
            tags=self._tags,
            extraction=self._config.extraction,
        )
        return found, completions

    async def _examine_some(
        self, name: str, prompts: Sequence[Prompt], *, share: float
    ) -> tuple[Evaluation, list[Completion]]:
        """The first prompts, as many as time allows: in pieces where it is short."""
        count = ceil(share * len(prompts))
        ends = [ceil(part * count) for part in ((1.0,) if share == 1 else _PIECES)]
        answers: list[Answer] = []
        drawn: list[Completion] = []
        try:
            for start, end in pairwise([0, *ends]):
                if start < end:
                    found, new = await self._examine(name, prompts[start:end])
                    answers += found.answers
                    drawn += new
        except OutOfTime:
            pass
        return Evaluation(tuple(answers)), drawn

    def _answers(self, step: int) -> Evaluation:
        """What was answered at a validation; raises `DamagedFileError` as `read_answers`."""
        if step not in self._read:
            rows = self._folder.read_answers(self._validated[step])
            self._read[step] = Evaluation.of(rows)
        return self._read[step]


def _validations(folder: RunFolder) -> dict[int, dict[str, Any]]:
    """Journal entries of the validations that count, by step."""
    found: dict[int, dict[str, Any]] = {}
    for entry in folder.valid_entries("evaluated", "best_lost"):
        if entry["event"] == "best_lost":
            found = {step: one for step, one in found.items() if step not in entry["gone"]}
        elif entry["name"] == "validation":
            found[entry["step"]] = entry
    return found
