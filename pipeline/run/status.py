"""What a run does now: the value that the console shows and `status.json` holds. Writes nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from pipeline.evaluate.summary import ACCURACY, show_number
from pipeline.run.record_files import TIME_FORMAT

PHASES = {
    "ray_start": "starting Ray",
    "device_wait": "waiting for devices",
    "loading": "loading and compiling",
    "compile": "compiling",
    "probe": "comparing sampler and learner",
    "sample": "sampling",
    "reward": "waiting for rewards",
    "learn": "updating",
    "sync": "loading the adapter into the samplers",
    "checkpoint": "writing a checkpoint",
    "evaluation": "evaluating",
    "export": "exporting",
    "coordination": "between two steps",
    "end": "shutting down",
}
"""Phases of the driver in words; see `phase_words`."""

_PART, _OF_PART = "reward_parts/", "/none_share"
"""Each part of the reward has this metric; the mean of the part is `reward/PART`."""


@dataclass(frozen=True)
class Activity:
    """Work with a known amount: what is done, or by which process; `unit` is a plural."""

    what: str
    unit: str
    done: int
    total: int

    @property
    def amount(self) -> str:
        """How much is done."""
        return f"{self.done} of {self.total} {self.unit}"


@dataclass(frozen=True)
class Status:
    """What a run does now; None: not known yet, or there is none.

    Attributes:
        phase: of the driver, see `pipeline.clock`; at the end how the run ended.
        step: training steps done.
        best_validation: `step`, `metric` (see `metric_title`), `value`.
        last_alarm: `step` (counted from 1), `rule`, `text`.
        metrics: of the last step.
        elapsed_s: time used by the run.
        deadline_s: end of the time budget on the same scale.
        progress: how often the run, or one of its processes, was seen to have made progress.
        slow: whether the run, or a process, loads, compiles or writes files.
    """

    run: str = ""
    phase: str = ""
    step: int = 0
    steps_planned: int | None = None
    best_validation: Mapping[str, Any] | None = None
    last_alarm: Mapping[str, Any] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    activities: tuple[Activity, ...] = ()
    elapsed_s: float = 0.0
    deadline_s: float | None = None
    expected_end: datetime | None = None
    progress: int = 0
    slow: bool = True

    @property
    def left_s(self) -> float | None:
        """Seconds of the time budget that are left; None: there is none."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - self.elapsed_s)

    @property
    def doing(self) -> str:
        """Phase and activities in words."""
        found = [f"{activity.what} {activity.amount}" for activity in self.activities]
        return "  ".join([phase_words(self.phase), *found]).strip()

    @property
    def place(self) -> str:
        """The step of the planned steps."""
        return f"step {self.step}/{self.steps_planned or '?'}"

    def to_json(self, now: datetime) -> dict[str, Any]:
        """Content of `status.json`, written at `now` by this process."""
        end, left_s = self.expected_end, self.left_s
        return {
            "time": now.strftime(TIME_FORMAT),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "run": self.run,
            "phase": self.phase,
            "activities": [asdict(activity) for activity in self.activities],
            "step": self.step,
            "steps_planned": self.steps_planned,
            "best_validation": self.best_validation,
            "elapsed_s": round(self.elapsed_s, 1),
            "left_s": None if left_s is None else round(left_s, 1),
            "expected_end": None if end is None else end.strftime(TIME_FORMAT),
            "last_alarm": self.last_alarm,
            "metrics": dict(self.metrics),
            "progress": self.progress,
            "slow": self.slow,
        }


def phase_words(phase: str) -> str:
    """A phase of the driver in words, or else by its name."""
    return PHASES.get(phase, phase.replace("_", " "))


def part_names(metrics: Mapping[str, float]) -> list[str]:
    """The parts of the reward in a step's metrics."""
    return [
        name.removeprefix(_PART).removesuffix(_OF_PART)
        for name in metrics
        if name.startswith(_PART) and name.endswith(_OF_PART)
    ]


def figures(status: Status) -> Iterator[tuple[str, str]]:
    """The figures of the last step and of the run, with their labels; unknown ones are left out."""
    metrics = status.metrics
    if "sft/loss" in metrics:
        yield "sft loss", f"{metrics['sft/loss']:.4f}"
        yield "tokens", f"{metrics['sft/tokens_trained']:.0f}"
    elif "groups/mixed" in metrics:
        yield "reward", _rewards(metrics)
        yield (
            "groups",
            f"{metrics['groups/mixed']:.0f} mixed, {metrics['groups/all_equal']:.0f} equal",
        )
    if (best := status.best_validation) is not None:
        value = best["value"]
        shown = f"{value:.1%}" if best["metric"] == ACCURACY else show_number(value)
        yield "best validation", f"{shown} at step {best['step']}"
    for label, name, form in (
        ("entropy", "rollout/entropy", "{:.3f}"),
        ("length", "rollout/tokens_mean", "{:.1f} tokens"),
        ("speed", "speed/generated_tokens_per_s", "{:,.0f} tokens/s"),
        ("step time", "time/step_s", "{:.1f} s"),
    ):
        if name in metrics:
            yield label, form.format(metrics[name])
    memory = ("/peak_gib", "/in_use_gib")  # the peak where the device reports it
    if used := [value for name, value in metrics.items() if name.endswith(memory)]:
        yield "device memory", f"{max(used):.2f} GiB"
    if status.left_s is not None:
        yield "budget left", show_seconds(status.left_s)
    if status.expected_end is not None:
        yield "expected end", f"{status.expected_end:%H:%MZ}"


def _rewards(metrics: Mapping[str, float]) -> str:
    """Mean of the reward with the share of excluded rollouts, means of its parts, errors."""
    if "reward/excluded_share" not in metrics:
        return "no group has finished"
    share, errors = metrics["reward/excluded_share"], metrics.get("reward/errors")
    mean = show_number(metrics["reward/mean"]) if "reward/mean" in metrics else "none"
    named = [(part, metrics.get(f"reward/{part}")) for part in part_names(metrics)]
    return ", ".join(
        [
            f"{mean} ({share:.1%} excluded)" if share else mean,
            *(f"{part} {show_number(value)}" for part, value in named if value is not None),
            *([f"errors {errors:.0f}"] if errors else []),
        ]
    )


def step_line(status: Status) -> str:
    """A finished step: the same figures as on a terminal."""
    shown = [f"{label} {text}" for label, text in figures(status)]
    if (alarm := status.last_alarm) is not None:
        shown.append(f"alarm {alarm['rule']} at step {alarm['step']}")
    return "  ".join([status.place, *shown])


def show_seconds(seconds: float) -> str:
    """Seconds as `1:02:03`, or `2:03` below an hour."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
