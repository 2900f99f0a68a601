"""Decisions on the requests of `launch.control`.

A request is taken up between two steps and journaled with the number of steps done. A process that
comes to that step again repeats it there, so a resumed run is the same run. Only `stop-after-step`
is never repeated, and `extend` needs no repetition: the budget is the sum of its journal entries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from configs.schema import Config
from configs.steering import steered, value_of, with_values
from pipeline.contracts.decisions import EXPORT, VALIDATION, JournalEntry
from pipeline.contracts.steering import (
    EXPORTED_COPY,
    STEERED,
    Request,
    Verb,
    described,
    sets_in_force,
    taken_up,
    values_at,
)
from pipeline.control.budget import live_extension
from pipeline.control.deadline import Deadline
from pipeline.control.duties import Duty, DutyKind, RunStatus

_ONCE: Mapping[Verb, DutyKind] = {
    "checkpoint": "checkpoint",
    "export": "export_copy",
    "stop-after-step": "stop",
}
"""Requests for a duty before the next step, in the order of these duties."""


class Steering:
    """What requests have changed, and decisions on new ones.

    Args:
        config: of the run, with old or new values of what was set.
        entries: the journal of earlier processes.
        step: where the run continues.
        deadline: of the run; extensions add to it.

    Attributes:
        config: the configuration in force.
        evaluated_at: numbers of steps after which a validation was requested.
    """

    def __init__(
        self,
        config: Config,
        entries: Iterable[Mapping[str, Any]],
        *,
        step: int,
        deadline: Deadline,
    ) -> None:
        entries, self._deadline = list(entries), deadline
        sets = sets_in_force(entries)
        values = values_at(sets, step=step)
        self.config = with_values(config, values) if values else config
        earlier = taken_up(entries)
        self.evaluated_at = {one["step"] for one in earlier if one["verb"] == "evaluate"}
        self._wanted: set[Verb] = set()
        repeated = {one.request for one in sets}
        repeated |= {one["request"] for one in earlier if one["verb"] in {"checkpoint", "export"}}
        exported = [one["step"] for one in entries if one["event"] == EXPORTED_COPY]
        self._ahead = [
            one
            for one in earlier
            if one["request"] in repeated
            and (one["step"] > step or (one["step"] == step and _is_unfinished(one, exported)))
        ]

    def duties(self, status: RunStatus, now_s: float) -> Iterator[Duty]:
        """Takes up requests between two steps, one by one: each is in force with its duty.

        First those that an earlier process took up here; then new ones, unless earlier ones follow
        at a later step, because requests keep their order.

        Args:
            status: of the run.
            now_s: the time used.
        """
        step = status.step
        here = [one for one in self._ahead if one["step"] == step]
        self._ahead = [one for one in self._ahead if one["step"] > step]
        for entry in here:
            request = Request.of(entry)
            self._put_into_force(request, step)
            yield Duty("steer", request=request)
        for request in () if self._ahead else status.requests:
            journal = self._decide(request, step, now_s)
            if "refused" not in journal[0].facts:
                self._put_into_force(request, step)
            yield Duty("steer", request=request, journal=journal)

    def wants(self, verb: Verb) -> bool:
        """Whether this is requested now; a later call returns False."""
        found = verb in self._wanted
        self._wanted.discard(verb)
        return found

    def single_duties(self) -> Iterator[Duty]:
        """The duties that are requested now."""
        for verb, kind in _ONCE.items():
            if self.wants(verb):
                yield Duty(kind)

    def late_duties(self, step: int) -> Iterator[Duty]:
        """Those of them for which there is time at the end of the run; an export is refused."""
        journal: tuple[JournalEntry, ...] = ()
        if self.wants("export"):
            why = "the time left is needed for the end of the run"
            text = f"export was refused after step {step}: {why}"
            journal = (JournalEntry(EXPORTED_COPY, {"step": step, "failed": why}, text),)
        if self.wants("checkpoint") or journal:
            yield Duty("checkpoint", journal=journal)
        if self.wants("stop-after-step"):
            yield Duty("stop")

    def _decide(self, request: Request, step: int, now_s: float) -> tuple[JournalEntry, ...]:
        """Takes a new request up, or refuses it; what to journal."""
        facts = {**request.facts, "step": step, "elapsed_s": now_s}
        further = []
        try:
            check(request, self.config)
            self._check_time(request, now_s)
            if request.verb == "set":
                assert request.key is not None
                changed = with_values(self.config, {request.key: request.value})
                facts["old"] = value_of(self.config.model_dump(), request.key)
                facts["value"] = value_of(changed.model_dump(), request.key)
            elif request.verb == "extend":
                more = live_extension(request.value, self.config)
                self._deadline.extend(steps=more.steps, seconds=more.time_s)
                added = {"step": step, "steps": more.steps, "time_s": more.time_s}
                further.append(JournalEntry("extended", added))
        except ValueError as mistake:
            facts["refused"] = str(mistake).replace("\n", "; ")
        return (JournalEntry(STEERED, facts, described(facts)), *further)

    def _check_time(self, request: Request, now_s: float) -> None:
        parts: Mapping[Verb, str] = {"evaluate": VALIDATION, "export": EXPORT}
        if self._deadline.time_s is None or request.verb not in parts:
            return
        needed_s = self._deadline.shutdown.part_s(parts[request.verb])
        if not self._deadline.has_time_for(needed_s, now_s):
            raise ValueError("the time left is needed for the end of the run")

    def _put_into_force(self, request: Request, step: int) -> None:
        if request.verb == "set":
            assert request.key is not None
            self.config = with_values(self.config, {request.key: request.value})
        elif request.verb == "evaluate":
            self.evaluated_at.add(step)
        elif request.verb in _ONCE:
            self._wanted.add(request.verb)


def _is_unfinished(entry: Mapping[str, Any], exported: Collection[int]) -> bool:
    """Whether a process has ended between an export's request and its end."""
    return entry["verb"] == "export" and entry["step"] not in exported


def check(request: Request, config: Config) -> None:
    """Refuses a request that no run with this configuration can take up.

    Raises:
        ValueError: with the reason.
    """
    if request.verb == "set":
        assert request.key is not None
        steered(config, request.key, request.value)
    elif request.verb == "extend":
        live_extension(request.value, config)
    elif request.verb == "evaluate" and not config.eval.validates:
        raise ValueError(
            "evaluate: the run has no validation split, and its test split is evaluated before and "
            "after training only"
        )
