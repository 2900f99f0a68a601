"""Decisions on the requests of `launch.control`.

A request is taken up between two steps and journaled with the number of steps done. A process that
comes to that step again repeats it there, so a resumed run is the same run. Only `stop-after-step`
is never repeated, and `extend` needs no repetition: the budget is the sum of its journal entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from configs.schema import Config
from configs.steering import is_weight, steered, value_of, with_values
from pipeline.contracts.decisions import EXPORT, VALIDATION, JournalEntry
from pipeline.contracts.steering import (
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

_ONCE: tuple[Verb, ...] = ("checkpoint", "export")
"""Requests that act once: a step that is trained again repeats them."""


class Steering:
    """What requests have changed, and decisions on new ones.

    Args:
        config: of the run, with old or new values of what was set.
        entries: the journal of earlier processes.
        step: where the run continues.
        deadline: of the run.

    Attributes:
        config: the configuration in force.
        evaluated_at: numbers of steps after which a validation was requested.
        wanted: requests to perform before the next step.
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
        self.wanted: set[Verb] = set()
        in_force = {one.request for one in sets}
        self._replayed = [
            (one["step"], Request.of(one))
            for one in earlier
            if one["step"] > step and (one["verb"] in _ONCE or one["request"] in in_force)
        ]

    def earlier(self, step: int) -> list[Request]:
        """The requests that an earlier process took up after `step` steps, to be repeated."""
        found = [request for at, request in self._replayed if at == step]
        self._replayed = [(at, request) for at, request in self._replayed if at > step]
        return found

    @property
    def accepts(self) -> bool:
        """Whether new requests may be taken up: all earlier ones are in force."""
        return not self._replayed

    def decide(self, request: Request, *, step: int, now_s: float) -> tuple[JournalEntry, ...]:
        """Takes a new request up, or refuses it; what to journal.

        Args:
            request: not in the journal yet.
            step: training steps done.
            now_s: the time used.
        """
        facts = {**request.facts, "step": step, "elapsed_s": now_s}
        further = []
        try:
            check(request, self.config)
            self._check_time(request, now_s)
            if request.verb == "set":
                assert request.key is not None
                changed = steered(self.config, request.key, request.value).model_dump()
                facts["old"] = value_of(self.config.model_dump(), request.key)
                facts["value"] = value_of(changed, request.key)
            elif request.verb == "extend":
                more = live_extension(request.value, self.config)
                self._deadline.extend(steps=more.steps, seconds=more.time_s)
                added = {"steps": more.steps, "time_s": more.time_s}
                further.append(JournalEntry("extended", {"step": step, **added}))
        except ValueError as mistake:
            facts["refused"] = str(mistake).replace("\n", "; ")
        return (JournalEntry(STEERED, facts, described(facts)), *further)

    def perform(self, request: Request, *, step: int) -> bool:
        """Puts a request into force, as far as it is a matter of decisions.

        Returns whether it changes the rewards.
        """
        if request.verb == "set":
            assert request.key is not None
            self.config = with_values(self.config, {request.key: request.value})
            return is_weight(request.key)
        if request.verb == "evaluate":
            self.evaluated_at.add(step)
        elif request.verb != "extend":
            self.wanted.add(request.verb)
        return False

    def take(self, verb: Verb) -> bool:
        """Whether this is wanted now; it is not wanted again."""
        found = verb in self.wanted
        self.wanted.discard(verb)
        return found

    def _check_time(self, request: Request, now_s: float) -> None:
        deadline = self._deadline
        parts = {"evaluate": VALIDATION, "export": EXPORT}
        if deadline.time_s is None or request.verb not in parts:
            return
        if not deadline.has_time_for(deadline.shutdown.part_s(parts[request.verb]), now_s):
            raise ValueError("the time left is needed for the end of the run")


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
