"""When the policy is examined, on what, and which version of it is the best.

Test and the further sets are read twice: before the first step and after the last one. In between
only the validation split is; the version that did best on it is kept and is what is exported.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from configs.schema import Config
from pipeline.data.splits import LoadedData
from pipeline.datatypes import Completion, Prompt, Which
from pipeline.deadline import Deadline, Stopwatch
from pipeline.evaluate import evaluation
from pipeline.evaluate.evaluation import Evaluation
from pipeline.records import Records
from pipeline.team import Team
from pipeline.text.prompts import PromptMaker
from pipeline.text.tokenizer import Tokenizer
from rewards.base import Tags

_MINUTE_S = 60.0


@dataclass(frozen=True)
class Result:
    """What came out at the end.

    Attributes:
        compared: for `summary.json`: the test split before and after, and each further set.
        best: for `summary.json`: the exported version and the last one, by validation; None
            without a validation split.
        which: the adapter that was tested and is to be exported.
        completions: the answers to the test split.
    """

    compared: dict[str, Any]
    best: dict[str, Any] | None
    which: Which
    completions: list[Completion]


class Examiner:
    """Evaluations of one run.

    Args:
        config: the protocol, and when to validate.
        data: the splits.
        tokenizer: for turning completions into text.
        team: who answers.
        records: where it is written down, and found again after a resume.
        deadline: is told what to reserve for the end.
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
        self._validated_at_s = deadline.clock.elapsed_s

    async def before(self, step: int) -> dict[str, Evaluation]:
        """The policy that the run began with, on each test set; read from the run folder if there.

        Raises:
            RuntimeError: if it is not there and the policy has learned since.
        """
        found = {}
        for name, prompts in self._tests.items():
            file = f"{name}_before"
            rows = self._folder.read_rollouts(file)
            if rows is None and step:
                raise RuntimeError(
                    f"{self._folder.rollouts / file}.jsonl is gone, and what the policy answered "
                    f"before its {step} steps cannot be measured any more"
                )
            if rows is None:
                found[name] = await self._timed(name, prompts)
                self._records.evaluation(file, 0, found[name].summary())
                # Last: it says that all is recorded.
                self._folder.write_rollouts(file, found[name].rows)
            else:
                found[name] = Evaluation.of(rows)
        self._reserve()
        return found

    def is_due(self, step: int, *, last: bool = False) -> bool:
        """Whether the validation split is to be read now; once a step, whatever interrupts."""
        config = self._config
        if not config.validates or step in self._folder.validated:
            return False
        if last or step == 0:
            return True
        if config.every_minutes is None:
            return step % config.every_steps == 0
        passed_s = self._deadline.clock.elapsed_s - self._validated_at_s
        return passed_s >= _MINUTE_S * config.every_minutes

    async def validate(self, step: int, *, save: Callable[[], Awaitable[None]]) -> None:
        """Reads the validation split; keeps the adapter if it is the best so far.

        Args:
            step: the version in force.
            save: writes a checkpoint. What is kept must not be newer than what a resume finds.
        """
        found = await self._timed("validation", self._validation)
        best = self.best
        if best is None or found.accuracy.accuracy > best[1].accuracy.accuracy:
            await save()
            await self._team.learner.keep_best()
        self._records.evaluation("validation", step, found.summary())
        self._folder.write_rollouts(_validation_file(step), found.rows)  # last, as above
        self._validated_at_s = self._deadline.clock.elapsed_s
        self._reserve()

    @property
    def best(self) -> tuple[int, Evaluation] | None:
        """The best validation so far and its step, the earliest of equals."""
        validated = [(step, self._validated(step)) for step in self._folder.validated]
        return max(validated, key=lambda pair: pair[1].accuracy.accuracy, default=None)

    async def after(self, step: int, *, before: dict[str, Evaluation]) -> Result:
        """The best version by validation, or without one the last, on each test set."""
        which, best = await self._recall(step)
        compared: dict[str, Any] = {}
        completions: list[Completion] = []
        for name, prompts in self._tests.items():
            found, drawn = await self._examine(name, prompts)
            self._folder.write_rollouts(f"{name}_after", found.rows)
            version = step if best is None else best["step"]
            self._records.evaluation(f"{name}_after", step, found.summary(), version=version)
            result = evaluation.compare(before[name], found)
            self._records.comparison(name, result)
            if name == "test":
                compared, completions = result, drawn
            else:
                compared.setdefault("sets", {})[name] = result
        return Result(compared, best, which, completions)

    async def _recall(self, step: int) -> tuple[Which, dict[str, Any] | None]:
        """Puts the best version in force."""
        best = self.best
        if best is None:
            return "current", None
        at, found = best
        last = self._validated(step)
        which: Which = "current"
        if at != step:
            published = await self._team.publish("best")
            which = "best"
            if published.version != at:
                # The file is of a step that was done again after a damaged checkpoint.
                self._records.event("best_lost", f"the adapter of step {at} is gone", step=at)
                at, found, which = step, last, "current"
                await self._team.publish()
        compared = evaluation.compare(last, found)
        facts = {
            "step": at,
            "accuracy": found.accuracy.accuracy,
            "last_step": step,
            "last_accuracy": last.accuracy.accuracy,
            **{key: compared[key] for key in ("paired_difference", "paired_ci95", "paired_p")},
        }
        self._records.event(
            "best",
            f"best by validation: step {at} with {facts['accuracy']:.1%}; "
            f"the last, step {step}, has {facts['last_accuracy']:.1%}",
            **facts,
        )
        return which, facts

    async def _timed(self, name: str, prompts: Sequence[Prompt]) -> Evaluation:
        """An evaluation that will be done again at the end, and how long it takes."""
        watch = Stopwatch(self._deadline.clock.now)
        found, _ = await self._examine(name, prompts)
        self._folder.journal("reserved", reason=f"{name} evaluation", seconds=watch.total_s)
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

    def _reserve(self) -> None:
        """Reserves for the end what each evaluation took at most."""
        longest: dict[str, float] = {}
        for entry in self._folder.events("reserved"):
            reason = entry["reason"]
            longest[reason] = max(longest.get(reason, 0.0), entry["seconds"])
        self._deadline.evaluations_s = sum(longest.values())

    def _validated(self, step: int) -> Evaluation:
        rows = self._folder.read_rollouts(_validation_file(step))
        assert rows is not None, step
        return Evaluation.of(rows)


def _validation_file(step: int) -> str:
    return f"validation_{step:06d}"
