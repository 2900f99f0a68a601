"""The goodput ledger: every second of every process in exactly one row, every token in one fate.

    driver's phases  ----------------------.
    phases of learner, samplers, rewards --+-> account -> ledger.jsonl -> metrics, summary, report

A worker's second belongs to what it does (`decode`, `update`, ...); while it does nothing, to what
the driver waits for then (`waiting_learner`, ...), or to the phase that all processes are in
(`checkpoint`, `evaluation`, ...). So each process has as many seconds as the wall clock, from the
start of the driver on. A second of the driver outside of all phases is `unexplained`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline.contracts.phases import PhaseClock, Span
from pipeline.contracts.record_files import append_row, read_rows, time_stamp

DRIVER = "driver"
LEARNER, SAMPLERS, REWARDS = "learner", "samplers", "rewards"
"""Kinds of processes, besides the driver."""
WORK_ROWS = ("prefill", "decode", "update")
"""Rows of useful work on devices."""
STEP_ROWS = (
    *WORK_ROWS,
    "decode_idle",
    "update_padding",
    "scoring",
    "sync",
    "coordination",
    "waiting_samplers",
    "waiting_rewards",
    "waiting_learner",
    "waiting_driver",
)
"""Rows of training steps."""
SCHEDULING_ROWS = ("ray_start", "device_wait")
"""Rows before the devices are there."""
START_ROWS = ("ray_start", "loading", "compile", "compile_cached", "calibration")
"""Rows of a start, which are `restart` in a process that resumes a run."""
ROWS = (
    *SCHEDULING_ROWS,
    "loading",
    "compile",
    "compile_cached",
    "calibration",
    *STEP_ROWS,
    "checkpoint",
    "evaluation",
    "export",
    "stalled",
    "restart",
    "repeated",
    "end",
    "unexplained",
)
"""All rows."""
FATES = (
    "trained",
    "no_signal",
    "failed_reward",
    "truncated",
    "surplus",
    "stale",
    "partial",
    "repeated",
    "evaluation",
)
"""Fates of generated tokens: in the loss; in groups with equal rewards, or in a skipped update;
without a reward; discarded at a cut-off or at the end; not needed by dynamic sampling; never
trained, because they were sampled ahead or too late; waiting in partial rollouts, which a later
step finishes; of steps that are done again after a resume; of evaluations."""

_WAITING = {
    "sample": "waiting_samplers",
    "reward": "waiting_rewards",
    "learn": "waiting_learner",
}
"""Row of a process that waits, by the driver's phase."""
_SHARED = frozenset({"calibration", "evaluation", "export", "checkpoint", "sync"})
"""Phases of the driver that all processes are in, whatever they compute for them."""
_OWN = frozenset({"compile", "loading", "stalled"})
"""Phases of a worker that count in any phase of the driver."""
_SPARE = {"decode": "decode_idle", "update": "update_padding", "compile": "compile_cached"}
"""Row of the spare share of a phase."""

Seconds = dict[str, dict[str, float]]
"""Seconds by process, or kind of process, and row."""


@dataclass(frozen=True)
class Work:
    """Amounts of work of training steps.

    Attributes:
        generated: tokens.
        prefilled: prompt positions, padding included.
        segments: decode segments, by slots of a sampler.
        trained: tokens in the loss.
        positions: of all passes over the learner's micro-batches, padding included.
        padded: padding positions among them.
    """

    generated: int = 0
    prefilled: int = 0
    segments: Mapping[int, int] = field(default_factory=dict)
    trained: int = 0
    positions: int = 0
    padded: int = 0

    def __add__(self, other: Work) -> Work:
        """The sum of both."""
        segments = dict(Counter(self.segments) + Counter(other.segments))
        names = ("generated", "prefilled", "trained", "positions", "padded")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Work(segments=segments, **sums)

    @staticmethod
    def of_json(found: Mapping[str, Any]) -> Work:
        """Reads what `dataclasses.asdict` and JSON made of it."""
        segments = {int(slots): count for slots, count in found["segments"].items()}
        return Work(**{**found, "segments": segments})


@dataclass(frozen=True)
class Account:
    """The seconds, tokens and work of an interval.

    Attributes:
        step: training steps done at its end.
        start_s: seconds since the start of the run, device waits and earlier processes included.
        end_s: the same of its end.
        seconds: by process and row; the rows of a process sum to `end_s - start_s`.
        tokens: generated tokens by fate.
        work: of its training steps.
    """

    step: int
    start_s: float
    end_s: float
    seconds: Seconds
    tokens: Mapping[str, int] = field(default_factory=dict)
    work: Work = field(default_factory=Work)

    def to_json(self) -> dict[str, Any]:
        """A line of `ledger.jsonl`."""
        seconds = {
            process: {row: round(value, 6) for row, value in rows.items()}
            for process, rows in self.seconds.items()
        }
        facts = {"step": self.step, "start": self.start_s, "end": self.end_s}
        work = asdict(self.work)
        return {**facts, "seconds": seconds, "tokens": dict(self.tokens), "work": work}

    @staticmethod
    def of_json(row: Mapping[str, Any]) -> Account:
        """Reads a line of `ledger.jsonl`."""
        return Account(
            row["step"],
            row["start"],
            row["end"],
            row["seconds"],
            row["tokens"],
            Work.of_json(row["work"]),
        )


def read_ledger(path: Path) -> list[Account]:
    """The accounts of a run, oldest first; none if there is no file.

    Raises:
        DamagedFileError: if a line is damaged.
    """
    return [Account.of_json(row) for row in read_rows(path)]


@dataclass
class Sums:
    """Sums of accounts.

    Attributes:
        seconds: by kind of process and row.
        tokens: generated tokens by fate.
        work: of training steps.
    """

    seconds: Seconds = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)
    work: Work = field(default_factory=Work)

    def add(self, account: Account) -> None:
        """Adds an account."""
        self.seconds = by_kind([self.seconds, account.seconds])
        self.tokens.update(account.tokens)
        self.work += account.work


def kind_of(process: str) -> str:
    """The kind of a process: driver, learner, samplers or rewards."""
    kinds = {"sampler": SAMPLERS, "reward": REWARDS}
    return kinds.get(process.partition(" ")[0], process)


def by_kind(parts: Iterable[Mapping[str, Mapping[str, float]]]) -> Seconds:
    """The sum of several seconds by process, or kind of process, by kind of process."""
    found: dict[str, dict[str, float]] = {}
    for part in parts:
        for process, rows in part.items():
            sums = found.setdefault(kind_of(process), {})
            for row, seconds in rows.items():
                sums[row] = sums.get(row, 0.0) + seconds
    return found


def account_seconds(
    start_s: float,
    end_s: float,
    driver: Sequence[Span],
    workers: Mapping[str, Sequence[Span]],
    *,
    renamed: Mapping[str, str],
) -> Seconds:
    """The seconds of each process in an interval, by row.

    Args:
        start_s: start of the interval, unix seconds.
        end_s: its end.
        driver: phases of the driver.
        workers: phases of each worker.
        renamed: rows that count as another one, such as `restart`.
    """
    timeline = list(_pieces(driver, start_s, end_s))
    found: Seconds = {DRIVER: _sums(((piece, piece) for piece in timeline), renamed)}
    for name, spans in workers.items():
        own = _pieces(spans, start_s, end_s)
        found[name] = _sums(_overlaid(list(own), timeline), renamed, is_worker=True)
    return found


_Piece = Span | None
_Placed = tuple[float, float, _Piece]


def _pieces(spans: Sequence[Span], start_s: float, end_s: float) -> Iterator[_Placed]:
    """Start, end and span of each part of an interval, without gaps; a stall replaces all else."""
    edges = {start_s, end_s}
    for span in spans:
        edges |= {min(max(edge, start_s), end_s) for edge in (span.start_s, span.end_s)}
    ordered, active, index = sorted(edges), list[Span](), 0
    spans = sorted(spans, key=lambda span: span.start_s)
    for left, right in pairwise(ordered):
        while index < len(spans) and spans[index].start_s <= left:
            active.append(spans[index])
            index += 1
        active = [span for span in active if span.end_s > left]
        first = [span for span in active if span.phase == "stalled"] or active
        yield left, right, first[-1] if first else None


def _overlaid(
    own: Sequence[_Placed], driver: Sequence[_Placed]
) -> Iterator[tuple[_Placed, _Placed]]:
    """The pieces of a worker, each with the driver's piece at that time."""
    index = 0
    for start, right, piece in own:
        left = start
        while left < right:
            _, until, phase = driver[index]
            end = min(right, until)
            yield (left, end, piece), (left, end, phase)
            left = end
            if end == until and index + 1 < len(driver):
                index += 1


def _sums(
    pieces: Iterable[tuple[_Placed, _Placed]],
    renamed: Mapping[str, str],
    *,
    is_worker: bool = False,
) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for (left, right, span), (_, _, leading) in pieces:
        row, spare = _row(span, None if leading is None else leading.phase, is_worker=is_worker)
        seconds = right - left
        if span is not None and spare is not None and span.spare:
            sums[renamed.get(spare, spare)] += span.spare * seconds
            seconds *= 1 - span.spare
        sums[renamed.get(row, row)] += seconds
    return {row: seconds for row, seconds in sums.items() if seconds}


def _row(span: Span | None, leading: str | None, *, is_worker: bool) -> tuple[str, str | None]:
    """The row of a piece, and the row of its spare share, if any."""
    if is_worker and span is not None and (leading not in _SHARED or span.phase in _OWN):
        return span.phase, _SPARE.get(span.phase)
    if leading is None:
        return "unexplained", None
    if is_worker and leading == "coordination":
        return "waiting_driver", None
    return _WAITING.get(leading, leading), None


class Ledger:
    """The ledger of a run, appended to `ledger.jsonl`.

    Args:
        path: of `ledger.jsonl`.
        phases: of the driver.
        start_s: start of this process, unix seconds.

    Attributes:
        phases: of the driver.
        total: of the run so far.
        processes: of the last account.
        step: training steps done at the last account.
        first_step_s: seconds of the run up to the end of its first optimizer step, all waits
            included; None: it is not done.
        recorded: phases of all processes since it was set; None: they are not kept.
    """

    def __init__(self, path: Path, *, phases: PhaseClock, start_s: float) -> None:
        self._path = path
        self.phases = phases
        earlier = read_ledger(path)
        self._at_s = start_s
        self._origin_s = start_s - max((one.end_s for one in earlier), default=0.0)
        self._done_before = max((one.step for one in earlier), default=0)
        self.step = 0
        self._starting = dict[str, str]()
        self._continued: Mapping[str, int] = {}
        self._lost_s = 0.0
        self.total, self._recent = Sums(), Sums()
        self.processes: list[str] = []
        self.recorded: dict[str, list[Span]] | None = None
        self.first_step_s: float | None = None
        for one in earlier:
            self._add(one)

    @property
    def wall_s(self) -> float:
        """Seconds of the run up to the last account, all waits and earlier processes included."""
        return self._at_s - self._origin_s

    @property
    def held_s(self) -> float:
        """`wall_s` without waits for devices."""
        return self.wall_s - self.total.seconds.get(DRIVER, {}).get("device_wait", 0.0)

    def resumed(self) -> None:
        """Counts the coming start, to its first step, as `restart`, and steps done as repeated."""
        self._starting = dict.fromkeys(START_ROWS, "restart")
        self._done_before = max(self._done_before, self.step)

    def is_repeated(self, step: int) -> bool:
        """Whether an earlier process had done training step `step`, counted from 1."""
        return step <= self._done_before

    def continue_partial(self, step: int, tokens: int) -> None:
        """Counts tokens as `partial` again that the end of the run discarded: it goes on.

        Args:
            step: training steps done.
            tokens: of the partial rollouts that go on.
        """
        if step == self._done_before:
            again = tokens - self.total.tokens["partial"]
            self._continued = {"partial": again, "truncated": -again} if again else {}

    def lost(self, used_s: float) -> None:
        """Adds, with the next account, a killed process's seconds after its last one: lost work.

        Args:
            used_s: seconds that earlier processes used.
        """
        self._lost_s = max(0.0, used_s - self.wall_s)
        self._origin_s -= self._lost_s

    def account(
        self,
        step: int,
        workers: Mapping[str, Sequence[Span]],
        *,
        tokens: Mapping[str, int] | None = None,
        work: Work | None = None,
        repeated: bool = False,
    ) -> None:
        """Closes the interval since the last account.

        Args:
            step: training steps done.
            workers: phases of the workers since the last account, of a kind all or none; without
                any of its kind, those of the last account have none.
            tokens: generated tokens by fate.
            work: of a training step.
            repeated: whether an earlier process had done this work.
        """
        fates, now_s = Counter(tokens or {}), self.phases.now()
        renamed = self._starting
        if repeated:
            renamed = renamed | dict.fromkeys(STEP_ROWS, "repeated")
            fates = Counter(repeated=fates.total())
        kinds = {DRIVER, *map(kind_of, workers)}
        workers = dict(workers) | {
            name: () for name in self.processes if kind_of(name) not in kinds
        }
        start_s = self._at_s
        driver = self.phases.take()
        if self.recorded is not None:
            for process, spans in {DRIVER: driver, **workers}.items():
                self.recorded.setdefault(process, []).extend(spans)
        seconds = account_seconds(start_s, now_s, driver, workers, renamed=renamed)
        fates.update(self._continued)
        if work is not None:
            self._starting = {}
        self._at_s, self._continued, origin = now_s, {}, self._origin_s
        if self._lost_s:
            at_s = start_s - origin
            lost = {process: {"repeated": self._lost_s} for process in self.processes or seconds}
            self._write(Account(self._done_before, at_s - self._lost_s, at_s, lost))
            self._lost_s = 0.0
        work = Work() if work is None or repeated else work
        self._write(Account(step, start_s - origin, now_s - origin, seconds, fates, work))

    def take(self) -> Sums:
        """Returns the sums of the accounts since the last call."""
        found, self._recent = self._recent, Sums()
        return found

    def _write(self, account: Account) -> None:
        append_row(self._path, {"time": time_stamp(), **account.to_json()})
        self._add(account)
        self._recent.add(account)

    def _add(self, account: Account) -> None:
        self.processes, self.step = list(account.seconds), account.step
        self.total.add(account)
        if self.first_step_s is None and account.work != Work():
            self.first_step_s = account.end_s
