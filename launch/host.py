"""What `launch.doctor` reads of a host; takes no device and changes nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from configs.machine import tpu_chips

_CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


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
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # ValueError: "max"
            available = min(available, int(Path(path).read_text(encoding="ascii")))
    return available
