"""What `launch.doctor` reads of a host; takes no device and changes nothing."""

from __future__ import annotations

import os
import platform
import pwd
import shutil
import stat
import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_PROJECT, _PYPROJECT = "gemma-grpo", Path(__file__).parents[1] / "pyproject.toml"
_CGROUP_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
_UNLIMITED = 2**60
"""Limits above are none: the first version of cgroups writes a large number."""


@dataclass(frozen=True)
class HostProcess:
    """A running process.

    Attributes:
        pid: its id.
        name: of its program.
        uid: id of its user.
    """

    pid: int
    name: str
    uid: int

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.name}, user {user_name(self.uid)})"


@dataclass(frozen=True)
class Host:
    """A host as a process sees it; its environment variables are those of this process.

    Attributes:
        root: of its files, which tests imitate.
        uid: id of the user.
        groups: ids of the user's groups.
        python: version of the interpreter.
        requires_python: versions that the project allows.
        installed: versions of the installed distributions, by normalized name.
        requires: requirements of the project, and that of the installed JAX on libtpu.
        ray_chips: number of TPU chips that Ray counts.
        now_s: its clock, Unix time.
        free_bytes: free space of the file system of a path, which may not exist yet.
    """

    root: Path
    uid: int
    groups: Collection[int]
    python: str
    requires_python: str
    installed: Mapping[str, str]
    requires: Sequence[str]
    ray_chips: int
    now_s: float
    free_bytes: Callable[[Path], int]

    @staticmethod
    def of_this_process() -> Host:
        """This machine."""
        # Imported late: it imports Ray.
        from actors.placement import RESOURCE, detected_devices

        requires_python, requires = _project()
        with suppress(metadata.PackageNotFoundError):  # JAX itself is reported as missing
            requires += _libtpu_of_jax()
        return Host(
            root=Path("/"),
            uid=os.geteuid(),
            groups=frozenset({os.getegid(), *os.getgroups()}),
            python=platform.python_version(),
            requires_python=requires_python,
            installed={
                canonicalize_name(one.name): one.version
                for one in metadata.distributions()
                if one.name  # damaged ones have none
            },
            requires=requires,
            ray_chips=detected_devices(RESOURCE["tpu"]),
            now_s=time.time(),
            free_bytes=lambda path: shutil.disk_usage(existing_parent(path)).free,
        )

    def version(self, name: str) -> str | None:
        """The installed version of a distribution; None: it is not installed."""
        return self.installed.get(canonicalize_name(name))

    def has(self, required: Requirement) -> bool:
        """Whether an allowed version is installed."""
        version = self.version(required.name)
        return version is not None and version in required.specifier

    def chips(self) -> list[str]:
        """Device files of the TPU chips, in their order: /dev/accelN, or else /dev/vfio/N."""
        found = [path for path in self._dev().glob("accel*") if not path.is_dir()]
        found = found or [path for path in self._dev().glob("vfio/*") if path.name.isdecimal()]
        paths = sorted(found, key=lambda path: (len(path.name), path.name))
        return [f"/{path.relative_to(self.root)}" for path in paths]

    def may_use(self, path: str) -> bool:
        """Whether the user may read and write a file, by its mode."""
        found = self._at(path).stat()
        if self.uid == 0:
            return True
        if found.st_uid == self.uid:
            needed = stat.S_IRUSR | stat.S_IWUSR
        elif found.st_gid in self.groups:
            needed = stat.S_IRGRP | stat.S_IWGRP
        else:
            needed = stat.S_IROTH | stat.S_IWOTH
        return found.st_mode & needed == needed

    def owner(self, path: str) -> int | None:
        """User id of a file's owner; None: there is no such file."""
        with suppress(FileNotFoundError):
            return self._at(path).stat().st_uid
        return None

    def processes(self) -> Iterator[HostProcess]:
        """All running processes."""
        for folder in self._at("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                name = (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
                uids = _fields(folder / "status")["Uid"]
                yield HostProcess(int(folder.name), name, int(uids.split()[1]))

    def holders(self, devices: Collection[str]) -> list[HostProcess]:
        """The processes that have one of the device files open, as far as the user may see them."""
        found = []
        for process in self.processes():
            links = list[Path]()
            with suppress(OSError):  # it has ended, or is of another user
                links += self._at(f"/proc/{process.pid}/fd").iterdir()
            for link in links:
                with suppress(OSError):
                    if os.readlink(link) in devices:  # noqa: PTH115  # a Path normalizes it
                        found.append(process)
                        break
        return found

    def memory_bytes(self) -> int:
        """Memory that a new process can have: what is available, within the container's limit."""
        available = int(_fields(self._at("/proc/meminfo"))["MemAvailable"].split()[0]) * 1024
        for name in _CGROUP_LIMITS:
            with suppress(OSError, ValueError):  # ValueError: "max"
                limit = int((self.root / name).read_text(encoding="ascii"))
                if limit < _UNLIMITED:
                    available = min(available, limit)
        return available

    def _dev(self) -> Path:
        return self._at("/dev")

    def _at(self, path: str) -> Path:
        return self.root / path.removeprefix("/")


def _project() -> tuple[str, list[str]]:
    """Python versions that the project allows, and its requirements."""
    try:
        allowed = metadata.metadata(_PROJECT)["Requires-Python"]
        lines = list(metadata.requires(_PROJECT) or ())
    except metadata.PackageNotFoundError:  # sources that are not installed
        table = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8"))["project"]
        return table["requires-python"], list(table["dependencies"])
    return allowed, [line for line in lines if Requirement(line).marker is None]


def _libtpu_of_jax() -> list[str]:
    """What the installed JAX requires of libtpu."""
    found = [Requirement(line) for line in metadata.requires("jax") or ()]
    return [f"{one.name}{one.specifier}" for one in found if one.name == "libtpu"]


def user_name(uid: int) -> str:
    """The name of a user, or the id where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def existing_parent(path: Path) -> Path:
    """The path itself, or its first parent that exists."""
    return next(one for one in (path, *path.parents) if one.exists())


def _fields(path: Path) -> dict[str, str]:
    """The lines `NAME: VALUE` of a file of /proc."""
    text = path.read_text(encoding="utf-8", errors="replace")
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}
