"""The plan report as text: two screens, every figure from the report's JSON.

Estimates are marked with `~`, figures of the TPU compiler with `=`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.data.models.model_shape import LOADING_COPIES
from pipeline.plan.cost_model.memory import PARTS
from pipeline.plan.plan_report import COMPILER, ESTIMATED, REGIMES, compiled_size
from pipeline.plan.search.suggestions import settings_text

Figures = Mapping[str, Any]

_MARKS = "~ estimated; = by the TPU compiler, whose times are a model, too"
_SPEEDS_TEXT = "{:,.0f} GB/s, {:,.0f} TFLOP/s, in 8 bits {:,.0f} TOP/s"
_COMPILED_TIMES = (
    "ms: by the compiler's estimate or its schedule, at least the memory traffic at the peak "
    "bandwidth; modelled: what it has no estimate of, by its schedule and its traffic"
)
_MARK = {ESTIMATED: "~", COMPILER: "="}
"""Mark of a figure, by its `source`."""
_SPEEDS = {"sampling": "sampling_s", "learning": "learning_s", "step": "step_s"}
"""Seconds of a compared plan, by their titles."""


def lines(report: Figures) -> Iterator[str]:
    """The lines of the report, with a blank line between sections."""
    parts = (_head, _chosen, _memory, _step, _compared, _verified, _budget, _changes)
    for number, part in enumerate(parts):
        found = list(part(report))
        if found and number:
            yield ""
        yield from found


def _head(report: Figures) -> Iterator[str]:
    topology, lengths = report["topology"], report["lengths"]
    hosts = f", {topology['hosts']} hosts" if topology["hosts"] > 1 else ""
    yield (
        f"plan of {report['name']} for {topology['name']}: {topology['chips']} x "
        f"{topology['chip']} of {topology['hbm_gib']:.2f} GiB{hosts}"
    )
    if topology["plan_only"]:
        yield f"plan only: {topology['plan_only']}"
    measured = topology["speeds"]["measured"]
    yield _MARKS if measured else f"{_MARKS}; nothing is measured"
    if measured:
        yield (
            f"speeds of a chip as measured on this host at {measured}: "
            f"{_speeds_text(topology['speeds'])}; published: "
            f"{_speeds_text(topology['published_speeds'])}"
        )
    yield (
        f"assumed: prompts of ~{lengths['prompt']:.0f} tokens (at most {lengths['max_prompt']}), "
        f"completions of ~{lengths['completion']:.0f} (at most {lengths['max_completion']})"
    )


def _speeds_text(speeds: Figures) -> str:
    return _SPEEDS_TEXT.format(
        speeds["bytes_per_s"] / 1e9, speeds["bf16_flops"] / 1e12, speeds["int8_flops"] / 1e12
    )


def _chosen(report: Figures) -> Iterator[str]:
    plan = report["plan"]
    planned = plan["planned_sizes"]
    which = "sizes" if len(planned) != 1 else f"plan.{planned[0]}"
    yield f"chosen: {plan['name']}; {which} {'planned' if planned else 'as given'}"
    if plan["short"]:
        yield f"  DOES NOT FIT: {plan['short']}"
    yield (
        f"  slots {plan['slots']} ({plan['slots_per_shard']} per shard), segments of "
        f"{plan['segment_steps']}, prefill {plan['prefill_tokens']}"
    )
    yield (
        f"  micro-batches of {plan['micro_batch_tokens']} tokens ({plan['rows_per_shard']} x "
        f"{plan['row_tokens']} per shard), remat {plan['remat']}"
    )
    if plan["host_gib_per_chip"]:
        size = f"{plan['host_gib_per_chip']:.2f} GiB for each chip"
        more = f"{LOADING_COPIES} times as much again while they are loaded"
        yield f"  per-layer embeddings in host memory: {size}, and {more}"
    if plan["auto"] and plan["fits"]:
        yield f'  a run with plan.placement = "auto" has: {settings_text(plan["set"])}'
    elif plan["set"]:
        yield f"  settings for it: {settings_text(plan['set'])}"


def _memory(report: Figures) -> Iterator[str]:
    plan, memory = report["plan"], report["memory"]
    largest = max(figures["gib"] for figures in memory.values())
    unit, factor = ("GiB", 1) if largest >= 1 else ("MiB", 1024)
    limit, reserve = plan["limit_gib"], plan["reserve_gib"]
    yield (
        f"{unit} per chip; a plan may use {limit * factor:,.2f}, with {reserve * factor:,.2f} in "
        "reserve"
    )
    rows = [["", *(name.replace("kv_", "KV ") for name in PARTS), "total"]]
    for phase, figures in memory.items():
        sizes = [*figures["parts_gib"].values(), figures["gib"]]
        rows.append([phase, *(f"~{factor * size:.2f}" for size in sizes)])
    yield from table(rows)


def _step(report: Figures) -> Iterator[str]:
    if not report["plan"]["fits"]:
        return  # a plan that does not fit has no step
    step = report["step"]
    rows = [["seconds of a step", "expected", "from", "to", "bound by"]]
    for phase, figures in step["seconds"].items():
        rows.append([phase, *_marked(figures, "{:.2f}".format), REGIMES[figures["regime"]]])
    rows.append(["total", *_marked(step["total_s"], "{:.2f}".format), ""])
    yield from table(rows)
    yield (
        f"~{step['tokens_per_s']:,.0f} trained tokens per second; ~{step['slots_useful']:.0%} of "
        f"the slots' decode steps generate a token, ~{step['padding']:.0%} of the learner's "
        "positions are padding"
    )
    if step["most_prompts"] > step["prompts"]:
        yield (
            f'dynamic sampling ("{step["dynamic_sampling"]}"): the number of groups without signal '
            f"is unknown; the expected time assumes {step['prompts']} prompts per step, the high "
            f"end {step['most_prompts']}, the maximum (rollout.max_prompts_per_step)"
        )


def _around(figures: Figures, show: Callable[[float], str], unit: str = "") -> str:
    """A figure with its range, if the range is not empty."""
    expected, low, high = _marked(figures, show)
    ends = figures["range"]
    return f"{expected}{unit}" + (f" ({low} to {high})" if ends["low"] < ends["high"] else "")


def _marked(figures: Figures, show: Callable[[float], str]) -> tuple[str, str, str]:
    """The expected value and the low and high ends."""
    ends = figures["range"]
    own, other = _MARK[figures["source"]], _MARK[ends["source"]]
    low, high = (f"{other}{show(ends[end])}" for end in ("low", "high"))
    return f"{own}{show(figures['expected'])}", low, high


def _compared(report: Figures) -> Iterator[str]:
    compared, plan = report["compared"], report["plan"]
    rows = [["placements compared", "slots", "tokens", "remat", "GiB", *_SPEEDS, "tokens/s", ""]]
    for one in compared:
        speed = [""] * (len(_SPEEDS) + 1)
        if plan["fits"] if one["chosen"] else one["fits"]:
            speed = [f"~{one[key]:.2f}" for key in _SPEEDS.values()]
            speed.append(f"~{one['tokens_per_s']:,.0f}")
        sizes = [str(one[key]) for key in ("slots_per_shard", "micro_batch_tokens", "remat")]
        name = one["name"]
        if one["per_layer_embeddings"] == "host":
            name += ", embeddings in host memory"
        rows.append([name, *sizes, f"~{one['gib']:.2f}", *speed, _verdict(one, plan)])
    yield from table(rows)
    yield (
        "slots per shard, tokens per micro-batch, seconds of a step; times of links between chips "
        "are not measured"
    )
    best = compared[0]
    if best["fits"] and not best["chosen"] and best["set"]:
        yield f"settings for the fastest: {settings_text(best['set'])}"


def _verdict(one: Figures, plan: Figures) -> str:
    if one["chosen"] and plan["fits"]:
        return "chosen"
    if not one["fits"]:
        return f"does not fit: {one['short']}"
    if one["chosen"]:
        return "does not fit"
    return f"~{one['gain']:+.0%}" if plan["fits"] else "fits"


def _verified(report: Figures) -> Iterator[str]:
    verified = report["verified"]
    if not verified["by_compiler"]:
        if verified["why_not"]:
            yield f"not verified: {verified['why_not']}"
        return
    yield (
        f"verified: {verified['compilations']} programs compiled in {verified['compile_s']:.0f} s, "
        "the others from the cache"
    )
    rows = [["program", "GiB in use", "ms", "of them modelled", "estimated ms", ""]]
    there = report["topology"]["hbm_gib"]
    for name, one in verified["programs"].items():
        cells = [compiled_size(one["gib"], there), "", ""]
        if one["seconds"] > 0:
            cells[1:] = [f"={1e3 * one[key]:.1f}" for key in ("seconds", "modelled_s")]
        fits = "fits" if one["fits"] else "DOES NOT FIT"
        rows.append([name, *cells, f"~{1e3 * one['estimated']['seconds']:.1f}", fits])
    yield from table(rows)
    yield _COMPILED_TIMES
    yield from (f"searched: {line}" for line in verified["searched"])


def _budget(report: Figures) -> Iterator[str]:
    budget = report["budget"]
    if budget is None:
        yield "budget not estimated: the plan does not fit"
        return
    slow, expected = (budget["outcomes"][pace] for pace in ("high", "expected"))
    given = f"{budget['steps_given']} steps"
    if budget["steps_given"] is None:
        given = _duration(budget["time_given_s"])
    if not budget["enough"]:
        least = _duration(expected["wall_s"])
        yield f"budget {given}: TOO SMALL for a step; everything besides steps takes ~{least}"
    steps = _around(budget["steps"], "{:,}".format, " steps")
    yield f"budget {given}: {steps} in {_around(budget['wall_s'], _duration)}"
    if budget["enough"] and not budget["enough_when_slow"]:
        needs = _duration(slow["wall_s"])
        more = ", more than the budget" if slow["wall_s"] > budget["time_given_s"] else ""
        yield (
            "  at the high end of the ranges no step fits: everything besides steps takes "
            f"~{needs}{more}"
        )
    yield (
        f"  GRPO: ~{budget['grpo_steps']:,} steps, ~{budget['samples']:,} rollouts, "
        f"~{budget['tokens'] / 1e6:,.1f} M trained tokens"
    )
    spent = {name: seconds for name, seconds in expected["spent_s"].items() if seconds}
    shares = ", ".join(
        f"{name} ~{_duration(seconds)} (~{seconds / expected['wall_s']:.1%})"
        for name, seconds in spent.items()
    )
    yield f"  {shares}"
    yield from _first_step(budget)
    compiling = _around(budget["compile_s"], _duration)
    yield f"  {budget['programs']} programs, {compiling} to compile all"
    if spent.get("sizing"):
        measuring = _around(budget["sizing_s"], _duration)
        yield f"  timing planned, half and double sizes takes {measuring}, without compilation"
    read = ", ".join(f"{name} {count:,}" for name, count in budget["evaluated"].items())
    guessed = ", ".join(budget["guessed"])
    unknown = f"; {guessed}: assumed, the number of rows is unknown" if guessed else ""
    yield f"  prompts of the evaluations: {read}{unknown}"
    if budget["cost_usd"] is not None:
        yield (
            f"  ~{budget['cost_usd']:,.2f} dollars at {budget['chip_hour_usd']:.2f} per "
            "chip-hour (plan.chip_hour_usd)"
        )
    disk = ", ".join(f"{name} ~{size:.2f}" for name, size in budget["disk_gib"].items())
    yield f"  disk, GiB: {disk}"


def _first_step(budget: Figures) -> Iterator[str]:
    """What happens before the first optimizer step has ended, by the state of the caches."""
    for caches, found in budget["first_step"].items():
        parts = ", ".join(
            f"{name} {_marked(seconds, _duration)[0]}"
            for name, seconds in found["parts"].items()
            if seconds["expected"]
        )
        seconds = _around(found["seconds"], _duration)
        yield f"  first optimizer step done with {caches} caches after {seconds}: {parts}"
    if budget["download_gib"]:
        rate = budget["download_bytes_per_s"] / 1e6
        yield f"  download of ~{budget['download_gib']:.2f} GiB, assumed: {rate:.0f} MB per second"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.2f} h"


def _changes(report: Figures) -> Iterator[str]:
    """One table: what would gain most, or what would make the plan fit."""
    found, fits = report["changes"], report["plan"]["fits"]
    by_settings = [one for one in found if one["settings"].keys() - {"plan.hbm_gib"}]
    if not (fits or by_settings or report["verified"]["by_compiler"]):
        yield "no setting that takes less memory makes it fit, nor do all of them together"
    if not found:
        return
    title = "changes that gain most" if fits else "changes that make it fit"
    rows = [[f"{title}, each planned again", "tokens/s", "gain", "GiB", "of", "by"]]
    rows += [
        [
            one["change"],
            f"~{one['tokens_per_s']:,.0f}",
            "" if one["gain"] is None else f"~{one['gain']:+.0%}",
            f"~{one['gib']:.2f}",
            f"~{one['limit_gib']:.2f}",
            "settings" if one["settings"] else "hardware",
        ]
        for one in found
    ]
    yield from table(rows)


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Aligned columns; all but the first and the last are right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *middle, last = row
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True)]
        yield "  ".join([*cells, last]).rstrip()
