"""The checks of `launch.doctor`: each yields findings on a host, with a remedy in one sentence."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from configs.schema import Config
from launch.host import Host, user_name

State = Literal["ok", "note", "fault"]
LOCK_FILE = "/tmp/libtpu_lockfile"  # libtpu's
_PINS = {"cpu": "requirements.txt", "tpu": "requirements-tpu.txt", "gpu": "requirements-cuda13.txt"}
"""Files of the pinned versions, by `plan.platform`."""
_TPU_ONLY = "libtpu"
_SHOWN = 3
"""Packages, processes or files that a finding names."""
_HOSTS = re.compile(r"[\w.:\[\]-]+(,[\w.:\[\]-]+)*", re.ASCII)
_HOST_LISTS = ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ADDRS")
_HOST_BOUNDS = ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS")
_ONE_HOST = "1,1,1"


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        check: its name.
        state: ok; note: a run is possible; fault: the configuration cannot run.
        finding: what was found.
        remedy: what to do about it; empty if it is ok.
        figures: the numbers of a check on the chips, by name.
    """

    check: str
    state: State
    finding: str
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


Check = Callable[[Host, Config | None], Iterator[Finding]]


def _uses_chips(config: Config | None) -> bool:
    """Whether TPU chips matter: without a configuration they may."""
    return config is None or config.plan.platform == "tpu"


def _needs_chips(config: Config | None) -> bool:
    """Whether a run needs chips of this host; those of a cluster may be on others."""
    return config is not None and _uses_chips(config) and "RAY_ADDRESS" not in os.environ


def _chip_fault(config: Config | None) -> State:
    return "fault" if _needs_chips(config) else "note"


def _some(names: Sequence[object]) -> str:
    """The first names of a list, and how many more there are."""
    more = [] if len(names) <= _SHOWN else [f"{len(names) - _SHOWN} more"]
    return ", ".join([*map(str, names[:_SHOWN]), *more])


# --- versions


def python(host: Host, config: Config | None) -> Iterator[Finding]:  # noqa: ARG001
    """The interpreter."""
    if host.python in SpecifierSet(host.requires_python):
        yield Finding("python", "ok", f"Python {host.python}")
        return
    yield Finding(
        "python",
        "fault",
        f"Python {host.python}, and the project needs {host.requires_python}",
        "make the environment with another one: make PYTHON=/path/to/python3.12 install-dev",
    )


def packages(host: Host, config: Config | None) -> Iterator[Finding]:
    """Installed packages against what the project and its JAX require."""
    platform = "tpu" if config is None else config.plan.platform
    install = f"install the pinned versions: python -m pip install -r {_PINS[platform]}"
    required = [Requirement(line) for line in host.requires]
    wrong = [
        f"{one.name} {host.version(one.name) or 'is missing'}, needed: {one.specifier or 'any'}"
        for one in required
        if (one.name != _TPU_ONLY or platform == "tpu") and not host.has(one)
    ]
    if wrong:
        optional = config is None and all(line.startswith(_TPU_ONLY) for line in wrong)
        yield Finding("packages", "note" if optional else "fault", _some(wrong), install)
        return
    names = ("jax", _TPU_ONLY, "ray")
    known = ", ".join(f"{name} {host.version(name)}" for name in names if host.version(name))
    yield Finding("packages", "ok", known)


# --- chips


def chips(host: Host, config: Config | None) -> Iterator[Finding]:
    """Device files of the chips: their number, permissions and holders."""
    if not _uses_chips(config):
        return
    devices, needed = host.chips(), _needed_chips(config)
    if not devices:
        yield Finding(
            "chips",
            _chip_fault(config),
            "no TPU chip: neither /dev/accel* nor /dev/vfio/N exists",
            "choose a machine with a TPU (Kaggle: Settings, Accelerator), and start a container "
            "with its devices (docker run --privileged)",
        )
        return
    shown = f"{len(devices)} chips, {devices[0]} to {devices[-1]}"
    closed = [path for path in devices if not host.may_use(path)]
    if len(devices) < needed:
        yield Finding(
            "chips",
            _chip_fault(config),
            f"{shown}; the plan needs {needed}",
            "choose a machine with more, or a placement on fewer: see python -m launch.plan",
        )
    elif closed:
        yield Finding(
            "chips",
            _chip_fault(config),
            f"user {user_name(host.uid)} may not read and write {_some(closed)}",
            f"sudo chmod a+rw {' '.join(closed)}",
        )
    else:
        yield Finding("chips", "ok", f"{shown}, readable and writable")
    yield from _holders(host, config, devices)


def _holders(host: Host, config: Config | None, devices: Sequence[str]) -> Iterator[Finding]:
    holders = host.holders(frozenset(devices))
    if holders:
        yield Finding(
            "holders",
            _chip_fault(config),
            f"the chips are in use by {_some(holders)}",
            "wait until it ends, or end it: kill " + " ".join(str(one.pid) for one in holders),
        )
    else:
        yield Finding("holders", "ok", "no process that this user can see has the chips open")


def _needed_chips(config: Config | None) -> int:
    from actors.placement import total_resources

    return 0 if config is None else int(sum(total_resources(config.plan).values()))


def lock_file(host: Host, config: Config | None) -> Iterator[Finding]:
    """The lock file of libtpu, which does not start if it is another user's."""
    if not _uses_chips(config):
        return
    owner = host.owner(LOCK_FILE)
    if owner is None or owner == host.uid:
        yield Finding("libtpu lock", "ok", f"no {LOCK_FILE} of another user")
        return
    yield Finding(
        "libtpu lock",
        _chip_fault(config),
        f"{LOCK_FILE} is of user {user_name(owner)}: libtpu cannot lock it",
        f"delete it once no process of that user has the chips: sudo rm {LOCK_FILE}",
    )


def variables(host: Host, config: Config | None) -> Iterator[Finding]:  # noqa: ARG001
    """Environment variables of libtpu; a run sets those of each process itself."""
    if not _uses_chips(config):
        return
    given = {name: value for name, value in os.environ.items() if name.startswith("TPU_")}
    state, needed = _chip_fault(config), _needed_chips(config)
    found = [
        Finding(
            "TPU variables",
            state,
            f"{name} is not a list of hosts: {given[name][:60]!r}",
            f"start without it, one host needs none: env -u {name} python -m launch.train",
        )
        for name in _HOST_LISTS
        if name in given and not _HOSTS.fullmatch(given[name])
    ]
    found += [
        Finding(
            "TPU variables",
            state,
            f"{name} = {given[name]}: this host is one of several, and libtpu waits for them",
            f"start with {name}={_ONE_HOST}; a process has the chips of one host",
        )
        for name in _HOST_BOUNDS
        if given.get(name, _ONE_HOST) != _ONE_HOST
    ]
    visible = given.get("TPU_VISIBLE_CHIPS")
    if visible is not None and len(list(filter(None, visible.split(",")))) < needed:
        found.append(
            Finding(
                "TPU variables",
                state,
                f"TPU_VISIBLE_CHIPS = {visible!r} hides chips; the plan needs {needed}",
                "start without it: env -u TPU_VISIBLE_CHIPS python -m launch.train",
            )
        )
    yield from found
    if not found:
        shown = f"{len(given)} set; each process of a run gets those of its chips"
        yield Finding("TPU variables", "ok", shown)


# --- Ray


def ray_count(host: Host, config: Config | None) -> Iterator[Finding]:
    """What Ray counts as chips, and `run.tpu_chips`, which replaces the count."""
    if not _uses_chips(config):
        return
    there, counted, needed = len(host.chips()), host.ray_chips, _needed_chips(config)
    given = None if config is None else config.run.tpu_chips
    shown = f"Ray counts {counted} chips"
    if given is not None:
        shown += f"; run.tpu_chips = {given} replaces that"
    state, remedy = _chip_fault(config), "choose a machine with the chips"
    if given is not None and given > there:
        shown, remedy = f"{shown}, and there are {there} device files", "remove run.tpu_chips"
        if there:
            remedy = f"set run.tpu_chips = {there}"
    elif given is not None and given < needed:
        shown, remedy = f"{shown}, and the plan needs {needed}", f"set run.tpu_chips = {needed}"
    elif given is None and counted < max(needed, there):
        if needed:
            shown += f", and the plan needs {needed}"
        if there >= max(needed, 1):
            shown += f"; there are {there} device files, whose PCI vendor it may not read"
            remedy = f"set run.tpu_chips = {there}"
    else:
        state, remedy = "ok", ""
    yield Finding("Ray's count", state, shown, remedy)
