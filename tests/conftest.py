"""JAX settings of the tests; must be imported before JAX.

Eight virtual CPU devices. Most of a test's time would be compilation, so XLA skips expensive
passes, and compiled programs are kept between runs in `.test_cache`, keyed by JAX with program,
flags and version of jaxlib.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from pipeline.compute.program_cache import ProgramCache
from pipeline.run.cache_folder import CACHE_VARIABLE

if TYPE_CHECKING:
    from actors.colocated_actor import ColocatedActor

KEPT = Path(__file__).parents[1] / ".test_cache"
FLAGS = (
    "--xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
_MOST_MAPS = 20_000
"""Memory maps of a process above which its programs are freed; a file adds up to 18,000."""

assert "jax" not in sys.modules, "JAX was imported before the tests could choose its devices"
os.environ["JAX_PLATFORMS"] = "cpu"
if FLAGS not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
# XLA's own caches would make the path, which differs between processes, a part of each key.
os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"

# The hub is not asked: without a network each request is repeated for minutes.
os.environ["HF_HUB_OFFLINE"] = "1"

# No test may depend on how busy the machine is.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """Gives this process the kept programs, and the processes that it starts."""
    if config.getoption("numprocesses", None):  # the tests run in other processes
        return
    # A shell lets its background jobs ignore Ctrl-C, and nohup a lost terminal, as would the
    # commands that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    (KEPT / "xla").mkdir(parents=True, exist_ok=True)
    # What else a run keeps would be different for the next run of the tests.
    folder = tempfile.TemporaryDirectory(prefix="gemma-grpo-tests-")
    config.add_cleanup(folder.cleanup)
    (Path(folder.name) / "xla").symlink_to(KEPT / "xla")
    os.environ[CACHE_VARIABLE] = folder.name
    exchange = ProgramExchange()
    config.pluginmanager.register(exchange)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(exchange.programs.path)


class ProgramExchange:
    """Exchanges compiled programs with other processes after each file of tests.

    Attributes:
        programs: the programs of this process.
    """

    def __init__(self) -> None:
        self.programs = ProgramCache(KEPT / "xla")

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        if nextitem is None or nextitem.path != item.path:
            self.programs.share()
            self.programs.fetch()
            free_programs()


def free_programs() -> None:
    """Frees the compiled programs of this process if they take many memory maps.

    Each program on the CPU takes several. Linux allows a process 65,530 by default; when they are
    used up, the next compilation is a segmentation fault.
    """
    if len(Path("/proc/self/maps").read_bytes().splitlines()) < _MOST_MAPS:
        return
    import jax

    from tests import tiny

    tiny.forget_shared()
    jax.clear_caches()
    gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves tests with a Ray cluster to the start: they are long, and others fill their waits."""
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects tests without garbage collection, which later never visits what was imported.

    It took a quarter of the time of the collection, and an eighth of that of a test that traces.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def actor(tmp_path_factory: pytest.TempPathFactory) -> ColocatedActor:
    """The real actor, which takes tens of seconds to compile; see `tests.real_actor.RealRun`."""
    from tests.real_actor import compiled_actor

    return compiled_actor(tmp_path_factory.mktemp("actor"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs a file system of its own, which this user may not mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
