"""The plan report: every printed figure is one of its JSON."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from configs.load import load_config
from pipeline.plan.compiler import CompilerReport
from pipeline.plan.forecast import forecast
from pipeline.plan.plan_report import Planned, plan_report
from pipeline.plan.search.fitting import PlanCase, choose_placement
from pipeline.plan.search.suggestions import suggestions
from pipeline.plan.verify import CompilerCheck, Verified
from tests.pipeline.plan.presets import FREE, PROJECT, case, choice, preset

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


def row(text: list[str], name: str, which: int) -> str:
    """A table row that begins with `name`."""
    return [one for one in text if re.match(rf"{name} +[~=]", one)][which]


def test_printed_figures_equal_the_json(found: Planned) -> None:
    figures, text = plan_report(found)
    for phase, memory in figures["memory"].items():
        sizes = [*memory["parts_gib"].values(), memory["gib"]]
        assert row(text, phase, 0).split()[1:] == [f"~{size:.2f}" for size in sizes]
        assert memory["gib"] == pytest.approx(sum(memory["parts_gib"].values()))
    for phase, seconds in figures["step"]["seconds"].items():
        ends = [seconds["range"][end] for end in ("low", "high")]
        cells = [f"~{one:.2f}" for one in (seconds["expected"], *ends)]
        assert row(text, phase, -1).split()[1:4] == cells
    for one in figures["compared"]:
        cells = [f"~{one[key]:.2f}" for key in ("gib", "sampling_s", "learning_s", "step_s")]
        cells.append(f"~{one['tokens_per_s']:,.0f}")
        *shown, verdict = line(text, f"{one['name']}  ").split()
        assert shown[-5:] == cells
        assert (verdict == "chosen") == one["chosen"]
    budget = figures["budget"]
    assert f"~{budget['steps']['expected']:,} steps" in line(text, "budget 8.00 h")
    assert f"~{budget['cost_usd']:,.2f} dollars at 1.20" in line(text, "  ~")
    for one in figures["changes"]:
        cells = [f"~{one['tokens_per_s']:,.0f}", f"~{one['gain']:+.0%}"]
        cells += [f"~{one['gib']:.2f}", f"~{one['limit_gib']:.2f}"]
        cells += ["settings" if one["settings"] else "hardware"]
        assert line(text, f"{one['change']}  ").removeprefix(one["change"]).split() == cells


def test_everything_estimated_is_marked(found: Planned) -> None:
    _, text = plan_report(found)
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


def verified(
    found: Planned, programs: dict[str, CompilerCheck], *searched: str, fits: bool = True
) -> Planned:
    plan = replace(found.choice.chosen, fits=fits)
    return replace(found, verified=Verified(plan, programs, searched, 1, 61.0))


UPDATE = CompilerCheck("update", CompilerReport(True, 6 * GIB, 61.0, 0.25, 0.05), 0.2)


def test_every_figure_in_the_json_has_a_source(found: Planned) -> None:
    figures, _ = plan_report(verified(found, {"gradient 8": UPDATE}))
    assert set(figures["sources"]) == {"estimated", "compiler"}
    # Limits of the machine, and chosen or configured values.
    given = (".topology.", ".plan.", ".verified.by_compiler")
    of = {path: one for path, one in sources(figures).items() if not path.startswith(given)}
    compilers = {path for path, source in of.items() if source == "compiler"}
    assert {source for path, source in of.items() if path not in compilers} == {"estimated"}
    own = {path for path in compilers if path.startswith(".verified.")}
    assert compilers - own == {".step.seconds.update.expected"}
    program = ".verified.programs.gradient 8"
    assert {f"{program}.seconds", f"{program}.gib"} <= own
    assert of[f"{program}.estimated.seconds"] == "estimated"


def duration(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1, "min": 60, "h": 3600}[unit]


AROUND = r"~([\d.]+ (?:s|min|h)) \(~(.*) to ~(.*)\)"
"""A time with its range."""


@pytest.mark.parametrize(
    "budget", [{"time": "9h"}, {"time": "12m"}, {"time": "10m"}, {"steps": 80}]
)
def test_a_range_holds_its_value(budget: dict[str, object]) -> None:
    settings = {"time": "none"} | budget
    overrides = [(f"budget.{key}", str(value)) for key, value in settings.items()]
    figures, text = plan_report(of_preset(*overrides, model="gemma3_1b"))
    found = figures["budget"]
    for what in ("steps", "wall_s", "compile_s"):
        ends = found[what]["range"]
        assert ends["low"] <= found[what]["expected"] <= ends["high"], what
    shown = line([one for one in text if "TOO SMALL" not in one], "budget ")
    said = re.fullmatch(rf"budget .*: ~([\d,]+) steps( \(~.* to ~.*\))? in {AROUND}", shown)
    assert said
    assert int(said[1].replace(",", "")) == found["steps"]["expected"]
    assert (said[2] is None) == ("steps" in budget)  # a given number of steps has no range
    wall = [duration(one) for one in said.groups()[2:]]
    assert wall[1] <= wall[0] <= wall[2]
    words = any("at the high end of the ranges no step fits" in one for one in text)
    assert words == (found["enough"] and found["outcomes"]["high"]["steps"] == 0)


def test_the_first_step_is_reported_with_cold_and_warm_caches(found: Planned) -> None:
    figures, text = plan_report(found)
    first = figures["budget"]["first_step"]
    for caches, parts in (("cold", ["download", "start"]), ("warm", ["start"])):
        said = line(text, f"  first optimizer step done with {caches} caches after ")
        shown = re.fullmatch(rf".* after {AROUND}: (.*)", said)
        assert shown
        expected, low, high = (duration(one) for one in shown.groups()[:3])
        assert low < expected < high
        assert expected == pytest.approx(first[caches]["seconds"]["expected"], rel=0.02)
        each = [one.rsplit(" ~", 1) for one in shown[4].split(", ")]
        parts += ["compile", "sizing", "tests", "validation", "export", "step"]
        assert [name for name, _ in each] == parts
        assert sum(duration(one) for _, one in each) == pytest.approx(expected, rel=0.05)
    gib = figures["budget"]["download_gib"]
    assert f"  download of ~{gib:.2f} GiB, assumed: 100 MB per second" in text


def test_the_suggested_settings_make_the_plan(found: Planned) -> None:
    figures, _ = plan_report(found)
    settings = [
        (key, "none" if value is None else str(value))
        for key, value in figures["compared"][0]["set"].items()
    ]
    assert settings, "the colocated base is not the best for itself"
    again = choice("gemma3_4b", *FREE, *settings).chosen
    assert again.configured
    best, without = found.choice.compared[0], {"slot_buckets": None, "samplers": None}
    plans = (again.config.plan, best.config.plan)
    assert len({one.model_copy(update=without).model_dump_json() for one in plans}) == 1


def test_fixed_sizes_are_compared_with_better_ones() -> None:
    figures, text = plan_report(of_preset())
    assert figures["plan"]["configured"]
    assert figures["plan"]["set"] == {}
    assert "chosen: as configured (colocated, base on every device); sizes as given" in text
    settings = line(text, "settings for the fastest: ")
    assert settings.count(" = ") == len(figures["compared"][0]["set"])


@pytest.mark.parametrize(
    ("gib", "what"),
    [
        (7.0, "the base alone takes ~7.23 GiB of the 6.65"),
        (8.0, "base, adapter and optimizer alone take ~8.07 GiB of the 7.60 that may be used, in"),
        (9.0, "prefill takes ~11.44 GiB of the 8.55"),
    ],
)
def test_a_plan_that_does_not_fit_names_the_shortage(gib: float, what: str) -> None:
    figures, text = plan_report(of_preset(gib=gib))
    assert not figures["plan"]["fits"]
    assert what in figures["plan"]["short"]
    assert line(text, "  DOES NOT FIT") == f"  DOES NOT FIT: {figures['plan']['short']}"
    assert not any(one.startswith(("  settings for it", "seconds of a step")) for one in text)
    before, _, after = line(text, "as configured ").partition("  does not fit: ")
    assert after == figures["plan"]["short"]
    assert before.count("~") == 1  # its memory


def test_the_compilers_figures_are_marked(found: Planned) -> None:
    programs = {"gradient 8": UPDATE, "segment 240": replace(UPDATE, phase="decode")}
    searched = "gradient 16 does not fit: =17.00 GiB in use on the chip"
    _, text = plan_report(verified(found, programs, searched))
    assert line(text, "verified: ").startswith("verified: 1 programs compiled in 61 s")
    assert line(text, "gradient 8").split() == [
        *("gradient", "8", "=6.00", "=250.0", "=50.0", "~200.0", "fits")
    ]
    assert line(text, "ms: by the compiler's estimate or its schedule").endswith(
        "modelled: what it has no estimate of, by its schedule and its traffic"
    )
    assert row(text, "update", 1).split()[1].startswith("=")
    assert line(text, "searched: ") == f"searched: {searched}"


def test_a_size_that_the_compiler_does_not_report_is_null(found: Planned) -> None:
    unknown = CompilerCheck("decode", CompilerReport(False, None, 9.0), 0.2)
    programs = {"segment 240": unknown, "gradient 8": UPDATE}
    figures, text = plan_report(verified(found, programs, fits=False))
    assert figures["verified"]["programs"]["segment 240"]["gib"] is None
    assert re.fullmatch(r"segment 240 +>15\.75 +~200\.0 +DOES NOT FIT", line(text, "segment 240"))
    assert line(text, "  DOES NOT FIT").endswith(
        "segment 240 takes >15.75 GiB of the 15.59 that may be used"
    )
    assert not any(one.startswith("seconds of a step") for one in text)


def test_small_memory_is_reported_in_mib() -> None:
    figures, text = plan_report(planned(case(load_config(PROJECT / "configs/demo.toml"))))
    assert line(text, "MiB per chip")
    assert row(text, "update", 0).split()[-1] == f"~{1024 * figures['memory']['update']['gib']:.2f}"
    assert "dollars" not in "\n".join(text)
