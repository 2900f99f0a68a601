"""Parallel compilation: the same programs, each logged, and errors are raised."""

from __future__ import annotations

from functools import partial
from random import SystemRandom
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.compute.builds import Building, BuildLog, Built, built_facts
from pipeline.compute.device_memory import array_bytes, program_bytes, result_bytes
from pipeline.compute.model import building
from pipeline.compute.model.building import build_all
from pipeline.compute.model.sharding import by_row, make_mesh, replicated

MESH = make_mesh(jax.devices()[:2])
ROWS: Any = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=by_row(MESH))


def traced(factor: float) -> jax.stages.Traced:
    return jax.jit(lambda x: factor * x + 1.0, out_shardings=by_row(MESH)).trace(ROWS)


def test_each_program_is_logged_and_runs():
    log = BuildLog()
    made = build_all({f"times {n}": partial(traced, float(n)) for n in (2, 3)}, MESH, log=log)
    found = log.read()
    assert {built.name for built in found.done} == {"times 2", "times 3"}
    assert all(built.seconds > 0 for built in found.done)
    x = jax.device_put(np.ones((4, 8), np.float32), by_row(MESH))
    values = {name: float(program(x)[0, 0]) for name, program in made.items()}
    assert values == {"times 2": 3.0, "times 3": 4.0}


def test_a_compiled_program_is_read_from_the_cache():
    log, factor = BuildLog(), SystemRandom().random()  # programs are kept between runs of the tests
    for _ in range(2):
        build_all({"unlike any other": partial(traced, factor)}, MESH, log=log)
    first, second = log.read().done
    assert (first.cached, second.cached) == (False, True)


def test_a_compiler_error_is_raised(monkeypatch: pytest.MonkeyPatch):
    compile_program = building.compile_program

    def bad(name: str, *given: Any) -> jax.stages.Compiled:
        if name == "bad":
            raise ZeroDivisionError
        return compile_program(name, *given)

    monkeypatch.setattr(building, "compile_program", bad)
    with pytest.raises(ZeroDivisionError):
        build_all({name: partial(traced, 5.0) for name in ("good", "bad")}, MESH)


def test_compiled_programs_as_log_lines_and_journal_entries():
    built = (Built("gradient 8", 12.34, cached=False), Built("score 8", 0.5004, cached=True))
    progress = Building(built, 9)
    assert progress.line(0) == "gradient 8: 12.3 s, 1 of 9"
    assert progress.line(1) == "score 8: 0.5 s from the cache, 2 of 9"
    assert built_facts(built) == {
        "programs": {"gradient 8": 12.34, "score 8": 0.5},
        "program_seconds": 12.84,
        "from_cache": 1,
    }


def test_each_compilation_counts_from_1_to_a_total_that_is_known_before():
    log, (first, second, third) = BuildLog(), (Built(name, 1.0, cached=False) for name in "abc")
    assert log.read() == Building()
    log.begin(2)
    assert log.read() == Building((), 2)
    log.done(first)
    log.done(second)
    log.begin(1)
    log.done(third)
    assert log.read() == Building((first, second, third), 1, earlier=2)
    assert log.read().line(2) == "c: 1.0 s, 1 of 1"


def test_bytes_are_per_device():
    program = build_all({"half": partial(traced, 0.5)}, MESH)["half"]
    half = 4 * 8 * 4 // 2
    assert result_bytes(program) == half
    assert program_bytes(program) == 2 * half
    whole: Any = jax.ShapeDtypeStruct((3, 5), jnp.int8, sharding=replicated(MESH))
    assert array_bytes({"rows": ROWS, "whole": [whole]}) == half + 15
