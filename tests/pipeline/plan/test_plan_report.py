"""The plan report: every printed figure is one of its JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from configs.load import load_config
from pipeline.plan.compiler import CompilerReport
from pipeline.plan.forecast import forecast
from pipeline.plan.plan_lines import lines
from pipeline.plan.plan_report import PlanReport, plan_figures
from pipeline.plan.search.fitting import choose_placement
from pipeline.plan.search.suggestions import suggestions
from pipeline.plan.verify import CompilerCheck, Verified
from tests.pipeline.plan.presets import FREE, PROJECT, case, choice, preset

GIB = 2**30


@cache
def planned(
    *overrides: tuple[str, str], model: str = "gemma3_4b", gib: float = 15.75
) -> PlanReport:
    given = case(preset(model, *overrides))
    chip = replace(given.topology.chip, hbm_gib=gib)
    given = replace(given, topology=replace(given.topology, chip=chip))
    choice = choose_placement(given)
    return PlanReport(given, choice, forecast(given, choice.chosen))


def with_changes(found: PlanReport) -> PlanReport:
    return replace(found, changes=suggestions(found.case, found.plan))


@pytest.fixture(scope="module")
def found() -> PlanReport:
    return with_changes(planned(*FREE))


def text_lines(figures: dict[str, Any]) -> list[str]:
    return list(lines(json.loads(json.dumps(figures))))


def line(text: list[str], start: str) -> str:
    (one,) = [line for line in text if line.startswith(start)]
    return one


def test_printed_figures_equal_the_json(found: PlanReport) -> None:
    figures = plan_figures(found)
    text = text_lines(figures)
    for phase, memory in figures["memory"].items():
        *parts, total = [float(cell) for cell in re.findall(r"~([\d.]+)", _row(text, phase, 0))]
        assert parts == [round(size, 2) for size in memory["parts_gib"].values()]
        assert total == round(memory["gib"], 2)
        assert memory["gib"] == pytest.approx(sum(memory["parts_gib"].values()))
    for phase, seconds in figures["step"]["seconds"].items():
        row = _row(text, phase, -1)
        ends = [seconds["range"][end] for end in ("low", "high")]
        cells = [f"~{one:.2f}" for one in (seconds["expected"], *ends)]
        assert re.findall(r"~[\d.]+", row) == cells
    for one in figures["compared"]:
        row = line(text, f"{one['name']}  ")
        cells = [f"~{one[key]:.2f}" for key in ("gib", "sampling_s", "learning_s", "step_s")]
        assert re.findall(r"~[\d.,]+(?= )", row)[:5] == [*cells, f"~{one['tokens_per_s']:,.0f}"]
        assert ("chosen" in row) == one["chosen"]
    budget = figures["budget"]
    expected = budget["outcomes"]["expected"]
    assert f"~{expected['steps']:,} steps" in line(text, "budget 8.00 h")
    assert f"~{budget['cost_usd']:,.2f} dollars at 1.20" in "\n".join(text)
    for one in figures["changes"]:
        cells = [f"~{one['tokens_per_s']:,.0f}", f"~{one['gain']:+.0%}"]
        cells += [f"~{one['gib']:.2f}", f"~{one['limit_gib']:.2f}"]
        cells += ["settings" if one["settings"] else "hardware"]
        assert line(text, f"{one['change']}  ").removeprefix(one["change"]).split() == cells


def _row(text: list[str], name: str, which: int) -> str:
    """A table row that begins with `name`."""
    return [one for one in text if re.match(rf"{name} +~", one)][which]


def test_everything_estimated_is_marked(found: PlanReport) -> None:
    text = text_lines(plan_figures(found))
    assert text[1].startswith("~ estimated; = by the TPU compiler")
    given = {"15.75", "14.96", "0.79", "1.20", "8.00", "9.6"}  # memory, price, budget, share
    for one in text:
        figures = one.partition("  ")[2] if one.startswith("rollout.partial") else one
        for mark, number in re.findall(r"([~=]?[+-]?)(?<![\d.])(\d[\d,]*(?:\.\d+|%))", figures):
            assert mark.startswith("~") or number in given, one


def sources(figures: Any, path: str = "", own: str | None = None) -> dict[str, str | None]:
    """Every number in a report by its path, with its source."""
    if isinstance(figures, dict):
        own = figures.get("source", own)
        items = figures.items()
    elif isinstance(figures, list):
        items = enumerate(figures)  # type: ignore[assignment]
    else:
        return {path: own} if isinstance(figures, int | float) else {}
    found: dict[str, str | None] = {}
    for key, value in items:
        found |= sources(value, f"{path}.{key}", own)
    return found


def made_up(found: PlanReport) -> PlanReport:
    """Verified by a compiler that reports on updates only."""
    figures = CompilerReport(True, 6 * GIB, 61.0, seconds=0.25)
    programs = {"gradient 8": CompilerCheck("update", figures, 0.2)}
    verified = Verified(found.choice.chosen, programs, (), 1, 61.0)
    return replace(found, verified=verified)


def test_every_figure_in_the_json_has_a_source(found: PlanReport) -> None:
    estimated, mixed = (sources(plan_figures(one)) for one in (found, made_up(found)))
    # Limits of the machine, and chosen or configured values.
    given = (".topology.", ".plan.", ".verified.by_compiler")
    for path, source in (estimated | mixed).items():
        assert source in {"estimated", "compiler"} or path.startswith(given), path
    assert set(plan_figures(found)["sources"]) == {"estimated", "compiler"}
    for path, source in estimated.items():
        assert source == "estimated" or path.startswith(given), path
    compilers = {path for path, source in mixed.items() if source == "compiler"}
    assert {path for path in compilers if not path.startswith(".verified.")} == {
        ".step.seconds.update.expected",
    }
    programs = ".verified.programs.gradient 8"
    assert mixed[f"{programs}.seconds"] == mixed[f"{programs}.gib"] == "compiler"
    assert mixed[f"{programs}.estimated.seconds"] == "estimated"


def duration(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1, "min": 60, "h": 3600}[unit]


AROUND = r"~([\d.]+ (?:s|min|h)) \(~(.*) to ~(.*)\)"
"""A time with its range."""
BUDGETS = [
    (("budget.time", "9h"),),
    (("budget.time", "12m"),),
    (("budget.time", "10m"),),
    (("budget.time", "none"), ("budget.steps", "80")),
]


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_range_holds_its_value(budget: tuple[tuple[str, str], ...]) -> None:
    figures = plan_figures(planned(*budget, model="gemma3_1b"))
    for what in ("steps", "wall_s", "compile_s"):
        found = figures["budget"][what]
        assert found["range"]["low"] <= found["expected"] <= found["range"]["high"], what
    text = line([one for one in text_lines(figures) if "TOO SMALL" not in one], "budget ")
    counted = r"~([\d,]+) steps(?: \(~([\d,]+) to ~([\d,]+)\))?"
    said = re.fullmatch(f"budget .*: {counted} in {AROUND}", text)
    assert said
    steps = [int(one.replace(",", "")) for one in said.groups()[:3] if one is not None]
    wall = [duration(one) for one in said.groups()[3:]]
    # A given number of steps has no range.
    assert len(steps) == (1 if figures["budget"]["steps_given"] else 3)
    assert min(steps[1:], default=80) <= steps[0] <= max(steps[1:], default=80)
    assert wall[1] <= wall[0] <= wall[2]
    slow = figures["budget"]["outcomes"]["high"]
    words = any("at the high end of the ranges no step fits" in one for one in text_lines(figures))
    assert words == (figures["budget"]["enough"] and slow["steps"] == 0)


def test_the_first_step_is_reported_with_cold_and_warm_caches(found: PlanReport) -> None:
    figures = plan_figures(found)
    text, first = text_lines(figures), figures["budget"]["first_step"]
    for caches, parts in (("cold", ["download", "start"]), ("warm", ["start"])):
        said = line(text, f"  first optimizer step done with {caches} caches after ")
        shown = re.fullmatch(rf".* after {AROUND}: (.*)", said)
        assert shown
        expected, low, high = (duration(one) for one in shown.groups()[:3])
        seconds = first[caches]["seconds"]
        assert low < expected < high
        assert expected == pytest.approx(seconds["expected"], rel=0.02)
        each = [one.rsplit(" ~", 1) for one in shown[4].split(", ")]
        parts += ["compile", "sizing", "tests", "validation", "export", "step"]
        assert [name for name, _ in each] == parts
        assert sum(duration(one) for _, one in each) == pytest.approx(expected, rel=0.05)
    gib = figures["budget"]["download_gib"]
    assert f"  download of ~{gib:.2f} GiB, assumed: 100 MB per second" in text


def test_the_suggested_settings_make_the_plan(found: PlanReport) -> None:
    figures = plan_figures(found)
    settings = [
        (key, "none" if value is None else str(value))
        for key, value in figures["compared"][0]["set"].items()
    ]
    assert settings, "the colocated base is not the best for itself"
    again = choice("gemma3_4b", *FREE, *settings).chosen
    assert again.configured
    best = found.choice.compared[0]
    assert again.config.plan == replace_unsized(best.config.plan, again.config.plan)


def replace_unsized(plan: Any, like: Any) -> Any:
    """The plan with irrelevant settings copied from another one."""
    return plan.model_copy(update={"slot_buckets": like.slot_buckets, "samplers": like.samplers})


def test_fixed_sizes_are_compared_with_better_ones() -> None:
    figures = plan_figures(planned())
    assert figures["plan"]["configured"]
    assert figures["plan"]["set"] == {}
    text = text_lines(figures)
    assert "chosen: as configured (colocated, base on every device); sizes as given" in text
    settings = line(text, "settings for the fastest: ")
    assert settings.count(" = ") == len(figures["compared"][0]["set"])


def test_a_plan_that_does_not_fit_names_the_shortage() -> None:
    for gib, what in (
        (7.0, "the base alone takes ~7.23 GiB of the 6.65"),
        (8.0, "base, adapter and optimizer alone take ~8.07 GiB of the 7.60 that may be used, in"),
        (9.0, "prefill takes ~11.44 GiB of the 8.55"),
    ):
        figures = plan_figures(planned(gib=gib))
        text = text_lines(figures)
        assert not figures["plan"]["fits"]
        assert figures["plan"]["short"] in line(text, "  DOES NOT FIT")
        assert what in figures["plan"]["short"]
        assert not any(one.startswith(("  settings for it", "seconds of a step")) for one in text)
        row = line(text, "as configured ")
        assert row.endswith(f"does not fit: {what}") or f"  does not fit: {what}" in row
        assert len(re.findall("~", row.partition("does not fit")[0])) == 1  # its memory


def test_the_compilers_figures_are_marked(found: PlanReport) -> None:
    figures = CompilerReport(True, 6 * GIB, 61.0, seconds=0.25, modelled_s=0.05)
    program = CompilerCheck("update", figures, 0.2)
    cached = replace(program, phase="decode", report=replace(figures, cached=True))
    verified = Verified(
        found.choice.chosen,
        {"gradient 8": program, "segment 240": cached},
        ("gradient 16 does not fit: =17.00 GiB in use on the chip",),
        1,
        61.0,
    )
    text = text_lines(plan_figures(replace(found, verified=verified)))
    assert line(text, "verified: ").startswith("verified: 1 programs compiled in 61 s")
    row = r"gradient 8 +=6\.00 +=250\.0 +=50\.0 +~200\.0 +fits"
    assert re.match(row, line(text, "gradient 8"))
    assert line(text, "ms: by the compiler's estimate or its schedule").endswith(
        "modelled: what it has no estimate of, by its schedule and its traffic"
    )
    assert re.match(r"update +=", [one for one in text if one.startswith("update")][1])
    assert line(text, "searched: ").endswith("=17.00 GiB in use on the chip")


def test_unreported_sizes_are_null(found: PlanReport) -> None:
    unknown = CompilerCheck("decode", CompilerReport(False, None, 9.0), 0.2)
    known = CompilerCheck("update", CompilerReport(True, 6 * GIB, 61.0, seconds=0.25), 0.2)
    plan = replace(found.choice.chosen, fits=False)
    programs = {"segment 240": unknown, "gradient 8": known}
    verified = Verified(plan, programs, (), 1, 9.0)
    figures = plan_figures(replace(found, verified=verified))
    text = text_lines(figures)
    assert figures["verified"]["programs"]["segment 240"]["gib"] is None
    assert re.match(r"segment 240 +>15\.75 +~200\.0 +DOES NOT FIT", line(text, "segment 240"))
    assert line(text, "  DOES NOT FIT").endswith(
        "segment 240 takes >15.75 GiB of the 15.59 that may be used"
    )
    assert not any(
        one.startswith("seconds of a step") for one in text
    )  # a plan that does not fit has no step


def test_small_memory_is_reported_in_mib() -> None:
    given = case(load_config(PROJECT / "configs/demo.toml"))
    choice = choose_placement(given)
    plan = PlanReport(given, choice, forecast(given, choice.chosen), ())
    text = text_lines(plan_figures(plan))
    memory = plan_figures(plan)["memory"]["update"]["gib"]
    assert f"~{1024 * memory:.2f}" in _row(text, "update", 0)
    assert line(text, "MiB per chip")
    assert "dollars" not in "\n".join(text)
