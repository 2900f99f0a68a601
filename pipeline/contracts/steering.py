"""Requests of `launch.control` to a running run, and what the journal says about them.

A request is taken up between two steps: the journal's event `steered` names its step. A resumed run
repeats it there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from configs.schema import Config
from configs.steering import value_of, with_values
from configs.toml_text import show_value

STEERED = "steered"
"""Journal event: a request was taken up, or refused: then it has the reason, `refused`."""
EXPORTED_COPY = "exported_copy"
"""Journal event: a requested export has ended."""
REWARDS_CHANGED = "rewards_changed"
"""Journal event: the rewards have changed; earlier scores are not comparable."""

_OF_SET = ("request", "step", "key", "old", "value")
Verb = Literal["checkpoint", "evaluate", "export", "stop-after-step", "set", "extend"]
VERBS: tuple[Verb, ...] = get_args(Verb)


@dataclass(frozen=True)
class Request:
    """A request to a running run.

    Attributes:
        id: unique in the run.
        verb: what to do.
        key: set: the key.
        value: set: the new value; extend: the amount as text.
    """

    id: str
    verb: Verb
    key: str | None = None
    value: Any = None

    @property
    def facts(self) -> dict[str, Any]:
        """The request in the journal."""
        given = {"key": self.key} if self.verb == "set" else {}
        given |= {"value": self.value} if self.verb in {"set", "extend"} else {}
        return {"request": self.id, "verb": self.verb, **given}

    @staticmethod
    def of(facts: Mapping[str, Any]) -> Request:
        """The request of `facts`.

        Raises:
            ValueError: if the verb is unknown, or what it needs is missing.
        """
        verb, key, value = facts.get("verb"), facts.get("key"), facts.get("value")
        if verb not in VERBS or "request" not in facts:
            raise ValueError(f"no request of this version: {dict(facts)}")
        if (verb == "set" and key is None) or (verb == "extend" and not isinstance(value, str)):
            raise ValueError(f"{verb}: no key, or no amount: {dict(facts)}")
        return Request(facts["request"], verb, key, value)


@dataclass(frozen=True)
class SetValue:
    """A journaled `set`.

    Attributes:
        request: id of the request.
        step: training steps done before it.
        key: the key.
        old: value before it.
        new: value after it.
    """

    request: str
    step: int
    key: str
    old: Any
    new: Any


_DONE: Mapping[Verb, str] = {
    "checkpoint": "a checkpoint is written",
    "evaluate": "this version is validated",
    "export": "this version is exported",
    "stop-after-step": "the run stops; the same command resumes it",
}


def described(facts: Mapping[str, Any]) -> str:
    """A `steered` entry as a sentence."""
    verb, after = facts["verb"], f"after step {facts['step']}:"
    if "refused" in facts:
        return f"{verb} was refused after step {facts['step']}: {facts['refused']}"
    if verb == "set":
        old, new = show_value(facts["old"]), show_value(facts["value"])
        return f"{facts['key']} = {new} from step {facts['step'] + 1} on (it was {old})"
    if verb == "extend":
        return f"{after} the budget is extended by {facts['value']}"
    return f"{after} {_DONE[verb]}"


def taken_up(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The `steered` entries of requests that were not refused, in the order of their steps."""
    return [entry for entry in entries if entry["event"] == STEERED and "refused" not in entry]


def sets_in_force(entries: Iterable[Mapping[str, Any]]) -> list[SetValue]:
    """The journaled `set`s, oldest first.

    Without those of weights that a later start with `--accept rewards` has changed: its values hold
    from any step on.
    """
    found: list[SetValue] = []
    for entry in entries:
        if entry["event"] == REWARDS_CHANGED and "request" not in entry:
            keys = {key for key, _, _ in entry["changes"]}
            found = [one for one in found if one.key not in keys]
        elif entry["event"] == STEERED and entry["verb"] == "set" and "refused" not in entry:
            found.append(SetValue(*(entry[name] for name in _OF_SET)))
    return found


def values_at(sets: Iterable[SetValue], *, step: int | None = None) -> dict[str, Any]:
    """The values of all keys that were ever set, as they are after `step` steps.

    Args:
        sets: oldest first.
        step: training steps done; None: after all of `sets`.
    """
    found: dict[str, Any] = {}
    for one in sets:
        found.setdefault(one.key, one.old)
        if step is None or one.step <= step:
            found[one.key] = one.new
    return found


def with_sets(config: Config, entries: Iterable[Mapping[str, Any]]) -> Config:
    """The configuration of a start with the values that were set since the first one.

    A key has its last value if the file has that one or the one before the first `set`; otherwise
    the file's, which is a change of the run's settings.

    Args:
        config: as the user gives it.
        entries: the journal.

    Raises:
        ConfigError: if the values do not suit other settings, which have changed.
    """
    sets, given = sets_in_force(entries), config.model_dump()
    first, last = values_at(sets, step=-1), values_at(sets)
    changed = {}
    for key, old in first.items():
        try:
            if value_of(given, key) == old != last[key]:
                changed[key] = last[key]
        except KeyError:
            continue  # the part is gone, which is a change of the run's settings
    return with_values(config, changed) if changed else config
