"""Decides what a run does next, from its status and the clock.

    next        another training step, or None: training ends
    may_update  whether the update of a sampled step still fits, and whether to sample ahead
    due         the next duty: start of the run, between two steps, end of the run

Pure: clock readings and values in, decisions out. The start of a run with a time budget rehearses
the end, so that its duration is known. The end keeps this order: checkpoint, validation of the last
version, export of the best version, evaluation of what is exported, as time permits.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from configs.schema import Config
from pipeline.contracts.adapters import AdapterRef
from pipeline.contracts.decisions import (
    CHECKPOINT,
    EXPORT,
    VALIDATION,
    JournalEntry,
    RemainingTime,
    TrainingPhase,
    TrainStep,
    UpdateStart,
    WorkDeadline,
    evaluation_part,
)
from pipeline.control.alarms import Alarm, AlarmWatch
from pipeline.control.budget import show_duration
from pipeline.control.deadline import BudgetTooSmallError, Deadline
from pipeline.control.duties import NAMES, Duty, RunStatus
from pipeline.control.steering import Steering
from pipeline.control.step_planner import StepPlanner, plans_in_force, validations_within

VALIDATION_DUE = "validation_due"
EXPORT_SHARE = 0.05
"""Share of the time used that exports during training may take, before the end is near."""
_NEAR_EXPORTS = 4
_TEST_MARGIN = 0.2
"""Relative margin for the final evaluations."""
_UPDATE_PER_SAMPLING = 2.0
"""Assumed duration of a step relative to its sampling, until one was measured."""
_MINUTE_S = 60.0


@dataclass
class RunController:
    """Decisions of one process of a run.

    Attributes:
        config: of the run; with the values in force of what `launch.control` has set.
        deadline: arithmetic of the deadline, with the measurements so far.
        entries: the journal of earlier processes.
        step: where the run continues.
        began_s: time used when this process began to decide.
        used_before_s: time that earlier processes used.
        test_prompts: prompts of the test split.
        alarms: the state of the alarms.
    """

    config: Config
    deadline: Deadline
    entries: Sequence[Mapping[str, Any]]
    step: int
    began_s: float = 0.0
    used_before_s: float = 0.0
    test_prompts: int = 0
    alarms: AlarmWatch = field(init=False)
    _status: RunStatus = field(init=False)
    _now_s: float = field(default=0.0, init=False)
    _duty: Duty | None = field(default=None, init=False)
    _is_past_deadline: bool = field(default=False, init=False)
    _ended: bool = field(default=False, init=False)
    _current: TrainStep | None = field(default=None, init=False)
    _step_began_s: float = field(default=0.0, init=False)
    _exports_s: float = field(default=0.0, init=False)
    _validations_s: float = field(default=0.0, init=False)
    _checkpoint_requested: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Restores the state that earlier decisions left."""
        self._steering = Steering(self.config, self.entries, step=self.step, deadline=self.deadline)
        self.config = self._steering.config
        self.alarms = AlarmWatch(self.config)
        self._status = RunStatus(self.step)
        self._timed = self.deadline.time_s is not None
        self._planned_before = any(entry["event"] == "planned" for entry in self.entries)
        self._planner = StepPlanner(
            self.config, entries=plans_in_force(self.entries), step=self.step
        )
        measured = [entry for entry in self.entries if entry["event"] == "reserved"]
        self.deadline.shutdown.read(measured)
        saved = -1
        for entry in self.entries:
            if entry["event"] == "checkpoint":
                if entry["step"] != saved:
                    self.deadline.shutdown.observe(CHECKPOINT, entry["seconds"])
                saved = entry["step"]
        # On the run's clock: a process may end before the interval is over.
        ended_s = [entry["elapsed_s"] for entry in measured if entry["reason"] == VALIDATION]
        self._validated_at_s = max(ended_s, default=0.0)
        self._due_at = {e["step"] for e in self.entries if e["event"] == VALIDATION_DUE}
        self._checkpointed_s = self.began_s
        self._duties = self._start()

    # --- queries of the coordinator

    def next(self, status: RunStatus, now_s: float) -> TrainStep | None:
        """The next training step; None: training ends."""
        self._read(status, now_s)
        step, phase = status.step, self._phase(status.step)
        if self._ended or not self.deadline.allows(step, now_s, phase=phase):
            self._ended = True
            self._duties = self._end()
            return None
        journal: tuple[JournalEntry, ...] = ()
        if self._timed:
            new = self._planner.decide(
                step,
                steps_left=self.deadline.steps_left(
                    now_s, partial(self._validations_within, step), phase=phase
                ),
                prompts=self.deadline.prompts_that_fit(now_s, phase=phase),
            )
            if new is not None:
                journal = (self._planned(asdict(new), phase),)
        full = self.config.rollout.prompts_per_step
        self._current = TrainStep(
            step,
            phase,
            prompts=self._planner.prompts if self._timed else full,
            rate=self._planner.rate if self.config.plans_decay else None,
            lr=self.config.learner.lr,
            kl_coef=self.config.learner.kl_coef,
            deadline=self.deadline.reserving(self._reserved_during_step_s()),
            journal=journal,
        )
        self._step_began_s = now_s
        self._duties = self._between()
        return self._current

    def may_update(self, status: RunStatus, sampled_s: float, now_s: float) -> UpdateStart | None:
        """Whether the update of the current step still fits; an update cannot be abandoned.

        Args:
            status: of the run.
            sampled_s: seconds that sampling and rewards took.
            now_s: the time used.

        Returns:
            None: it does not fit.
        """
        self._read(status, now_s)
        step = self._current
        assert step is not None
        if step.phase == "grpo" and self._timed:
            share = self._share(step)
            if self.deadline.missing_for_update_s(sampled_s, now_s, share=share) > 0:
                return None
        ahead = None
        following = step.number + 1
        if (
            step.phase == "grpo"
            and self.config.rollout.ahead != "off"
            and self.deadline.allows(following, now_s)
        ):
            full = self.config.rollout.prompts_per_step
            ahead = TrainStep(following, prompts=full, deadline=step.deadline)
        return UpdateStart(ahead, self._remaining(step.number + 1))

    def due(self, status: RunStatus, now_s: float) -> Duty | None:
        """The next duty; None: nothing is due."""
        if self._current is not None:
            seconds, step = now_s - self._step_began_s, self._current
            self.deadline.step_time.observe(seconds, share=self._share(step), phase=step.phase)
            self._current = None
        if self._duty and self._duty.kind == "validate" and not self._is_past_deadline:
            self._validated_at_s = now_s
        self._read(status, now_s)
        self._duty = next(self._duties, None)
        self._is_past_deadline = False
        return self._duty

    def has_time_for(self, step: int, now_s: float) -> bool:
        """Whether step number `step` may take more time: a further sampling round."""
        return self.deadline.allows(step, now_s)

    def judge(
        self, metrics: Mapping[str, float], validations: Sequence[Mapping[str, Any]]
    ) -> tuple[Alarm, ...]:
        """The alarms of a step; see `AlarmWatch.judge`."""
        alarms = self.alarms.judge(metrics, validations)
        if any(alarm.action == "checkpoint" for alarm in alarms):
            self._checkpoint_requested = True
        return alarms

    def outlook(self, now_s: float) -> dict[str, float]:
        """Metrics of a trained step: time used and left, planned steps, seconds to the end.

        The end of a run of steps is an estimate without validations.
        """
        deadline, step, used = self.deadline, self._current, {"budget/used_s": now_s}
        assert step is not None
        if deadline.steps is None:
            left_s = max(0.0, deadline.left_s(now_s))
            steps = self._planner.plan.total_steps
            return used | {
                "budget/left_s": left_s,
                "budget/steps_planned": float(steps),
                "budget/expected_end_s": left_s,
            }
        # This step is the first one, or is not observed yet.
        step_s = deadline.step_time.expected_s(phase=step.phase) or now_s - self._step_began_s
        steps_s = (deadline.steps - step.number - 1) * (step_s + deadline.step_time.between_s)
        return used | {
            "budget/steps_planned": float(deadline.steps),
            "budget/expected_end_s": steps_s + deadline.shutdown_s,
        }

    # --- reports of the coordinator

    def observe(self, part: str, seconds: float) -> None:
        """Adds the measured seconds of a part of the shutdown."""
        self.deadline.shutdown.observe(part, seconds)
        if part == VALIDATION:
            self._validations_s += seconds
        duty = self._duty
        if part == EXPORT and duty and duty.kind == "export" and duty.reason != "rehearsal":
            self._exports_s += seconds

    def observe_update(self, step: TrainStep, seconds: float) -> None:
        """Adds the measured seconds of an update."""
        if step.phase == "grpo":
            self.deadline.update_time.observe(seconds, share=self._share(step))

    def abandoned(self, now_s: float) -> JournalEntry:
        """Takes note that the deadline of the current duty or step has passed."""
        self._is_past_deadline = True
        if self._current is not None:
            what, self._ended, self._current = "the training step", True, None
            self._duties = iter(())
        else:
            assert self._duty is not None
            what = NAMES.get(self._duty.kind, self._duty.kind)
        return JournalEntry(
            "abandoned",
            {"what": what, "step": self._status.step, "elapsed_s": now_s},
            f"{what} is abandoned: the remaining time is needed for the end of the run",
        )

    # --- sequences of duties

    def _start(self) -> Iterator[Duty]:
        """Parity, the rehearsal of the end, and requests that wait for the start."""
        yield from self._begin()
        before = self.config
        yield from self._steer()
        changed = self.config != before or self._status.step in self._steering.evaluated_at
        if changed and self._validation_is_due():
            yield self._validate(self._leaving_an_export())
        yield from self._steering.single_duties()

    def _begin(self) -> Iterator[Duty]:
        """Parity, evaluation before training; with a time budget a rehearsal of the end."""
        yield Duty("check_parity")
        if not self._timed:
            yield Duty("evaluate_before")
            if self._validation_is_due():
                yield self._validate()
            yield from self._repair()
            return
        if not (yield from self._rehearse()):
            if self._may_refuse:
                # How long the abandoned evaluation would have taken is unknown.
                more_s = self.deadline.reserve_for_export_s(tests=True)
                yield self._refuse(max(2 * self._now_s, (self.deadline.time_s or 0.0) + more_s))
            yield Duty("recover_best")
        answers = self.config.eval.samples * max(1, self.test_prompts)
        each_s = self.deadline.shutdown.part_s(evaluation_part("test")) / answers
        sampling_s = each_s * self.config.rollout.size
        self.deadline.step_time.estimate_s = _UPDATE_PER_SAMPLING * sampling_s
        phase = self._phase(self._status.step)
        missing_s = self.deadline.missing_s(self.deadline.prompts[1], self._now_s, phase=phase)
        if missing_s > 0 and self._may_refuse:
            assert self.deadline.time_s is not None
            yield self._refuse(self.deadline.time_s - self.used_before_s + missing_s)
        yield from self._export_if_better()

    def _rehearse(self) -> Generator[Duty, None, bool]:
        """Performs the duties of the end once; returns whether there was time for all of them."""
        deadline = self._leaving_an_export()
        yield Duty("evaluate_before", deadline)
        if self._deadline_passed():
            return False
        if self._status.exported is None and not self._status.export_is_behind:
            # The untrained policy, evaluated above, or that of a run of steps.
            yield Duty("export", reason="rehearsal")
        deadline = self._leaving_an_export()
        if self._validation_is_due():
            yield self._validate(deadline)
            if self._deadline_passed():
                return False
        yield from self._repair(deadline)
        return not self._deadline_passed()

    def _repair(self, deadline: WorkDeadline | None = None) -> Iterator[Duty]:
        """Recovers lost files of earlier validations that the end needs."""
        known = bool(self._status.validated)
        yield Duty("recover_best")
        if known and not self._status.validated:
            yield self._validate(deadline)
            if self._deadline_passed():
                return
        yield Duty("repair_answers", deadline)

    def _between(self) -> Iterator[Duty]:
        """Requests, validation, export of a better version, checkpoint; validates the last one."""
        yield from self._steer()
        began_s, self._validations_s = self._now_s, 0.0
        step = self._status.step
        if self._validation_is_due():
            yield self._validate(self._leaving_an_export())
            if self._deadline_passed():
                self._ended = True
                yield from self._steering.late_duties(step)
                return
        if self._timed:
            yield from self._export_if_better()
        requested = self._steering.wants("checkpoint") or self._checkpoint_requested
        requested |= self._now_s - self._checkpointed_s >= self.config.checkpoint.every_s
        if requested or step % self.config.checkpoint.every_steps == 0:
            self._checkpoint_requested, self._checkpointed_s = False, self._now_s
            yield Duty("checkpoint")
        self.deadline.step_time.observe_between(self._now_s - began_s - self._validations_s)
        yield from self._steering.single_duties()
        # Validating what seems to be the last version may leave time for one more step.
        if self._timed and not self.deadline.allows(step, self._now_s, phase=self._phase(step)):
            yield from self._validate_last()

    def _steer(self) -> Iterator[Duty]:
        """Takes up the requests of `launch.control`."""
        for duty in self._steering.duties(self._status, self._now_s):
            before, self.config = self.config, self._steering.config
            self._planner.settings, self.alarms.config = self.config.learner, self.config
            changed = self.config.reward_weights != before.reward_weights
            if changed:
                self.alarms = AlarmWatch(self.config)
            yield duty
            if changed and self.config.uses_rewards:
                yield Duty("evaluate_before", self._leaving_an_export())

    def _end(self) -> Iterator[Duty]:
        """Validates the last version, exports and evaluates the best one, as time permits.

        There is an export in any case. A version without any evaluation does not replace an
        exported version that has one.
        """
        yield Duty("checkpoint")
        yield from self._validate_last()
        yield Duty("load_best")
        best = self._status.best
        which: AdapterRef = "best" if best and best.step != self._status.step else "current"
        if not self._timed:
            yield Duty("test")
            yield Duty("export", adapter=which, reason="last")
            yield Duty("summarize")
            return
        deadline = self.deadline
        if best is not None and not self._status.export_is_loaded:
            yield Duty("export", adapter=which, reason="best")
        reserved_s = deadline.exit_s if best else deadline.reserve_for_export_s(tests=False)
        share = deadline.evaluated_share(self._now_s, reserved_s=reserved_s)
        yield Duty("test", deadline.reserving(reserved_s), share=share)
        exported = self._status.exported
        better = self._status.tested or exported is None or not exported.evaluated
        if best is None and not self._status.export_is_loaded and better:
            yield Duty("export", adapter=which, reason="last")
        yield Duty("summarize")

    def _validate_last(self) -> Iterator[Duty]:
        if not self._validation_is_due(last=True):
            return
        if not self._timed:
            yield self._validate()
        elif self.deadline.has_time_to_validate(self._now_s):
            yield self._validate(self._leaving_an_export())

    def _export_if_better(self) -> Iterator[Duty]:
        """Exports the best version if it is not the exported one, unless later is better."""
        status, deadline = self._status, self.deadline
        if not status.export_is_behind:
            return
        took_s = deadline.export_s
        near = deadline.left_s(self._now_s) - deadline.shutdown_s < _NEAR_EXPORTS * took_s
        cheap = self._exports_s + took_s <= EXPORT_SHARE * self._now_s
        if near or cheap or status.exported is None:
            assert status.best is not None
            which: AdapterRef = "current" if status.best.step == status.step else "best"
            yield Duty("export", adapter=which, reason="better")

    # --- single decisions

    def _validation_is_due(self, *, last: bool = False) -> bool:
        """Whether to validate the current version; once per step, also after interruptions.

        With `eval.every_minutes` a journaled decision holds for each process that repeats the step.
        """
        settings, step = self.config.eval, self._status.step
        if not settings.validates or step in self._status.validated:
            return False
        if last or step == 0 or step in self._steering.evaluated_at:
            return True
        if settings.every_minutes is None:
            return step % settings.every_steps == 0
        if step <= max(self._due_at, default=0):
            return step in self._due_at
        return self._now_s - self._validated_at_s >= _MINUTE_S * settings.every_minutes

    def _validate(self, deadline: WorkDeadline | None = None) -> Duty:
        """The validation duty; with `eval.every_minutes` the decision is journaled first."""
        step, journal = self._status.step, list[JournalEntry]()
        if self.config.eval.every_minutes is not None and step not in self._due_at:
            self._due_at.add(step)
            facts = {"step": step, "elapsed_s": self._now_s}
            journal.append(JournalEntry(VALIDATION_DUE, facts))
        return Duty("validate", deadline, journal=tuple(journal))

    @property
    def _may_refuse(self) -> bool:
        """Whether the budget may be refused: nothing was trained or decided yet."""
        return self._status.step == 0 and not self._planned_before

    def _refuse(self, minimum_s: float) -> Duty:
        time_s, exported = self.deadline.time_s, self._status.exported
        assert time_s is not None
        # In this run folder time was used already, and another process has to start.
        again_s = minimum_s + self.began_s
        there = exported is not None and exported.version == 0
        error = BudgetTooSmallError(
            f"budget: {show_duration(time_s)} leave no time for a step between the evaluations and "
            f"the export, as measured; the minimum is about {show_duration(minimum_s)}, or "
            f"{show_duration(again_s)} to continue in this run folder"
            + ("; the untrained policy is exported" if there else ""),
            minimum_s=minimum_s,
        )
        facts = {"minimum_s": minimum_s, "elapsed_s": self._now_s}
        return Duty("refuse", error=error, journal=(JournalEntry("refused", facts),))

    def _reserved_during_step_s(self) -> float:
        """Seconds to reserve for the end while a step runs that may have to be abandoned."""
        deadline, status = self.deadline, self._status
        margin_s = _TEST_MARGIN * deadline.tests_s
        if self.config.eval.validates and status.step not in status.validated:
            return deadline.shutdown_s + margin_s
        if status.export_is_behind or not self.config.eval.validates:
            return deadline.reserve_for_export_s(tests=True)
        return deadline.closing_s + margin_s

    def _leaving_an_export(self) -> WorkDeadline | None:
        seconds = self.deadline.reserve_for_export_s(tests=False)
        return self.deadline.reserving(seconds)

    def _planned(self, plan: Mapping[str, Any], phase: TrainingPhase) -> JournalEntry:
        full, prompts = self.config.rollout.prompts_per_step, plan["prompts"]
        step_s = self.deadline.step_time.expected_s(phase=phase)
        smaller = f", this one with {prompts} of {full} prompts" if prompts < full else ""
        return JournalEntry(
            "planned",
            {**plan, "step_s": step_s, "elapsed_s": self._now_s},
            f"plan: {plan['total_steps']} steps of about {step_s:.3g} s{smaller}",
        )

    def _remaining(self, steps: int) -> RemainingTime:
        """Training that is left after `steps` steps."""
        if self.deadline.steps is not None:
            return RemainingTime(self.deadline.steps - steps, float("inf"))
        left_s = self.deadline.left_s(self._now_s) - self.deadline.shutdown_s
        return RemainingTime(None, max(0.0, left_s))

    def _validations_within(self, step: int, steps: int) -> int:
        """Validations between `steps` steps, the first of which is number `step`."""
        step_s = self.deadline.step_time.expected_s(phase=self._phase(step))
        return validations_within(self.config.eval, step, steps, step_s=step_s)

    def _share(self, step: TrainStep) -> float:
        """Planned prompts as a share of a full step."""
        return 1.0 if step.phase == "sft" else step.prompts / self.config.rollout.prompts_per_step

    def _phase(self, step: int) -> TrainingPhase:
        return "sft" if step < self.config.sft_steps else "grpo"

    def _deadline_passed(self) -> bool:
        """Whether the last duty was abandoned at its deadline."""
        return self._is_past_deadline

    def _read(self, status: RunStatus, now_s: float) -> None:
        self._status, self._now_s = status, now_s
