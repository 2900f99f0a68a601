"""Values that describe adapters and exports across process boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

AdapterRef = Literal["current", "previous", "initial", "probe", "best"]
"""An adapter of the learner: the current version, the previous version (with `rollout.ahead`), the
initial adapter of the run, a random adapter for the probe, or the best version by validation."""


@dataclass(frozen=True)
class Published:
    """An adapter that the learner publishes to the samplers.

    Attributes:
        version: policy version.
        sha256: hash of the adapter.
        payload: the adapter in the transport's format; opaque to the coordinator.
    """

    version: int
    sha256: str
    payload: object


@dataclass(frozen=True)
class OpenedAdapter:
    """An adapter that a sampler has loaded from a file.

    Attributes:
        version: policy version; 0 is the base.
        sha256: hash of the adapter on the devices.
        what: description of the adapter and its origin.
    """

    version: int
    sha256: str
    what: str


@dataclass(frozen=True)
class Restored:
    """Result of restoring a checkpoint at the learner's start.

    Attributes:
        meta: the coordinator's data in the checkpoint; None if there was no checkpoint.
        where: the checkpoint folder and its host.
    """

    meta: Mapping[str, Any] | None
    where: str = ""


@dataclass(frozen=True)
class ExportReport:
    """A verified export.

    Attributes:
        folder: path of the export.
        mean_difference: mean log-prob difference to the policy over `tokens` tokens; None if
            device memory was too small for scoring, so that weights were compared instead.
        tokens: number of compared tokens.
        version: the policy version that was exported.
    """

    folder: str
    mean_difference: float | None
    tokens: int
    version: int


Format = Literal["hf", "peft", "orbax"]

FORMATS: tuple[Format, ...] = get_args(Format)
"""All export formats, in the order of writing."""
