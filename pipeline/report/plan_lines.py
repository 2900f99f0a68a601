"""The plan report as text: two screens, every figure from the report's JSON.

Estimates are marked with `~`, figures of the TPU compiler with `=`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from configs.toml_text import show_value
from pipeline.report.plan_report import COMPILER, ESTIMATED, REGIMES, compiled_size

Figures = Mapping[str, Any]

_MARKS = "~ estimated; = by the TPU compiler, whose times are a model, too; nothing is measured"
_MARK = {ESTIMATED: "~", COMPILER: "="}
"""Mark of a figure, by its `source`."""
_PARTS = {
    "base": "base",
    "adapter": "adapter",
    "optimizer": "optimizer",
    "kv_local": "KV local",
    "kv_global": "KV global",
    "activations": "activations",
    "head": "head",
    "temporaries": "temporaries",
}


def lines(report: Figures) -> Iterator[str]:
    """The lines of the report, with a blank line between sections."""
    parts = (_head, _chosen, _memory, _remedies, _step, _compared, _verified, _budget, _gains)
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
    yield _MARKS
    yield (
        f"assumed: prompts of ~{lengths['prompt']:.0f} tokens (at most {lengths['max_prompt']}), "
        f"completions of ~{lengths['completion']:.0f} (at most {lengths['max_completion']})"
    )


def _chosen(report: Figures) -> Iterator[str]:
    plan = report["plan"]
    sizes = (
        "sizes fixed by the configuration"
        if plan["fixed"] and plan["configured"]
        else "sizes planned"
    )
    yield f"chosen: {plan['name']}; {sizes}"
    if plan["short"]:
        yield f"  DOES NOT FIT: {plan['short']}"
    positions, layers = plan["cache_positions"], plan["layers"]
    yield (
        f"  slots {plan['slots']} ({plan['slots_per_shard']} per shard), segments of "
        f"{plan['segment_steps']}, prefill {plan['prefill_tokens']}; caches of "
        f"{positions['local']} positions in {layers['local']} layers, {positions['global']} in "
        f"{layers['global']}"
    )
    yield (
        f"  micro-batches of {plan['micro_batch_tokens']} tokens ({plan['rows_per_shard']} x "
        f"{plan['row_tokens']} per shard), remat {plan['remat']}"
    )
    if plan["set"]:
        yield f"  settings for it in [plan]: {_settings(plan['set'])}"


def _settings(values: Figures) -> str:
    return ", ".join(
        f"no {key}" if value is None else f"{key} = {show_value(value)}"
        for key, value in values.items()
    )


def _memory(report: Figures) -> Iterator[str]:
    plan, memory = report["plan"], report["memory"]
    largest = max(figures["gib"] for figures in memory.values())
    unit, factor = ("GiB", 1) if largest >= 1 else ("MiB", 1024)
    limit, reserve = plan["limit_gib"], plan["reserve_gib"]
    yield (
        f"{unit} per chip; a plan may use {limit * factor:,.2f}, with {reserve * factor:,.2f} in "
        "reserve"
    )
    compiled = any(figures["compiled"] for figures in memory.values())
    there = factor * report["topology"]["hbm_gib"]
    rows = [["", *_PARTS.values(), "total", "compiled" if compiled else ""]]
    for phase, figures in memory.items():
        parts = [f"~{factor * figures['parts_gib'][name]:.2f}" for name in _PARTS]
        known = ""
        if figures["compiled"]:
            total = figures["compiled"]["gib"]
            known = compiled_size(None if total is None else factor * total, there)
        rows.append([phase, *parts, f"~{factor * figures['gib']:.2f}", known])
    yield from table(rows)


def _remedies(report: Figures) -> Iterator[str]:
    found = report["remedies"]
    if report["plan"]["fits"] or report["verified"]["by_compiler"]:
        return
    yield "changes that make it fit, each planned again; GiB of the fullest phase:"
    if not any(one["settings"].keys() - {"plan.hbm_gib"} for one in found):
        yield "  no setting that takes less memory makes it fit, nor do all of them together"
    yield from (f"  {one['change']}: ~{one['gib']:.2f} of ~{one['limit_gib']:.2f}" for one in found)


def _step(report: Figures) -> Iterator[str]:
    if not report["plan"]["fits"]:
        return  # a plan that does not fit has no step
    step = report["step"]
    rows = [["seconds of a step", "expected", "from", "to", "bound by"]]
    for phase, figures in step["seconds"].items():
        rows.append([phase, *_seconds(figures), REGIMES[figures["regime"]]])
    rows.append(["total", *_seconds(step["total_s"]), ""])
    yield from table(rows)
    yield (
        f"~{step['tokens_per_s']:,.0f} trained tokens per second; ~{step['slots_useful']:.0%} of "
        f"the slots' decode steps generate a token, ~{step['padding']:.0%} of the learner's "
        "positions are padding"
    )
    yield f"above ~{step['knee_slots']} slots per shard, more slots hardly generate faster"
    if step["most_prompts"] > step["prompts"]:
        yield (
            f'dynamic sampling ("{step["dynamic_sampling"]}"): the number of groups without signal '
            f"is unknown; the expected time assumes {step['prompts']} prompts per step, the high "
            f"end {step['most_prompts']}, the maximum (rollout.max_prompts_per_step)"
        )


def _seconds(figures: Figures) -> list[str]:
    expected, low, high = _marked(figures, lambda seconds: f"{seconds:.2f}")
    return [expected, low, high]


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
    rows = [["placements compared", "slots", "tokens", "remat", "GiB", "s/step", "tokens/s", ""]]
    rows += [
        [
            one["name"],
            str(one["slots_per_shard"]),
            str(one["micro_batch_tokens"]),
            one["remat"],
            f"~{one['gib']:.2f}",
            *_speed(one, fits=plan["fits"] if one["chosen"] else one["fits"]),
            _verdict(one, plan),
        ]
        for one in compared
    ]
    yield from table(rows)
    yield "slots per shard, tokens per micro-batch; times of links between chips are not measured"
    best = next(one for one in compared if one["same_run"])
    if best["fits"] and not best["chosen"] and best["set"]:
        yield f"settings for the fastest in [plan]: {_settings(best['set'])}"


def _speed(one: Figures, *, fits: bool) -> tuple[str, str]:
    """Seconds of a step and tokens per second, for a plan that fits."""
    return (f"~{one['step_s']:.2f}", f"~{one['tokens_per_s']:,.0f}") if fits else ("", "")


def _verdict(one: Figures, plan: Figures) -> str:
    if one["chosen"] and plan["fits"]:
        return "chosen"
    if not one["fits"]:
        return f"does not fit: {one['why']}"
    if one["chosen"]:
        return "does not fit"
    other = "" if one["same_run"] else "a different run"
    if not plan["fits"]:
        return other or "fits"
    return f"~{one['gain']:+.0%}: {other and other + '; '}{one['why']}"


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
    rows = [["program", "GiB in use", "ms", "estimated ms", ""]]
    there = report["topology"]["hbm_gib"]
    for name, one in verified["programs"].items():
        seconds = f"={1e3 * one['seconds']:.1f}" if one["seconds"] > 0 else ""
        cells = [compiled_size(one["gib"], there), seconds]
        fits = "fits" if one["fits"] else "DOES NOT FIT"
        rows.append([name, *cells, f"~{1e3 * one['estimated']['seconds']:.1f}", fits])
    yield from table(rows)
    yield from (f"searched: {line}" for line in verified["searched"])
    yield from (f"larger: {_larger(one, there)}" for one in verified["larger"])


def _larger(one: Figures, there: float) -> str:
    gain = one["estimated"]["gain"]
    if gain == 0:
        return str(one["what"])
    gain = f"{one['what']}: trained tokens per second ~{gain:+.1%}"
    if one["fits"] is None:
        return gain
    size = compiled_size(one["gib"], there)
    return f"{gain}, {size} GiB, {'fits' if one['fits'] else 'does not fit'}"


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
    compiling = _around(budget["compile_s"], _duration)
    yield f"  {budget['programs']} programs, {compiling} to compile all"
    if budget["calibration_share_s"]:
        measuring = _around(budget["calibration_s"], _duration)
        share = _duration(budget["calibration_share_s"])
        yield (
            f"  measuring sizes takes {measuring}: always the planned ones, neighbours within "
            f"{share} (plan.calibration_share)"
        )
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


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.2f} h"


def _gains(report: Figures) -> Iterator[str]:
    gains = report["gains"]
    titles = {
        False: "hardware limits, gain in trained tokens per second:",
        True: "settings that change the run, gain in trained tokens per second:",
    }
    for is_setting, title in titles.items():
        found = [gain for gain in gains if gain["is_setting"] == is_setting]
        if found:
            yield title
        yield from (f"  {gain['change']} ~{gain['share']:+.0%}" for gain in found)


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Aligned columns; all but the first and the last are right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *middle, last = row
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True)]
        yield "  ".join([*cells, last]).rstrip()
