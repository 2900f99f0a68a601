"""The plan report: every printed figure is one of its JSON."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from configs.load import load_config
from pipeline.plan.compiler import CompilerReport
from pipeline.plan.forecast import forecast
from pipeline.plan.plan_report import Planned, plan_report
from pipeline.plan.search.fitting import PlanCase, choose_placement
from pipeline.plan.search.suggestions import suggestions
from pipeline.plan.verify import CompilerCheck, Verified
from tests.pipeline.plan.presets import FREE, PROJECT, case, preset

GIB = 2**30


def planned(given: PlanCase) -> Planned:
    choice = choose_placement(given)
    return Planned(given, choice, forecast(given, choice.chosen))


@cache
def of_preset(*overrides: tuple[str, str], model: str = "gemma3_4b", gib: float = 15.75) -> Planned:
    given = case(preset(model, *overrides))
    chip = replace(given.topology.chip, hbm_gib=gib)
    return planned(replace(given, topology=replace(given.topology, chip=chip)))


@pytest.fixture(scope="module")
def found() -> Planned:
    free = of_preset(*FREE)
    return replace(free, changes=suggestions(free.case, free.plan))


def line(text: list[str], start: str) -> str:
    (one,) = [line for line in text if line.startswith(start)]
    return one


def row(text: list[str], name: str, which: int) -> list[str]:
    """Cells of a table row that begins with `name`."""
    return [one for one in text if re.match(rf"{name} +[~=]", one)][which].split()[1:]


def test_printed_figures_equal_the_json(found: Planned) -> None:
    figures, text = plan_report(found)
    for phase, memory in figures["memory"].items():
        sizes = [*memory["parts_gib"].values(), memory["gib"]]
        assert row(text, phase, 0) == [f"~{size:.2f}" for size in sizes]
        assert memory["gib"] == pytest.approx(sum(memory["parts_gib"].values()))
    for phase, seconds in figures["step"]["seconds"].items():
        assert row(text, phase, -1)[0] == f"~{seconds['expected']:.2f}"
    for one in figures["compared"]:
        cells = [f"~{one[key]:.2f}" for key in ("gib", "sampling_s", "learning_s", "step_s")]
        *shown, verdict = line(text, f"{one['name']}  ").split()
        assert shown[-5:] == [*cells, f"~{one['tokens_per_s']:,.0f}"]
        assert (verdict == "chosen") == one["chosen"]
    budget = figures["budget"]
    assert f"~{budget['steps']:,} steps" in line(text, "budget 8.00 h")
    assert f"~{budget['cost_usd']:,.2f} dollars at 1.20" in line(text, "  ~")
    assert f"download of ~{budget['download_gib']:.2f} GiB, assumed" in line(text, "  download of")
    for one in figures["changes"]:
        cells = [f"~{one['tokens_per_s']:,.0f}", f"~{one['gain']:+.0%}"]
        cells += [f"~{one['gib']:.2f}", f"~{one['limit_gib']:.2f}"]
        assert line(text, f"{one['change']}  ").removeprefix(one["change"]).split() == cells


def test_everything_estimated_is_marked(found: Planned) -> None:
    _, text = plan_report(found)
    assert text[1].startswith("~ estimated; = by the TPU compiler")
    given = {"15.75", "14.96", "0.79", "1.20", "8.00"}  # memory, price, budget
    for one in text:
        figures = one.partition("  ")[2] if one.startswith("rollout.partial") else one
        for mark, number in re.findall(r"([~=]?[+-]?)(?<![\d.])(\d[\d,]*(?:\.\d+|%))", figures):
            assert mark.startswith("~") or number in given, one


def test_a_plan_that_does_not_fit_names_the_shortage() -> None:
    figures, text = plan_report(of_preset(gib=7.0))
    short = figures["plan"]["short"]
    assert short.startswith("prefill takes ~11.44 GiB of the 6.65 that may be used: base ~7.23, kv")
    assert line(text, "  DOES NOT FIT") == f"  DOES NOT FIT: {short}"
    assert not any(one.startswith(("  settings for it", "seconds of a step")) for one in text)
    before, _, after = line(text, "as configured ").partition("  does not fit: ")
    assert (before.count("~"), after) == (1, short)  # its memory


def test_the_compilers_figures_are_marked(found: Planned) -> None:
    update = CompilerCheck("update", CompilerReport(True, 6 * GIB, 61.0, 0.25), 0.2)
    unknown = CompilerCheck("decode", CompilerReport(False, None, 9.0), 0.2)
    programs, searched = {"gradient 8": update, "segment 240": unknown}, ("gradient 16: no",)

    def of(*, fits: bool) -> Planned:
        plan = replace(found.choice.chosen, fits=fits)
        return replace(found, verified=Verified(plan, programs, searched))

    figures, text = plan_report(of(fits=True))
    shown = ["8", "=6.00", "=250.0", "~200.0", "fits"]
    assert line(text, "gradient 8").split()[1:] == shown
    assert re.fullmatch(r"segment 240 +>15\.75 +~200\.0 +DOES NOT FIT", line(text, "segment 240"))
    assert row(text, "update", 1)[0].startswith("=")
    assert figures["step"]["seconds"]["update"]["source"] == "compiler"
    assert figures["verified"]["source"] == "compiler"
    assert figures["verified"]["programs"]["segment 240"]["gib"] is None
    assert line(text, "searched: ") == "searched: gradient 16: no"
    _, text = plan_report(of(fits=False))
    short = "segment 240 takes >15.75 GiB of the 15.59 that may be used"
    assert line(text, "  DOES NOT FIT").endswith(short)
    assert not any(one.startswith("seconds of a step") for one in text)


def test_small_memory_is_reported_in_mib() -> None:
    figures, text = plan_report(planned(case(load_config(PROJECT / "configs/demo.toml"))))
    assert line(text, "MiB per chip")
    assert row(text, "update", 0)[-1] == f"~{1024 * figures['memory']['update']['gib']:.2f}"
    assert "dollars" not in "\n".join(text)
