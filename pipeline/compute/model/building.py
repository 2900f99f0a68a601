"""Loads or compiles programs in parallel threads: XLA releases Python's global lock meanwhile.

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

from configs.conflicts import without
from configs.schema import Config
from pipeline.compute.builds import BuildLog, Built, cores
from pipeline.compute.model.sharding import lowered
from pipeline.compute.program_cache import ExecutableCache

Trace = Callable[[], jax.stages.Traced]
"""Traces a program."""

_NOT_TRACED = (
    *("run.name", "run.dir", "run.mirror", "run.tpu_chips", "run.fork", "run.seed"),
    *("data", "prompt", "rewards", "budget", "eval", "export", "checkpoint", "mismatch"),
    *("wandb", "records", "profile", "alarms", "faults"),
)
_HIT = "/jax/compilation_cache/cache_hits"
_here = threading.local()


def _listen(event: str, **_: Any) -> None:
    if event == _HIT:
        _here.hits = getattr(_here, "hits", 0) + 1


jax.monitoring.register_event_listener(_listen)


def traced_settings(config: Config) -> Config:
    """The configuration without the settings that no program may depend on.

    Runs that differ in them have the same programs. Reading one of them raises AttributeError.
    """
    return without(config, *_NOT_TRACED)


def build_all(
    programs: Mapping[str, Trace],
    mesh: Mesh,
    *,
    owner: object,
    log: BuildLog | None = None,
) -> dict[str, jax.stages.Compiled]:
    """Loads or compiles programs, several at a time; raises the first error.

    Args:
        programs: traces each program, by name; the slowest compilations come first.
        mesh: their devices.
        owner: the object that traces them; see `ExecutableCache`.
        log: receives an entry for each program.
    """
    # More threads would only need more memory: compiling a large program takes gigabytes.
    pool, kept = ThreadPoolExecutor(cores()), ExecutableCache(owner, mesh)
    try:
        loading = {name: pool.submit(_load, name, kept, log) for name in programs}
        loaded = {name: future.result() for name, future in loading.items()}
        building = {
            name: pool.submit(compile_program, name, lowered(trace(), mesh), kept, log)
            for name, trace in programs.items()
            if loaded[name] is None
        }
        return {
            name: building[name].result() if program is None else program
            for name, program in loaded.items()
        }
    finally:
        pool.shutdown(cancel_futures=True)


def _load(name: str, kept: ExecutableCache, log: BuildLog | None) -> jax.stages.Compiled | None:
    """Loads a program that was kept, and logs it; None: there is none."""
    started = time.monotonic()
    program = kept.load(name)
    if program is not None and log is not None:
        log.done(Built(name, time.monotonic() - started, cached=True))
    return program


def compile_program(
    name: str, program: jax.stages.Lowered, kept: ExecutableCache, log: BuildLog | None
) -> jax.stages.Compiled:
    """Compiles and keeps a program, or reads it from JAX's cache; logs it."""
    hits, started = getattr(_here, "hits", 0), time.monotonic()
    compiled = program.compile()
    seconds, cached = time.monotonic() - started, getattr(_here, "hits", 0) > hits
    if log is not None:
        log.done(Built(name, seconds, cached))
    if not cached:  # XLA's CPU backend drops the code of a loaded program when it is serialized
        kept.keep(name, compiled)
    return compiled
