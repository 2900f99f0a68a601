"""Adapters and exports as values that cross process boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

AdapterRef = Literal["current", "previous", "initial", "probe", "best"]
"""An adapter of the learner: the current one, the one of the version before (with `rollout.ahead`),
the one at the start of the run, a random one, or the best by validation so far."""

BestFile = Literal["whole", "recovered", "lost"]
"""The file of the best adapter: as it was written, written again from another place, or nowhere."""


@dataclass(frozen=True)
class Published:
    """An adapter on its way to the samplers.

    Attributes:
        version: policy version.
        sha256: hash of the adapter.
        payload: the adapter, in whatever form the transport likes; opaque to the coordinator.
    """

    version: int
    sha256: str
    payload: object


@dataclass(frozen=True)
class OpenedAdapter:
    """What a sampler holds after it opened an adapter itself.

    Attributes:
        version: policy version; 0 is the base.
        sha256: hash of what is on the devices.
        what: in words, what it is and where from.
    """

    version: int
    sha256: str
    what: str


@dataclass(frozen=True)
class Restored:
    """What a learner found when it started.

    Attributes:
        meta: what the coordinator saved with the checkpoint; None: there was no checkpoint.
        damaged: a line for each newer checkpoint that could not be used.
        where: the checkpoint folder and the host that it was looked for on.
    """

    meta: Mapping[str, Any] | None
    damaged: tuple[str, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class ExportReport:
    """A verified export.

    Attributes:
        folder: where it is.
        max_difference: largest log-prob difference to the policy, over `tokens` tokens; None where
            the devices had no room to score with, so that numbers were compared.
        tokens: tokens compared.
        version: the policy version that was exported.
    """

    folder: str
    max_difference: float | None
    tokens: int
    version: int


Format = Literal["hf", "peft", "orbax"]

FORMATS: tuple[Format, ...] = get_args(Format)
"""In the order in which they are written."""
