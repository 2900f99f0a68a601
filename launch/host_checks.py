"""The checks of `launch.doctor` of the host itself: versions, chips and who holds them."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from configs.schema import Config
from launch.host import Host, user_name

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
    """Python and installed packages against what the project and its JAX require."""
    kind = "tpu" if config is None else config.plan.platform
    wrong = [
        f"{one.name} {host.version(one.name) or 'is missing'}, needed: {one.specifier or 'any'}"
        for one in _required(host)
        if (one.name != _TPU_ONLY or kind == "tpu") and not _has(host, one)
    ] + _shadowed("jax")
    if wrong:
        optional = config is None and all(line.startswith(_TPU_ONLY) for line in wrong)
        remedy = f"install the pinned versions: launch/bootstrap.sh {_INSTALL[kind]}"
        return Finding("packages", "note" if optional else "fault", _some(wrong), remedy)
    names = ("jax", _TPU_ONLY, "ray")
    known = [f"{name} {host.version(name)}" for name in names if host.version(name)]
    return Finding("packages", "ok", ", ".join([f"Python {platform.python_version()}", *known]))


def _shadowed(name: str) -> list[str]:
    """Whether another package than the installed one is imported, as from the current folder."""
    try:
        installed = metadata.distribution(name).locate_file(f"{name}/__init__.py")
    except metadata.PackageNotFoundError:
        return []
    spec = find_spec(name)
    imported = None if spec is None else spec.origin
    if imported is not None and Path(imported).resolve() == Path(str(installed)).resolve():
        return []
    return [f"{name} is imported from {imported}, not from {installed}: its version is unknown"]


def _has(host: Host, required: Requirement) -> bool:
    version = host.version(required.name)
    return version is not None and version in required.specifier


def _required(host: Host) -> list[Requirement]:
    """What the project requires, if it is installed, and what JAX requires of libtpu."""
    found = []
    for name, part in (("gemma-grpo", ""), ("jax", _TPU_ONLY)):
        if host.version(name) is None:
            if part:  # the project itself also runs from its sources
                found.append(Requirement(name))
            continue
        lines = map(Requirement, metadata.requires(name) or ())
        found += [one for one in lines if (one.name == part if part else one.marker is None)]
    return found


# --- chips


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
    yield _lock_file(host, state)
    yield from _variables(needed, state)
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
        shown = f"user {user_name(host.uid)} may not read and write {_some(closed)}"
        return Finding("chips", state, shown, f"sudo chmod a+rw {' '.join(closed)}")
    shown += ", readable and writable; make test-accelerator computes on them"
    return Finding("chips", "ok", shown)


def _holders(host: Host, devices: Sequence[str], state: State) -> Finding:
    holders = host.holders(devices)
    if not holders:
        return Finding("holders", "ok", "no process that this user can see has the chips open")
    remedy = "wait until it ends, or end it: kill " + " ".join(map(str, holders))
    shown = f"the chips are in use by {_some(list(holders.values()))}"
    return Finding("holders", state, shown, remedy)


def _lock_file(host: Host, state: State) -> Finding:
    """The lock file of libtpu, which does not start if it is another user's."""
    owner = host.owner(LOCK_FILE)
    if owner is None or owner == host.uid:
        return Finding("libtpu lock", "ok", f"no {LOCK_FILE} of another user")
    shown = f"{LOCK_FILE} is of user {user_name(owner)}: libtpu cannot lock it"
    remedy = f"delete it once no process of that user has the chips: sudo rm {LOCK_FILE}"
    return Finding("libtpu lock", state, shown, remedy)


def _variables(needed: int, state: State) -> Iterator[Finding]:
    """Environment variables of libtpu, of which a run sets only those of a part of a host."""
    several = "is of a host of several, and libtpu waits for the others", "set it to 1,1,1"
    wrong: tuple[tuple[str, Callable[[str], bool], str, str], ...] = (
        ("TPU_WORKER_HOSTNAMES", lambda value: " " in value, "is no list of hosts", "unset it"),
        ("TPU_PROCESS_BOUNDS", lambda value: value != "1,1,1", *several),
        ("TPU_HOST_BOUNDS", lambda value: value != "1,1,1", *several),
        (
            "TPU_VISIBLE_CHIPS",
            lambda value: value.count(",") + 1 < needed,
            f"hides chips; the plan needs {needed}",
            "unset it",
        ),
    )
    for name, is_wrong, what, remedy in wrong:
        value = os.environ.get(name)
        if value is not None and is_wrong(value):
            yield Finding("TPU variables", state, f"{name} = {value[:60]!r} {what}", remedy)


def _ray_count(host: Host, given: int | None, needed: int, state: State) -> Finding:
    """What Ray counts as chips, and `run.tpu_chips`, which replaces the count."""
    there, counted = len(host.chips()), host.ray_chips if given is None else given
    shown = f"Ray counts {host.ray_chips} chips"
    if given is not None:
        shown += f"; run.tpu_chips = {given} replaces that"
    if given is not None and given > there:
        remedy = f"set run.tpu_chips = {there}" if there else "remove run.tpu_chips"
        return Finding("Ray's count", state, f"{shown}, and there are {there} chips", remedy)
    if counted >= (needed if given is not None else max(needed, there)):
        return Finding("Ray's count", "ok", shown)
    shown += f", and the plan needs {needed}" if needed else ""
    if there < max(needed, 1):
        return Finding("Ray's count", state, shown, "choose a machine with the chips")
    if given is None:
        shown += f"; there are {there} device files, whose PCI vendor it may not read"
    return Finding("Ray's count", state, shown, f"set run.tpu_chips = {there}")


def _some(names: Sequence[object]) -> str:
    """The first names of a list, and how many more there are."""
    more = [] if len(names) <= _SHOWN else [f"{len(names) - _SHOWN} more"]
    return ", ".join([*map(str, names[:_SHOWN]), *more])
