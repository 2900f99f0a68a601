"""Compiles programs in parallel threads: XLA releases Python's global lock meanwhile.

Tracing stays in the calling thread, one program after another, because it runs Python code and sets
attributes of modules, which is not thread-safe. The compiled programs do not depend on this.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
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


def build_all(
    programs: Mapping[str, Trace], mesh: Mesh, *, log: BuildLog | None = None
) -> dict[str, jax.stages.Compiled]:
    """Compiles programs, several at a time, or reads them from JAX's cache; raises the first error.

    Args:
        programs: traces each program, by name; the slowest compilations come first.
        mesh: their devices.
        log: receives an entry for each program.
    """
    # More threads would only need more memory: compiling a large program takes gigabytes.
    pool = ThreadPoolExecutor(cores())
    try:
        building = {
            name: pool.submit(compile_program, name, lowered(trace(), mesh), log)
            for name, trace in programs.items()
        }
        traced = time.monotonic()
        found = {name: program.result() for name, program in building.items()}
        waited_s = time.monotonic() - traced
    finally:
        pool.shutdown(cancel_futures=True)
    if log is not None and jax.config.values["jax_compilation_cache_dir"]:
        built = [one for _, one in found.values()]
        new_s = sum(one.seconds for one in built if not one.cached)
        log.waited_s += waited_s * new_s / max(sum(one.seconds for one in built), 1e-9)
    return {name: compiled for name, (compiled, _) in found.items()}


def compile_program(
    name: str, program: jax.stages.Lowered, log: BuildLog | None
) -> tuple[jax.stages.Compiled, Built]:
    """Compiles a program, or reads it from JAX's cache; logs it."""
    hits, started = getattr(_here, "hits", 0), time.monotonic()
    compiled = program.compile()
    seconds, cached = time.monotonic() - started, getattr(_here, "hits", 0) > hits
    built = Built(name, seconds, cached)
    if log is not None:
        log.done(built)
    return compiled, built
