"""The checks of `launch.doctor` of the host itself: versions, chips and who holds them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from packaging.requirements import Requirement

from configs.schema import Config
from launch.host import Host

State = Literal["ok", "note", "fault"]
LOCK_FILE = "/tmp/libtpu_lockfile"  # libtpu's
_INSTALL = {"cpu": "--cpu", "tpu": "--tpu", "gpu": "--cuda13"}
"""Flags of `launch/bootstrap.sh`, by `plan.platform`."""
_TPU_ONLY = "libtpu"
_SHOWN = 3
"""Packages, processes or files that a finding names."""


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        check: its name.
        state: ok; note: a run is possible; fault: the configuration cannot run.
        finding: what was found.
        remedy: what to do about it; empty if it is ok.
    """

    check: str
    state: State
    finding: str
    remedy: str = ""


def packages(host: Host, config: Config | None) -> Finding:
    """Installed packages against what the project requires, and JAX of libtpu."""
    kind = config.plan.platform if config else "tpu" if host.chips() else "cpu"
    required = [Requirement("jax")]
    if host.version("gemma-grpo"):  # the project also runs from its sources
        ours = map(Requirement, metadata.requires("gemma-grpo") or ())
        required += [one for one in ours if one.marker is None]
    if host.version("jax") and kind == "tpu":
        of_jax = map(Requirement, metadata.requires("jax") or ())
        required += [one for one in of_jax if one.name == _TPU_ONLY]
    wrong = [
        f"{one.name} {found or 'is missing'}, needed: {one.specifier or 'any'}"
        for one in required
        if (found := host.version(one.name)) is None or found not in one.specifier
    ]
    if wrong:
        remedy = f"install the pinned versions: launch/bootstrap.sh {_INSTALL[kind]}"
        return Finding("packages", "fault", _some(wrong), remedy)
    names = ("jax", _TPU_ONLY, "ray")
    known = [f"{name} {host.version(name)}" for name in names if host.version(name)]
    return Finding("packages", "ok", ", ".join([f"Python {platform.python_version()}", *known]))


def tpu_checks(host: Host, config: Config | None) -> Iterator[Finding]:
    """The checks of TPU chips.

    Without a configuration chips are not needed, and with `RAY_ADDRESS` those of other hosts may
    serve a run: then what is wrong with them is a note.
    """
    from actors.placement import total_resources

    needed = 0 if config is None else int(sum(total_resources(config.plan).values()))
    state: State = "note" if config is None or "RAY_ADDRESS" in os.environ else "fault"
    yield _chips(host, needed, state)
    if devices := host.chips():
        yield _holders(host, devices, state)
        yield _ray_count(host, None if config is None else config.run.tpu_chips, needed, state)


def _chips(host: Host, needed: int, state: State) -> Finding:
    """Device files of the chips: their number and permissions."""
    devices = host.chips()
    if not devices:
        return Finding(
            "chips",
            state,
            "no TPU chip: neither /dev/accel* nor /dev/vfio/N exists",
            "choose a machine with a TPU (Kaggle: Settings, Accelerator), and start a container "
            "with its devices (docker run --privileged)",
        )
    shown = f"{len(devices)} chips, {devices[0]} to {devices[-1]}"
    if len(devices) < needed:
        remedy = "choose a machine with more, or a placement on fewer: see python -m launch.plan"
        return Finding("chips", state, f"{shown}; the plan needs {needed}", remedy)
    closed = [path for path in devices if not host.may_use(path)]
    if closed:
        shown = f"user id {host.uid} may not read and write {_some(closed)}"
        return Finding("chips", state, shown, f"sudo chmod a+rw {' '.join(closed)}")
    shown += ", readable and writable; make test-accelerator computes on them"
    return Finding("chips", "ok", shown)


def _holders(host: Host, devices: Sequence[str], state: State) -> Finding:
    """The processes that use the chips, and libtpu's lock file, which another user may own."""
    if holders := host.holders(devices):
        remedy = "wait until it ends, or end it: kill " + " ".join(map(str, holders))
        shown = f"the chips are in use by {_some(list(holders.values()))}"
        return Finding("holders", state, shown, remedy)
    owner = host.owner(LOCK_FILE)
    if owner not in {None, host.uid}:
        shown = f"{LOCK_FILE} is of another user (id {owner}): libtpu cannot lock it"
        remedy = f"delete it once no process of that user has the chips: sudo rm {LOCK_FILE}"
        return Finding("holders", state, shown, remedy)
    return Finding("holders", "ok", "no process that this user can see has the chips open")


def _ray_count(host: Host, given: int | None, needed: int, state: State) -> Finding:
    """What Ray counts as chips, and `run.tpu_chips`, which replaces the count."""
    there, counted = len(host.chips()), host.ray_chips if given is None else given
    shown = f"Ray counts {host.ray_chips} chips"
    if given is not None:
        shown += f"; run.tpu_chips = {given} replaces that"
    if max(needed, 1) <= counted <= there:
        return Finding("Ray's count", "ok", shown)
    shown += f"; there are {there} device files, and the plan needs {needed}"
    return Finding("Ray's count", state, shown, f"set run.tpu_chips = {there}")


def _some(names: Sequence[object]) -> str:
    """The first names of a list, and how many more there are."""
    more = [] if len(names) <= _SHOWN else [f"{len(names) - _SHOWN} more"]
    return ", ".join([*map(str, names[:_SHOWN]), *more])
