"""Programs are compiled in parallel, or loaded where nothing has changed; each is logged."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.compute import program_cache
from pipeline.compute.builds import Building, BuildLog, Built, built_facts
from pipeline.compute.device_memory import array_bytes, program_bytes, result_bytes
from pipeline.compute.model import building
from pipeline.compute.model.building import Trace, traced_settings
from pipeline.compute.model.sharding import by_row, make_mesh, replicated
from pipeline.compute.program_cache import ProgramCache
from tests import tiny

MESH = make_mesh(jax.devices()[:2])
ROWS: Any = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=by_row(MESH))


def traced(factor: float) -> jax.stages.Traced:
    return jax.jit(lambda x: factor * x + 1.0, out_shardings=by_row(MESH)).trace(ROWS)


def build(
    programs: Mapping[str, Trace], *, owner: object = "test", log: BuildLog | None = None
) -> dict[str, jax.stages.Compiled]:
    return building.build_all(programs, MESH, owner=owner, log=log)


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
    for _ in range(2):
        build({"unlike any other": partial(traced, factor)}, log=log)
    first, second = log.read().done
    assert (first.cached, second.cached) == (False, True)


@pytest.fixture
def serialized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProgramCache:
    """Executables are serialized; this project's source has not been edited."""
    kept = ProgramCache(tmp_path)
    monkeypatch.setattr(program_cache, "_of_this_process", lambda: kept)
    monkeypatch.setattr(program_cache, "_source", lambda: "source")
    return kept


def must_not_trace() -> jax.stages.Traced:
    raise AssertionError


@pytest.mark.usefixtures("serialized")
def test_a_serialized_executable_is_loaded_without_tracing():
    log, factor = BuildLog(), SystemRandom().random()

    def donating() -> jax.stages.Traced:
        double = jax.jit(lambda x: {"y": factor * x}, donate_argnums=0, out_shardings=by_row(MESH))
        return double.trace(ROWS)

    first = build({"a b": donating}, log=log)["a b"]
    second = build({"a b": must_not_trace}, log=log)["a b"]
    assert [(built.name, built.cached) for built in log.read().done][1:] == [("a b", True)]
    assert str(second.memory_analysis()) == str(first.memory_analysis())
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    given = [jax.device_put(x, by_row(MESH)) for _ in range(2)]
    for program, array in zip((first, second), given, strict=True):
        found = program(array)["y"]
        np.testing.assert_array_equal(found, np.float32(factor) * x)
        assert found.sharding == by_row(MESH)
        assert array.is_deleted()


@pytest.mark.usefixtures("serialized")
def test_an_executable_from_the_cache_of_jax_is_not_serialized():
    program = {"x": partial(traced, SystemRandom().random())}
    for owner in ("first", "second"):
        build(program, owner=owner)
    with pytest.raises(AssertionError):
        build({"x": must_not_trace}, owner="second")


@pytest.mark.parametrize("change", ["owner", "source", "flags", "setting", "devices", "damage"])
def test_a_program_is_traced_where_anything_is_different(
    change: str,
    serialized: ProgramCache,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
):
    build({"half": partial(traced, SystemRandom().random())})
    build({"half": must_not_trace})
    mesh, owner = MESH, "test"
    if change == "owner":
        owner = "other"
    elif change == "source":
        monkeypatch.setattr(program_cache, "_source", lambda: "edited")
    elif change == "flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    elif change == "setting":
        request.addfinalizer(lambda: jax.config.update("jax_numpy_rank_promotion", "allow"))
        jax.config.update("jax_numpy_rank_promotion", "warn")
    elif change == "devices":
        mesh = make_mesh(jax.devices()[2:4])
    else:
        (entry,) = serialized.path.glob("half-*")
        entry.write_bytes(entry.read_bytes()[:-1])
    with pytest.raises(AssertionError):
        building.build_all({"half": must_not_trace}, mesh, owner=owner)


def test_no_program_is_kept_of_source_that_was_edited_since_the_process_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "pipeline").mkdir()
    module = tmp_path / "pipeline" / "module.py"
    module.write_text("")
    monkeypatch.setattr(program_cache, "_SOURCE", tmp_path)
    read = program_cache._source.__wrapped__
    assert read() is None
    os.utime(module, (0, 0))
    before = read()
    module.write_text("x = 1")
    os.utime(module, (0, 0))
    assert None not in {before, read()}
    assert before != read()


def test_runs_of_other_names_seeds_and_data_have_the_same_programs():
    def key(**changes: Any) -> str:
        return repr(traced_settings(tiny.make_config(**changes)))

    assert key(run={"name": "a", "seed": 1}, budget={"steps": 5}) == key()
    assert key(rollout={"temperature": 0.5}) != key()
    with pytest.raises(AttributeError):
        _ = traced_settings(tiny.make_config()).run.seed


def test_a_compiler_error_is_raised(monkeypatch: pytest.MonkeyPatch):
    compile_program = building.compile_program

    def bad(name: str, *given: Any) -> jax.stages.Compiled:
        if name == "bad":
            raise ZeroDivisionError
        return compile_program(name, *given)

    monkeypatch.setattr(building, "compile_program", bad)
    with pytest.raises(ZeroDivisionError):
        build({name: partial(traced, 5.0) for name in ("good", "bad")})


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
    program = build({"half": partial(traced, 0.5)})["half"]
    half = 4 * 8 * 4 // 2
    assert result_bytes(program) == half
    assert program_bytes(program) == 2 * half
    whole: Any = jax.ShapeDtypeStruct((3, 5), jnp.int8, sharding=replicated(MESH))
    assert array_bytes({"rows": ROWS, "whole": [whole]}) == half + 15
