"""`launch.bench sweep`: small cases of what its rows measure, its claims, and its plot."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launch.bench import __main__ as bench
from launch.bench import (
    hbm_bench,
    models,
    rollout_case,
    rollout_memory,
    sweep_bench,
    sweep_plot,
    sweep_speed,
)
from launch.bench.child import in_child
from launch.bench.table import Benchmark, Column, Row, Section
from pipeline.compute.decode.programs import DecodePrograms
from pipeline.compute.decode.rollout_weights import rollout_policy
from pipeline.contracts.topology import HBM_GIB
from tests.launch.tiny_rollouts import SIZES, TINY

SECTIONS = {section.name: section for section in sweep_bench.BENCHMARK.sections}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the benchmark a tiny policy with few and short rollouts."""
    monkeypatch.setitem(models.MODELS, "small_policy", models.MODELS["small_policy"] | TINY)
    for name, size in SIZES.items():
        for module in (rollout_case, sweep_speed):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, size)


def row(series: str, slots: int, **figures: Any) -> dict[str, Any]:
    return {"place": "v5e", "series": series, "slots": slots, **figures}


def claims(section: str, **found: dict[str, Any]) -> list[bool]:
    return [claim.holds for claim in SECTIONS[section].claims(found)]


def test_rows_are_named_by_series_and_slots():
    assert len(SECTIONS) == len(sweep_bench.BENCHMARK.sections)
    for section in SECTIONS.values():
        assert len({each.name for each in section.rows}) == len(section.rows)
        for each in section.rows:
            known = each.known
            slots = "1 slot" if known["slots"] == 1 else f"{known['slots']} slots"
            assert each.name == f"{known['series']}, {slots}"
            assert each.arguments["slots"] == known["slots"]
    for place in ("cpu", "accelerator"):
        assert {each.known["place"] for each in SECTIONS[place].rows} == {place}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rollout__top_k": 5},
        {"plan__rollout_weights": "merged", "plan__kv_cache": "int8"},
    ],
    ids=["LoRA", "top-k", "merged, int8 KV"],
)
def test_a_segment_is_measured_with_every_slot_busy(tiny, settings):
    found = sweep_speed.segments(slots=2, length=18, repeats=1, **settings)
    assert found["device"] == "cpu"
    assert found["tokens_per_s"] == pytest.approx(2 / (1e-3 * found["step_ms"]))
    more = sweep_speed.segments(slots=8, length=18, repeats=1, **settings)
    assert more["total_mib"] > found["total_mib"] > 0


def test_a_merged_policy_holds_no_adapter(tiny):
    sizes = [
        sweep_speed.segments(slots=2, length=18, repeats=1, **settings)["total_mib"]
        for settings in ({"plan__rollout_weights": "merged"}, {})
    ]
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize(("kind", "copied"), [("shared", False), ("merged", True)])
def test_the_learner_s_matrices_count_beside_a_copy(tiny, kind, copied):
    config = rollout_case.case_config(plan__rollout_weights=kind)
    policy, base, adapter = rollout_case.make_policy(config)
    matrices = [value for name, value in base.items() if f"{name}_lora_a" in adapter]
    run = DecodePrograms(rollout_policy(policy, config), config, rollout_case.VOCABULARY)
    expected = sum(value.nbytes for value in matrices) if copied else 0
    assert rollout_memory._copied(run) == expected
    assert bool(run.policy.adapter_shapes) is not copied


def test_a_cpu_is_not_an_accelerator():
    assert sweep_speed.accelerator() == {"absent": "JAX finds a CPU only"}


def test_memory_grows_with_the_slots_of_each_series():
    good = {
        "b": row("LoRA", 8, total_gib=2.5),
        "a": row("LoRA", 1, total_gib=2.0),
        "c": row("LoRA", 512, fits=False, needs_gib=17.0),
        "other": row("merged", 64, total_gib=1.0),
    }
    assert claims("v5e slots", **good) == [True]
    assert claims("v5e slots", **good | {"c": row("LoRA", 512, total_gib=2.4)}) == [False]
    same = {"a": row("LoRA", 1, total_gib=2.0), "b": row("LoRA", 8, total_gib=2.0)}
    assert claims("v5e slots", **same) == [False]
    measured = {"a": row("LoRA", 1, total_mib=2.0), "b": row("LoRA", 2, total_mib=1.0)}
    assert claims("cpu", **measured) == [False]


def test_whole_logits_violate_the_claim():
    assert claims("v5e lengths", a=row("LoRA", 1, invariant_3=True)) == [True]
    whole = {"a": row("LoRA", 1, invariant_3=True), "b": row("int8", 1, invariant_3=False)}
    (claim,) = SECTIONS["v5e weights"].claims(whole)
    assert not claim.holds
    assert claim.text.endswith("; b do")


@pytest.mark.parametrize(("slots", "more"), [(64, 72), (128, 136)])
def test_a_drop_in_speed_violates_the_claim(slots, more):
    section = SECTIONS["v5e top-k"]
    names = {each.known["slots"]: each.name for each in section.rows}

    def shown(after: dict[str, Any]) -> list[bool]:
        found = {
            names[slots]: row("top k of 64", slots, total_gib=1.0, tokens_per_s=1000.0),
            names[more]: row("top k of 64", more, total_gib=2.0, **after),
        }
        return [claim.holds for claim in section.claims(found)]

    assert shown({"tokens_per_s": 900.0}) == [True, True]
    assert shown({"tokens_per_s": 899.0}) == [True, False]
    assert shown({"failed": "so"}) == [True, False]


V5E = {
    "64": row("LoRA", 64, tokens_per_s=6000.0, total_gib=4.0),
    "1": row("LoRA", 1, tokens_per_s=200.0, total_gib=2.0),
    "merged": row("merged", 64, tokens_per_s=7000.0, total_gib=5.0),
    "large": row("LoRA", 4096, fits=False, needs_gib=20.0),
}
CPU = {
    "1": {"place": "cpu", "series": "LoRA", "slots": 1, "device": "cpu"}
    | {"tokens_per_s": 500.0, "total_mib": 8.0}
}


def content(**sections: dict[str, Any]) -> dict[str, Any]:
    return {"benchmark": "sweep", "machine": "Some CPU, 2 cores", "sections": sections}


def points(line: Any) -> list[tuple[float, float]]:
    """The points of a line."""
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_the_plot_shows_the_figures():
    pytest.importorskip("matplotlib")
    drawn = sweep_plot.figure(content(slots=V5E, cpu=CPU))
    assert drawn is not None
    v5e, cpu = drawn.subfigs
    assert v5e.get_suptitle().endswith(
        "one TPU v5e chip: the compiler's estimates, not measurements"
    )
    assert cpu.get_suptitle().endswith("measured on Some CPU, 2 cores")
    speed, memory = v5e.axes
    assert (speed.get_ylabel(), memory.get_ylabel()) == ("tokens a second", "memory, GiB")
    lines = {line.get_label(): line for line in speed.lines}
    assert points(lines["LoRA"]) == [(1, 200), (64, 6000)]
    assert points(lines["merged"]) == [(64, 7000)]
    assert points(memory.lines[0]) == [(1, 2), (64, 4)]
    assert {height for _, height in points(memory.lines[-1])} == {HBM_GIB}
    assert memory.get_ylim()[0] == 0
    assert memory.get_ylim()[1] > HBM_GIB
    assert speed.get_xscale() == "log"
    (legend,) = v5e.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["LoRA", "merged", "the chip: 15.75 GiB"]
    assert [axes.get_ylabel() for axes in cpu.axes] == ["tokens a second", "memory, MiB"]
    assert points(cpu.axes[1].lines[0]) == [(1, 8)]
    assert len(cpu.axes[1].lines) == 1


def test_the_plot_is_a_png_whatever_its_name(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "drawn"
    assert sweep_plot.write(file=str(path), content=content(slots=V5E)) == {"written": True}
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert [each.name for each in tmp_path.iterdir()] == ["drawn"]


def test_no_plot_is_written_without_figures(tmp_path):
    path = tmp_path / "drawn.png"
    nothing = content(slots={"1": row("LoRA", 1, failed="so")}, cpu={})
    assert sweep_plot.write(file=str(path), content=nothing) == {"written": False}
    assert not path.exists()


def made_up(**how: Any) -> Benchmark:
    """A benchmark of two sections, the second of which needs a missing accelerator."""
    here = Row("a", "builtins:dict", {"gib": 1.0}, {}, {"slots": 3})
    columns = (Column("slots", "slots"), Column("gib", "GiB", "{:.2f}"))
    absent = Section("two", "Two", columns, (here,), needs="launch.bench.sweep_speed:accelerator")
    return Benchmark((Section("one", "One", columns, (here,)), absent), **how)


def test_known_figures_are_shown_and_absent_sections_reported(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(hbm_bench, "BENCHMARK", made_up())
    path = tmp_path / "found.json"
    assert bench.main(["hbm", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "| a | 3 | 1.00 |" in out
    assert "not measured: JAX finds a CPU only" in out
    assert json.loads(path.read_text())["sections"] == {
        "one": {"a": {"slots": 3, "gib": 1.0}},
        "two": {},
    }


def test_the_plot_is_drawn_after_each_section(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sweep_bench, "BENCHMARK", made_up(plot="a:b", plot_file="named.png"))
    asked = []

    def child(function: str, arguments: Any, *, environment: Any) -> dict[str, Any]:
        if function != "a:b":
            return in_child(function, arguments, environment=environment)
        asked.append((arguments["file"], [*arguments["content"]["sections"]["one"]]))
        if len(asked) > 2:
            raise RuntimeError("no space")
        return {"written": True}

    monkeypatch.setattr(bench, "in_child", child)
    assert bench.main(["sweep"]) == 0
    assert asked == [("named.png", ["a"])] * 2
    assert bench.main(["sweep", "--plot", str(tmp_path / "x.png"), "--only", "one"]) == 1
    assert asked[2:] == [(str(tmp_path / "x.png"), ["a"])]
    assert "no space" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["hbm", "--plot", "x.png"], "command line: --plot: hbm has no plot; sweep has one\n"),
        (["sweep", "--plot", "no/x"], "command line: --plot: no folder "),
        (["sweep", "--plot", "."], " is a folder; name a file\n"),
    ],
)
def test_a_plot_that_cannot_be_written_is_refused(capsys, argv, expected):
    assert bench.main(argv) == 2
    assert expected in capsys.readouterr().err
