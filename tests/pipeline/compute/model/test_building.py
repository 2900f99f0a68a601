"""Parallel compilation: the same programs, each logged, and errors are raised."""

from __future__ import annotations

from random import SystemRandom
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.compute.device_memory import array_bytes, program_bytes, result_bytes
from pipeline.compute.model.building import Builder, results
from pipeline.compute.model.sharding import by_row, make_mesh, replicated
from pipeline.contracts.builds import Building, BuildLog, Built, built_facts

MESH = make_mesh(jax.devices()[:2])
ROWS: Any = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=by_row(MESH))


def traced(factor: float) -> jax.stages.Traced:
    return jax.jit(lambda x: factor * x + 1.0, out_shardings=by_row(MESH)).trace(ROWS)


def test_each_program_is_logged_and_runs():
    log = BuildLog()
    with Builder(MESH, log=log) as builder:
        made = results(
            {factor: builder.build(f"times {factor}", traced(factor)) for factor in (2, 3)}
        )
    found = log.read()
    assert {built.name for built in found.done} == {"times 2", "times 3"}
    assert found.total == 2
    assert all(built.seconds > 0 for built in found.done)
    x = jax.device_put(np.ones((4, 8), np.float32), by_row(MESH))
    assert {factor: float(program(x)[0, 0]) for factor, program in made.items()} == {2: 3.0, 3: 4.0}


def test_a_compiled_program_is_read_from_the_cache():
    log, factor = BuildLog(), SystemRandom().random()  # programs are kept between runs of the tests
    for _ in range(2):
        with Builder(MESH, log=log) as builder:
            builder.build("unlike any other", traced(factor))
    first, second = log.read().done
    assert (first.cached, second.cached) == (False, True)


def test_a_compiler_error_is_raised():
    with Builder(MESH) as builder:
        good = builder.build("good", traced(5.0))
        bad = builder._pool.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        results({"good": good, "bad": bad})  # type: ignore[arg-type]


def test_compiled_programs_as_log_lines_and_journal_entries():
    built = (Built("gradient 8", 12.34, cached=False), Built("score 8", 0.5004, cached=True))
    building = Building(built, 9)
    assert building.line(0) == "gradient 8: 12.3 s, 1 of 9 so far"
    assert building.line(1) == "score 8: 0.5 s from the cache, 2 of 9 so far"
    assert built_facts(built) == {
        "programs": {"gradient 8": 12.34, "score 8": 0.5},
        "program_seconds": 12.84,
        "from_cache": 1,
    }
    assert BuildLog().read() == Building((), 0)


def test_bytes_are_per_device():
    with Builder(MESH) as builder:
        program = builder.build("half", traced(0.5)).result()
    half = 4 * 8 * 4 // 2
    assert result_bytes(program) == half
    assert program_bytes(program) == 2 * half
    whole: Any = jax.ShapeDtypeStruct((3, 5), jnp.int8, sharding=replicated(MESH))
    assert array_bytes({"rows": ROWS, "whole": [whole]}) == half + 15
