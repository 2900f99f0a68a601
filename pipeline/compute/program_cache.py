"""Compiled programs that later processes read, safe with several processes and killed ones.

JAX's persistent cache spares compiling a program, but JAX has to trace it to look it up.
`ExecutableCache` has serialized executables, which are loaded without tracing: their key covers all
that traces read. Both have entries in the same folder. JAX writes an entry in place: a process that
is killed meanwhile would leave a truncated entry forever. So entries are written into a folder per
process, which has the shared entries as hard links, and complete entries are moved to the shared
folder. Used inside actors only.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pickle
import platform
import shutil
import sys
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from pipeline.run.cache_folder import cache_folder
from pipeline.run.folder_lock import LockedFolder

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

MOST_BYTES = 4 * 2**30
"""Size above which the oldest programs are deleted."""

_SUFFIX = "-cache"
_SOURCE = Path(__file__).parents[2]
_OWN = ("configs", "rewards", "pipeline")
"""Packages of the project that traces can use."""
_TRACING = ("flax", "jax", "jaxlib", "optax", "qwix", "tunix")
"""Installed packages whose code traces run."""
_PROCESSOR = ("model name", "flags", "Features")
"""Lines of /proc/cpuinfo that decide which instructions a program can have."""
_CLOCK_S = 2.0
"""Uncertainty of the time at which a process started."""
_COMPILER_VARIABLES = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")


class ProgramCache:
    """One process's view of the shared cache.

    Args:
        shared: the folder of all processes; created if it does not exist.
    """

    def __init__(self, shared: Path) -> None:
        self._shared = shared
        own_folders = shared / "processes"
        own_folders.mkdir(parents=True, exist_ok=True)
        self._own = LockedFolder(own_folders, prefix="")
        self._names = set[str]()  # entries that are or were shared
        self.fetch()

    @property
    def path(self) -> Path:
        """The folder in which this process's JAX reads and writes."""
        return self._own.path

    def fetch(self) -> None:
        """Makes entries available that other processes have shared."""
        for entry in self._shared.glob(f"*{_SUFFIX}"):
            if entry.name not in self._names:
                self._link(entry)

    def share(self) -> None:
        """Moves new entries to the shared folder; call it between compilations."""
        for entry in self.path.glob(f"*{_SUFFIX}"):
            if entry.name not in self._names:
                if _is_whole(entry):
                    self._link(entry.replace(self._shared / entry.name))
                else:
                    entry.unlink()  # JAX would not write it again
        self._prune()

    def _link(self, entry: Path) -> None:
        """Links a shared entry into this process's folder, where it survives deletion by others.

        A hard link: JAX would write through a dangling symbolic link into the shared folder.
        """
        own = self.path / entry.name
        with suppress(FileNotFoundError):  # another process has deleted it
            try:
                own.hardlink_to(entry)
            except OSError:  # the file system has no hard links
                shutil.copyfile(entry, own)
            self._names.add(entry.name)

    def _prune(self) -> None:
        entries = []
        for entry in self._shared.glob(f"*{_SUFFIX}"):
            try:
                found = entry.stat()
            except FileNotFoundError:
                continue  # another process has deleted it
            entries.append((found.st_mtime, found.st_size, entry))
        total = sum(size for _, size, _ in entries)
        for _, size, entry in sorted(entries):
            if total <= MOST_BYTES:
                return
            entry.unlink(missing_ok=True)
            total -= size


def _is_whole(entry: Path) -> bool:
    """Whether the compressed data of an entry have an end: on a full disk JAX writes a part."""
    data = zlib.decompressobj()
    try:
        data.decompress(entry.read_bytes())
    except zlib.error:
        return True  # compressed otherwise
    return data.eof


@cache
def _of_this_process() -> ProgramCache | None:
    """The cache; None if the user has set JAX's own, or the folder cannot be written."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return None
    try:
        return ProgramCache(cache_folder("xla"))
    except OSError:
        return None


def use_program_cache() -> None:
    """Makes JAX use the cache."""
    import jax

    programs = _of_this_process()
    if programs is None:
        return
    jax.config.update("jax_compilation_cache_dir", str(programs.path))
    # All programs: a run has a few dozen, and small ones add up on a slow machine.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # XLA's own caches would be keyed by the path, which differs between processes.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def share_programs() -> None:
    """See `ProgramCache.share`; does nothing without a cache, or if its disk is full."""
    programs = _of_this_process()
    if programs is not None:
        with suppress(OSError):
            programs.share()


class ExecutableCache:
    """Serialized executables, with the structure of their arguments and results.

    A key covers what tracing and compiling a program reads: `owner`, JAX's settings, the source of
    this project, the installed packages, the devices, the compiler and its options. With another
    key a program is traced, and may still be in JAX's cache; it is kept only by the process that
    compiles it.

    Args:
        owner: the object that traces them; its `repr` shows all of its data that traces read.
        mesh: their devices.
    """

    def __init__(self, owner: object, mesh: Mesh) -> None:
        self._devices = list(mesh.devices.flat)
        self._folder, source = None, _source()
        programs = _of_this_process()
        if programs is not None and source is not None:
            self._folder = programs.path
        parts = (repr(owner), source, *_environment(mesh))
        self._key = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()

    def load(self, name: str) -> jax.stages.Compiled | None:
        """The program of this name; None if it is not there or cannot be loaded."""
        import jax
        from jax.experimental import serialize_executable

        if self._folder is None:
            return None
        try:
            kept = zlib.decompress(self._entry(self._folder, name).read_bytes())
            # JAX's own entries need as much trust as these.
            program, given, returned = pickle.loads(kept)
            return serialize_executable.deserialize_and_load(
                program,
                given,
                returned,
                backend=self._devices[0].client,
                execution_devices=self._devices,
            )
        except (OSError, zlib.error, jax.errors.JaxRuntimeError):
            return None

    def keep(self, name: str, program: jax.stages.Compiled) -> None:
        """Keeps a program, unless the disk is full or the platform cannot serialize programs."""
        import jax
        from jax.experimental import serialize_executable

        if self._folder is None:
            return
        with suppress(OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
            kept = pickle.dumps(serialize_executable.serialize(program))
            self._entry(self._folder, name).write_bytes(zlib.compress(kept, 1))

    def _entry(self, folder: Path, name: str) -> Path:
        return folder / f"{name.replace(' ', '_')}-{self._key}{_SUFFIX}"


@cache
def _source() -> str | None:
    """A hash of all source that traces can run; None: it was edited after this process started."""
    found, newest = hashlib.sha256(), 0.0
    own = (path for package in _OWN for path in sorted((_SOURCE / package).rglob("*.py")))
    for path in filter(Path.is_file, own):  # an editor's lock is a dangling link
        found.update(f"{path.relative_to(_SOURCE)}\n".encode() + path.read_bytes())
        newest = max(newest, path.stat().st_mtime)
    for path in _installed_files():
        state = path.stat()
        found.update(f"{path} {state.st_size} {state.st_mtime_ns}\n".encode())
        newest = max(newest, state.st_mtime)
    started = psutil.Process().create_time() - _CLOCK_S
    return None if newest >= started else found.hexdigest()


def _installed_files() -> Iterator[Path]:
    """The files of the installed packages that traces use, to notice an edited or replaced one."""
    for package in _TRACING:
        spec = importlib.util.find_spec(package)
        for folder in [] if spec is None else spec.submodule_search_locations or []:
            for parent, _, names in os.walk(folder):
                yield from (Path(parent, name) for name in names if name.endswith((".py", ".so")))


def _environment(mesh: Mesh) -> Iterator[object]:
    """What tracing and compilation depend on besides the source and the object that traces."""
    import jax

    yield sys.version
    for folder in sys.path:
        yield sorted(path.name for path in Path(folder).glob("*.dist-info"))
    settings = jax.config.values
    yield sorted((name, value) for name, value in settings.items() if "cache" not in name)
    yield [os.environ.get(name) for name in _COMPILER_VARIABLES]
    devices = list(mesh.devices.flat)
    yield mesh, devices, devices[0].device_kind, devices[0].client.platform_version
    with suppress(OSError):  # another system than Linux
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        yield sorted({line for line in lines if line.startswith(_PROCESSOR)})
    yield platform.processor()
