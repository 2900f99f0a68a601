"""What `launch.doctor` reads of a host, and its checks of it: versions, chips and who holds them.

Takes no device and changes nothing.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement

from configs.machine import tpu_chips
from configs.schema import Config

State = Literal["ok", "note", "fault"]
LOCK_FILE = "/tmp/libtpu_lockfile"  # libtpu's
_INSTALL = {"cpu": "--cpu", "tpu": "--tpu", "gpu": "--cuda13"}
"""Flags of `launch/bootstrap.sh`, by `plan.platform`."""
_TPU_ONLY = "libtpu"
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Host:
    """A host as a process sees it; its environment variables are those of this process.

    Attributes:
        root: of its files, which tests imitate.
        uid: id of the user.
        version: of an installed distribution, by name; None: it is not installed.
        ray_chips: number of TPU chips that Ray counts.
        memory_bytes: memory that a new process can have.
        free_bytes: free space of the file system of a path, which may not exist yet.
    """

    root: Path
    uid: int
    version: Callable[[str], str | None]
    ray_chips: int
    memory_bytes: int
    free_bytes: Callable[[Path], int]

    @staticmethod
    def of_this_process() -> Host:
        """This machine."""
        # Imported late: it imports Ray.
        from actors.placement import RESOURCE, detected_devices

        return Host(
            root=Path("/"),
            uid=os.geteuid(),
            version=_installed_version,
            ray_chips=detected_devices(RESOURCE["tpu"]),
            memory_bytes=_available_bytes(),
            free_bytes=lambda path: shutil.disk_usage(existing_parent(path)).free,
        )

    def chips(self) -> list[str]:
        """Device files of the TPU chips, in their order."""
        return tpu_chips(self.root)

    def may_use(self, path: str) -> bool:
        """Whether this process may read and write a file."""
        return os.access(self._at(path), os.R_OK | os.W_OK)

    def owner(self, path: str) -> int | None:
        """User id of a file's owner; None: there is no such file."""
        with suppress(FileNotFoundError):
            return self._at(path).stat().st_uid
        return None

    def holders(self, devices: Collection[str]) -> dict[int, str]:
        """The processes that have a device file open, as far as the user may see them, by id."""
        found = {}
        for folder in self._at("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended, or is of another user
                opened = set[str]()
                for link in (folder / "fd").iterdir():
                    with suppress(OSError):  # it was closed meanwhile
                        # A Path would normalize the link.
                        opened.add(os.readlink(link))  # noqa: PTH115
                if not opened.isdisjoint(devices):
                    name = (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
                    user = folder.stat().st_uid
                    found[int(folder.name)] = f"pid {folder.name} ({name}, user id {user})"
        return found

    def _at(self, path: str) -> Path:
        return self.root / path.removeprefix("/")


def existing_parent(path: Path) -> Path:
    """The path itself, or its first parent that exists."""
    return next(one for one in (path, *path.parents) if one.exists())


def _installed_version(name: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _available_bytes() -> int:
    """What is available on this machine, within the limit of its container."""
    available: int = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # ValueError: "max"
        available = min(available, int(_CGROUP_LIMIT.read_text(encoding="ascii")))
    return available


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
    wrong += _shadowed("jax")
    if wrong:
        remedy = f"install the pinned versions: launch/bootstrap.sh {_INSTALL[kind]}"
        return Finding("packages", "fault", ", ".join(wrong), remedy)
    names = ("jax", _TPU_ONLY, "ray")
    known = [f"{name} {host.version(name)}" for name in names if host.version(name)]
    return Finding("packages", "ok", ", ".join([f"Python {platform.python_version()}", *known]))


def _shadowed(name: str) -> list[str]:
    """Whether another package than the installed one is imported, as from the current folder."""
    with suppress(metadata.PackageNotFoundError):
        installed = Path(str(metadata.distribution(name).locate_file(f"{name}/__init__.py")))
        spec = find_spec(name)
        imported = None if spec is None else spec.origin
        if imported is None or Path(imported).resolve() != installed.resolve():
            return [f"{name} is imported from {imported}, not from {installed}"]
    return []


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
        shown = f"user id {host.uid} may not read and write {', '.join(closed)}"
        return Finding("chips", state, shown, f"sudo chmod a+rw {' '.join(closed)}")
    shown += ", readable and writable; make test-accelerator computes on them"
    return Finding("chips", "ok", shown)


def _holders(host: Host, devices: Sequence[str], state: State) -> Finding:
    """The processes that use the chips, and libtpu's lock file, which another user may own."""
    if holders := host.holders(devices):
        remedy = "wait until it ends, or end it: kill " + " ".join(map(str, holders))
        shown = f"the chips are in use by {', '.join(holders.values())}"
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
    if (needed or there) <= counted <= there:
        return Finding("Ray's count", "ok", shown)
    shown += f"; there are {there} device files, and the plan needs {needed}"
    return Finding("Ray's count", state, shown, f"set run.tpu_chips = {there}")
