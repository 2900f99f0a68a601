"""Compiles programs in parallel threads: XLA releases Python's global lock while it compiles.

Tracing stays in the calling thread, one program after another, because it runs Python code and sets
attributes of modules, which is not thread-safe. The compiled programs do not depend on this.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from pipeline.compute.builds import BuildLog, Built, cores
from pipeline.compute.model.sharding import lowered

Trace = Callable[[], jax.stages.Traced]
"""Traces a program."""

_HIT = "/jax/compilation_cache/cache_hits"
_here = threading.local()


def _listen(event: str, **_: Any) -> None:
    if event == _HIT:
        _here.hits = getattr(_here, "hits", 0) + 1


jax.monitoring.register_event_listener(_listen)


class Builder:
    """Compiles for one mesh, with one thread per core; a context manager.

    Args:
        mesh: devices, which need not be on this machine.
        log: receives an entry for each program.
    """

    def __init__(self, mesh: Mesh, *, log: BuildLog | None = None) -> None:
        self._mesh = mesh
        self._log = BuildLog() if log is None else log
        # More threads would only need more memory: compiling a large program takes gigabytes.
        self._pool = ThreadPoolExecutor(cores())

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def build(self, name: str, traced: jax.stages.Traced) -> Future[jax.stages.Compiled]:
        """Lowers the program now and compiles it in a thread."""
        return self._pool.submit(self._compile, name, lowered(traced, self._mesh))

    def _compile(self, name: str, program: jax.stages.Lowered) -> jax.stages.Compiled:
        hits, started = getattr(_here, "hits", 0), time.monotonic()
        compiled = program.compile()
        seconds, cached = time.monotonic() - started, getattr(_here, "hits", 0) > hits
        self._log.done(Built(name, seconds, cached))
        return compiled


def build_all(
    programs: Mapping[str, Trace],
    mesh: Mesh,
    *,
    log: BuildLog | None = None,
) -> dict[str, jax.stages.Compiled]:
    """Compiles programs, several at a time; raises the first error.

    Args:
        programs: traces each program, by name; the slowest compilations come first.
        mesh: devices.
        log: receives an entry for each program.
    """
    with Builder(mesh, log=log) as builder:
        building = {name: builder.build(name, trace()) for name, trace in programs.items()}
        return {name: future.result() for name, future in building.items()}
