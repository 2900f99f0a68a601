"""`launch.bench`: simulation, words and requests by value; each command with `--quick`."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from launch.bench import __main__ as bench
from launch.bench import costs, hbm, latency, sizing
from launch.bench.harness import progress
from launch.bench.serve import Engine, simulate
from pipeline.plan.topology import GIB


def test_requests_wait_for_slots_and_decode_in_segments():
    engine = Engine(slots=2, segment=2, step_s=1.0, prefill_s=1.0, prefilled=1)
    found = simulate(engine, [0.0, 0.0, 0.0], [2, 2, 2])
    # Two prefills and a segment: 4 s; the third request then takes 3 s.
    assert found["tokens_per_s"] == pytest.approx(4 / 4)
    assert found["backlog"] == 1
    assert found["ttft_s"] == 4
    assert found["token_ms"] == 0
    assert found["queue"] == pytest.approx(4 / 7)


def test_the_throughput_of_an_overloaded_engine_is_that_with_requests_waiting():
    engine = Engine(slots=1, segment=2, step_s=1.0, prefill_s=1.0, prefilled=1)
    # The second request waits for the 3 s and 2 s of the first one's segments.
    assert simulate(engine, [0.0, 0.0], [4, 2])["tokens_per_s"] == pytest.approx(4 / 5)


def test_an_idle_engine_waits_for_the_next_request():
    engine = Engine(slots=4, segment=2, step_s=1.0, prefill_s=1.0, prefilled=4)
    found = simulate(engine, [0.0, 100.0], [4, 2])
    # 1 s of prefill, then two segments; the second request begins at 100 s and ends at 103 s.
    assert found["tokens_per_s"] == pytest.approx(4 / 100)
    assert found["backlog"] == 0
    assert found["ttft_s"] == 3
    assert found["queue"] == 0


def test_knee_and_lumps_are_named():
    per_token = {1: 1.0, 32: 0.1, 64: 0.05, 68: 0.06, 128: 0.045}
    points = [(batch, 1, ms, 1) for batch, ms in per_token.items()]
    (text,) = sizing.words({"1b, LoRA": {"points": points}})
    assert "80% of the best rate, 22,222 tokens a second, from batch 64" in text
    assert "68 (0.83 of the rate at 64)" in text


def test_half_of_the_devices_have_twice_the_batch():
    names = [f"1b, 2,048 positions, {precision}" for precision in ("as loaded", "int8 weights")]
    whole, half = {"1": 2.0, "8": 3.0}, {"1": 1.5, "8": 2.5, "16": 4.5}
    (text,) = latency.words(dict(zip(names, (whole, half), strict=True)))
    assert "16 rows on each, a step takes 1.50 times as long" in text


def test_a_gradient_on_a_v5e_is_asked_for_and_adam_counts_beside_it(monkeypatch, tmp_path):
    found = SimpleNamespace(fits=True, hbm_bytes=4 * GIB, seconds=0.2, compile_s=1.0)
    asked = list[tuple[int, str]]()

    def compile_programs(config, _shape, programs, *, say):
        assert say is progress
        asked.extend((config.micro_batch_rows, program) for program in programs)
        return dict.fromkeys(programs, found)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(costs, "compile_programs", compile_programs)
    figures = hbm.ours(sequences=2)
    assert asked == [(2, "gradient 2")]
    # Rank 32 on all matrices of gemma3-1b: 25.1 million parameters, two float32 moments of each.
    assert figures["gib"] - 4 == pytest.approx(2 * 4 * 25.13e6 / GIB, rel=1e-3)
    assert figures["us_per_token"] == pytest.approx(1e6 * 0.2 / 2048)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in bench.BENCHMARKS if name not in ("hbm", "race")])
def test_a_quick_benchmark_measures_all_rows_and_draws(name, tmp_path):
    pytest.importorskip("torch" if name == "torch" else "jax")
    file, request = tmp_path / "found.json", [name, "--quick"]
    assert bench.main([*request, "--json", str(file)]) == 0
    found = json.loads(file.read_text())["sections"]
    hows = {row["how"] for rows in found.values() for row in rows.values()}
    assert all("measured on" in how or how == "computed" for how in hows)
    for section in bench.prepare(request)[1]:
        if section.draw is not None:
            assert file.with_suffix(f".{section.name}.png").stat().st_size > 5_000
