"""Programs are compiled in parallel, or read from JAX's cache; each is logged."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from random import SystemRandom
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.compute.builds import Building, BuildLog, Built, built_facts
from pipeline.compute.device_memory import array_bytes, program_bytes, result_bytes
from pipeline.compute.model import building
from pipeline.compute.model.building import Trace
from pipeline.compute.model.sharding import by_row, make_mesh, replicated

MESH = make_mesh(jax.devices()[:2])
ROWS: Any = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=by_row(MESH))


def traced(factor: float) -> jax.stages.Traced:
    return jax.jit(lambda x: factor * x + 1.0, out_shardings=by_row(MESH)).trace(ROWS)


def build(
    programs: Mapping[str, Trace], *, log: BuildLog | None = None
) -> dict[str, jax.stages.Compiled]:
    return building.build_all(programs, MESH, log=log)


def test_each_program_is_logged_and_runs():
    log = BuildLog()
    made = build({f"times {n}": partial(traced, float(n)) for n in (2, 3)}, log=log)
    found = log.read()
    assert {built.name for built in found.done} == {"times 2", "times 3"}
    assert all(built.seconds > 0 for built in found.done)
    x = jax.device_put(np.ones((4, 8), np.float32), by_row(MESH))
    values = {name: float(program(x)[0, 0]) for name, program in made.items()}
    assert values == {"times 2": 3.0, "times 3": 4.0}


def test_a_compiled_program_is_read_from_the_cache():
    log, factor = BuildLog(), SystemRandom().random()  # programs are kept between runs of the tests
    waited_s = []
    for _ in range(2):
        build({"unlike any other": partial(traced, factor)}, log=log)
        waited_s.append(log.waited_s)
    first, second = log.read().done
    assert (first.cached, second.cached) == (False, True)
    assert 0 < waited_s[0] == waited_s[1]


def test_waiting_for_what_no_cache_keeps_is_not_counted():
    log, key = BuildLog(), "jax_compilation_cache_dir"
    folder = jax.config.values[key]
    jax.config.update(key, None)
    try:
        build({"unlike any other": partial(traced, SystemRandom().random())}, log=log)
    finally:
        jax.config.update(key, folder)
    assert log.waited_s == 0.0


def test_progress_counts_from_1_to_a_total_that_is_known_before():
    log, first = BuildLog(), Built("gradient 8", 12.34, cached=False)
    second = Built("score 8", 0.5004, cached=True)
    log.begin(1)
    log.done(first)
    log.begin(9)
    log.done(second)
    assert log.read() == Building((first, second), 9, earlier=1)
    assert log.read().line(1) == "score 8: 0.5 s from the cache, 1 of 9"
    assert built_facts((first, second)) == {
        "programs": {"gradient 8": 12.34, "score 8": 0.5},
        "program_seconds": 12.84,
        "from_cache": 1,
    }


def test_bytes_are_per_device():
    program = build({"half": partial(traced, 0.5)})["half"]
    half = 4 * 8 * 4 // 2
    assert result_bytes(program) == half
    assert program_bytes(program) == 2 * half
    whole: Any = jax.ShapeDtypeStruct((3, 5), jnp.int8, sharding=replicated(MESH))
    assert array_bytes({"rows": ROWS, "whole": [whole]}) == half + 15
