"""Where the time of a run went, and its goodput, from its metrics and its journal.

    started ----------> rows of metrics.jsonl --------------> ended
    seconds up to       seconds since the row before          seconds since the last row
    the first step

What the run has used besides is `lost`: steps that a resume did again, a step that did not end, the
time of a killed process after its last row and up to its restart. Goodput is a product of published
definitions:

    scheduling   time with devices / time of the run's processes
    runtime      time of steps that count / time with devices
    program      seconds of useful work / time of these steps, a mean over the chips

as in Google's ML Productivity Goodput
(https://cloud.google.com/blog/products/ai-machine-learning/goodput-metric-as-measure-of-ml-productivity).
Time in which no process of the run exists does not count.
Useful work is prefill, the share of decoding in which a slot generates a token that is kept, and
the share of an update that is not padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.deadline import show_duration
from pipeline.run.history import ENDED, STARTED

Row = Mapping[str, Any]

WAITING_PHASES = ("ray_start", "device_wait")
"""Phases without devices: Ray starts, other runs hold the devices."""
STEP_PHASES = ("sample", "reward", "learn", "sync", "coordination")
"""Phases of training steps, as the driver sees them."""
_LOST = "lost"
PHASES = (
    *(*WAITING_PHASES, "loading", "compile", "probe", *STEP_PHASES),
    *("evaluation", "checkpoint", "export", "end", _LOST),
)
"""All phases of the driver, in the order of the table."""
_UNFINISHED = frozenset({"sample", "reward", "learn"})
"""Phases that are of a step that did not end, where they are not in its row."""
DEVICE_PHASES = ("prefill", "decode", "update")
"""Phases of the devices in training steps; `time/devices/PHASE_s` is the mean over the chips."""
_WEIGHTS = {
    "decode_tokens_per_s": "decode",
    "prefill_tokens_per_s": "prefill",
    "update_tokens_per_s": "update",
    "mfu": "update",
}
"""Phase of the devices that a speed is relative to; the others are relative to the steps."""
_MEASURED_S = 0.5
"""Seconds that no phase has by the error of their measurement."""
_LEAST_SHARE = 0.001
"""Uses with a smaller share of the time are not shown."""


@dataclass(frozen=True)
class TimeUse:
    """Where the time of a run went.

    Attributes:
        seconds: of the driver by phase, in the order of `PHASES`.
        rows: metrics of the steps that count.
        starts: number of processes that came to train.
        first_step_s: seconds up to the end of the first of these steps, all waits included.
    """

    seconds: Mapping[str, float]
    rows: Sequence[Row]
    starts: int = 1
    first_step_s: float | None = None

    @property
    def wall_s(self) -> float:
        """Seconds in which the run had a process."""
        return sum(self.seconds.values())

    @property
    def step_s(self) -> float:
        """Seconds of the steps that count."""
        return sum(map(step_seconds, self.rows))

    @property
    def devices(self) -> dict[str, float]:
        """Seconds of the chips in the steps that count, a mean over them; they sum to `step_s`."""
        return summed(map(device_seconds, self.rows))

    @property
    def goodput(self) -> dict[str, float]:
        """`scheduling`, `runtime`, `program` and their product, `total`; empty without steps."""
        waited_s = sum(self.seconds.get(phase, 0.0) for phase in WAITING_PHASES)
        step_s, devices = self.step_s, self.devices
        if not step_s:
            return {}
        useful_s = sum(devices[phase] for phase in DEVICE_PHASES)
        return {
            "scheduling": 1 - waited_s / self.wall_s,
            "runtime": step_s / (self.wall_s - waited_s),
            "program": useful_s / step_s,
            "total": useful_s / self.wall_s,
        }

    @property
    def speeds(self) -> dict[str, float]:
        """Means of the steps' `speed/...`; see `meter.speeds`."""
        names = dict.fromkeys(name for row in self.rows for name in row if name[:6] == "speed/")
        found = {}
        for name in (name.removeprefix("speed/") for name in names):
            weights = [
                row.get(f"time/devices/{_WEIGHTS[name]}_s", 0.0)
                if name in _WEIGHTS
                else step_seconds(row)
                for row in self.rows
            ]
            if total := sum(weights):
                values = [row.get(f"speed/{name}", 0.0) for row in self.rows]
                pairs = zip(weights, values, strict=True)
                found[name] = sum(weight * value for weight, value in pairs) / total
        return found

    def to_json(self) -> dict[str, Any]:
        """What `summary.json` has of it: `time`, `goodput`, `speed`."""
        return {
            "time": {
                "total_s": self.wall_s,
                "first_step_s": self.first_step_s,
                "starts": self.starts,
                "seconds": dict(self.seconds),
                "devices": self.devices,
            },
            "goodput": self.goodput,
            "speed": self.speeds,
        }


def time_use(rows: Iterable[Row], journal: Iterable[Row], *, used_s: float = 0.0) -> TimeUse:
    """Where the time of a run went, by all rows and entries of its records.

    `used_s` are the seconds that a run without a process has used, as `time/elapsed_s` counts them.
    """
    rows = [row for row in rows if "time/elapsed_s" in row]
    parts, starts, ended_s = [phase_seconds(row) for row in rows], list[Row](), None
    for entry in journal:
        if "seconds" not in entry or entry["event"] not in {STARTED, ENDED}:
            continue
        # Those of a step that did not end are lost.
        parts.append({p: value for p, value in entry["seconds"].items() if p not in _UNFINISHED})
        if entry["event"] == ENDED:
            ended_s = entry["elapsed_s"]
            continue
        if ended_s is not None:
            parts.append({"end": entry["used_before_s"] - ended_s})
        starts.append(entry)
        ended_s = None
    found = summed(parts)
    known_s = [row["time/elapsed_s"] for row in rows] + [one["elapsed_s"] for one in starts]
    used_s = max([used_s, *known_s]) if ended_s is None else ended_s
    lost_s = used_s + found.get("device_wait", 0.0) - sum(found.values())
    if lost_s > _MEASURED_S:
        found[_LOST] = lost_s
    first_s = rows[0]["time/elapsed_s"] if rows else None
    if first_s is not None:
        before = [one["seconds"] for one in starts if one["elapsed_s"] <= first_s]
        first_s += summed(before).get("device_wait", 0.0)
    seconds = {phase: found[phase] for phase in PHASES if found.get(phase)}
    return TimeUse(seconds, rows, len(starts), first_s)


def phase_seconds(row: Row) -> dict[str, float]:
    """Seconds of the driver by phase since the row before, from `time/PHASE_s`."""
    found = {phase: row.get(f"time/{phase}_s") for phase in PHASES}
    return {phase: seconds for phase, seconds in found.items() if seconds}


def step_seconds(row: Row) -> float:
    """Seconds of the phases of a step."""
    return float(sum(row.get(f"time/{phase}_s", 0.0) for phase in STEP_PHASES))


def device_seconds(row: Row) -> dict[str, float]:
    """Seconds of the chips in a step, a mean over them: useful work by phase, and the rest."""
    prefill_s, decode_s, update_s = (
        row.get(f"time/devices/{name}_s", 0.0) for name in DEVICE_PHASES
    )
    empty_s = decode_s * (1 - row.get("rollout/slots_useful", 1.0))
    padded = row.get("learner/padded_share", row.get("sft/padded_share", 0.0))
    padding_s = update_s * padded
    return {
        "prefill": prefill_s,
        "decode": decode_s - empty_s,
        "update": update_s - padding_s,
        "empty slots": empty_s,
        "padding": padding_s,
        "idle": step_seconds(row) - prefill_s - decode_s - update_s,
    }


def summed(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of several seconds by name."""
    found: dict[str, float] = {}
    for part in parts:
        for name, seconds in part.items():
            found[name] = found.get(name, 0.0) + seconds
    return found


def share_rows(seconds: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """Name, seconds and share of the sum, of those with a notable share, and of all."""
    total_s = sum(seconds.values())
    shown = [
        (name.replace("_", " "), f"{value:,.1f}", f"{value / total_s:.1%}")
        for name, value in seconds.items()
        if total_s and value >= _LEAST_SHARE * total_s
    ]
    return [*shown, ("all", f"{total_s:,.1f}", "100.0%")] if shown else []


def time_lines(use: TimeUse, *, cost: Mapping[str, float]) -> Iterator[str]:
    """Where the time went, goodput, speed and cost (see `meter.cost`); none if none is recorded."""
    rows = share_rows(use.seconds)
    if not rows:
        return
    first_s, starts = use.first_step_s, "1 start" if use.starts == 1 else f"{use.starts} starts"
    first = "" if first_s is None else f"; first step done after {show_duration(first_s)}"
    yield f"where the time went: {show_duration(use.wall_s)}, {starts}{first}"
    for phase, seconds, share in rows:
        yield f"  {phase:<14}{seconds:>12} s{share:>8}"
    if devices := share_rows(use.devices)[:-1]:
        yield f"devices in the steps: {', '.join(f'{share} {name}' for name, _, share in devices)}"
    if goodput := use.goodput:
        parts = " x ".join(
            f"{goodput[part]:.1%} {part}" for part in ("scheduling", "runtime", "program")
        )
        yield f"goodput: {goodput['total']:.1%} = {parts}"
    speed = use.speeds
    if "useful_tokens_per_s_chip" in speed:
        mfu = f"; MFU {speed['mfu']:.1%}" if "mfu" in speed else ""
        rate = speed["useful_tokens_per_s_chip"]
        yield f"speed: {rate:,.1f} trained tokens per second and chip{mfu}"
    if cost:
        prices = "".join(
            f", {cost[key]:,.2f} per million {kind} tokens"
            for kind in ("generated", "trained")
            if (key := f"usd_per_mtoken_{kind}") in cost
        )
        yield f"cost: {cost['usd']:,.2f} dollars{prices}"
