"""`launch.doctor --chips`: starts the processes that check the chips, and judges their results.

One process of `launch.chips` has all chips: program forms, collectives, checkpoint, speed. Then two
at once have half of the chips each.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime

import numpy as np

from configs.schema import Config
from launch.chip_results import SPEED, VALUES, ChipResult
from launch.exits import say
from launch.host import Host
from launch.host_checks import LOCK_FILE, Finding, State
from pipeline.compute.devices import environment
from pipeline.plan.chip_limits import ChipLimits, save_limits
from pipeline.plan.cost_model.hardware import SPEEDS, TOPOLOGIES
from pipeline.plan.topology import HBM_GIB
from pipeline.run.cache_folder import cache_folder

_CHIPS, _HALF = 8, 4
"""Chips of a host, and of a process that shares it with another one."""
_LIMIT_S = {"all": 900.0, "half": 420.0}
"""Seconds after which a process counts as hanging: several times what it should take."""
_ALL, _HALVES = "chip checks", "halves"
_TOPOLOGY = "v5e-8"
"""Whose published limits are compared: runs, and so these checks, support no other chips."""
_GIB_STEP = 0.01
_SHOWN = 300
"""Characters of a line that are shown."""
_OUTPUT = "see all of its output: python -m launch.chips all (with --help)"
_LEAST, _MOST = 0.5, 1.1
"""Measured speeds as shares of the published ones that are kept for plans. A lower one was measured
beside other work or on another chip, a higher one cannot be."""
_UNITS = {
    "bytes_per_s": ("memory bandwidth", 1e9, "GB/s"),
    "bf16_flops": ("bfloat16 products", 1e12, "TFLOP/s"),
    "int8_flops": ("8-bit products", 1e12, "TOP/s"),
}
_WRONG = "do not train on these chips: repeat the check on a fresh host, and report its --json file"
_REMEDIES = {
    "checkpoint": "make space in the folder of temporary files, and repeat the check",
}
"""What to do about a fault of a check; of others: `_WRONG`."""


def chip_checks(host: Host, config: Config | None) -> Iterator[Finding]:
    """Computes on the chips, in processes of their own, one after another.

    Progress goes to stderr. Without a configuration for other devices the chips are TPUs; with
    `plan.platform = "cpu"` they are eight virtual CPU devices.
    """
    platform = "tpu" if config is None else config.plan.platform
    missing = _missing(host, platform)
    if missing is not None:
        what, remedy = missing
        yield Finding(_ALL, "fault", f"not made: {what}", remedy)
        return
    given = None if config is None else config.run.tpu_chips
    count = _CHIPS if platform == "cpu" else given or len(host.chips())
    weights = "shared" if config is None else config.plan.rollout_weights
    whole = Child("all", platform, range(count), ("--rollout-weights", weights))
    yield from _found([whole])
    if whole.problem:
        return  # the chips may be in any state
    yield from _speeds(whole)
    if count == _CHIPS:
        halves = [Child("half", platform, range(at, at + _HALF), ()) for at in (0, _HALF)]
        yield from _found(halves)
        yield from _halves_against(whole, halves)
    else:
        text = f"skipped: two processes with {_HALF} chips each need {_CHIPS}, and {count} are here"
        yield Finding(_HALVES, "ok", text)


def _missing(host: Host, platform: str) -> tuple[str, str] | None:
    """Why the checks cannot be made, and the remedy; None: they can."""
    if platform == "cpu":
        return None
    if platform == "gpu":
        return "they are for TPU chips and virtual CPU devices", "omit --chips"
    chips = host.chips()
    if not chips:
        where = 'a configuration with plan.platform = "cpu", such as configs/demo.toml'
        remedy = f"give the command on a TPU host, or for virtual CPU devices {where}"
        return "there is no TPU chip on this host", remedy
    holders = host.holders(frozenset(chips))
    if holders:
        return f"the chips are in use by {holders[0]}", "see holders above"
    if not all(map(host.may_use, chips)):
        return "this user may not use the chips", "see chips above"
    if host.owner(LOCK_FILE) not in {None, host.uid}:
        return f"{LOCK_FILE} is of another user", "see libtpu lock above"
    return None


# --- processes


class Child:
    """A process of `launch.chips`; it starts at once.

    Args:
        part: what it checks.
        platform: of its devices.
        chips: its chips of this host.
        more: further arguments.

    Attributes:
        name: which chips it has, in words; empty: all of them.
        results: what it has printed.
        problem: why it did not end as it should; empty: it did, or has not ended.
    """

    def __init__(self, part: str, platform: str, chips: range, more: Sequence[str]) -> None:
        self.name = f"chips {chips[0]} to {chips[-1]}" if part == "half" else ""
        self.results: list[ChipResult] = []
        self.problem = ""
        self._limit_s = _LIMIT_S[part]
        self._is_late = False
        self._stderr = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # by `close`
        command = ("--platform", platform, "--devices", str(len(chips)), *more)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "launch.chips", part, *command],
            env=os.environ | _variables(platform, chips, shared=len(chips) < _CHIPS),
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            start_new_session=True,
        )

    def read(self) -> None:
        """Reads its results until it ends, or is killed at its time limit."""
        assert self._process.stdout is not None
        timer = threading.Timer(self._limit_s, self._end_late)
        timer.start()
        for line in self._process.stdout:
            if (result := ChipResult.of_line(line)) is not None:
                self.results.append(result)
                name = f"{result.check}, {self.name}" if self.name else result.check
                say(f"{name}: {result.state}, {result.seconds:.0f} s", file=sys.stderr)
        status = self._process.wait()
        timer.cancel()
        if status:
            late = f"did not end in {self._limit_s:.0f} s"
            what = late if self._is_late else f"ended with status {status}"
            after = self.results[-1].check if self.results else "its start"
            self.problem = f"the process {what} after {after}: {self._last_line()}"

    def kill(self) -> None:
        """Ends the process, if it has not ended, and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _end_late(self) -> None:
        self._is_late = True
        self.kill()

    def close(self) -> None:
        """Ends it, and forgets its output."""
        if self._process.poll() is None:
            self.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()

    def _last_line(self) -> str:
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr if line.strip()]
        return lines[-1][:_SHOWN] if lines else "it said nothing"


def _variables(platform: str, chips: range, *, shared: bool) -> dict[str, str]:
    """Environment of a process, as a run's placement sets it; it also has the CPU, to compare."""
    found = environment(platform=platform, count=len(chips))
    if platform == "tpu":
        found["JAX_PLATFORMS"] = "tpu,cpu"
        if shared:  # Ray does this; `open_mesh` does the rest
            found["TPU_VISIBLE_CHIPS"] = ",".join(map(str, chips))
    return found


def _found(children: Sequence[Child]) -> Iterator[Finding]:
    """Waits for processes that run at the same time; the findings of all."""
    try:
        with ThreadPoolExecutor(len(children)) as readers:
            try:
                list(readers.map(Child.read, children))
            except BaseException:
                for child in children:
                    child.kill()
                raise
    finally:
        for child in children:
            child.close()
    for child in children:
        of = f", {child.name}" if child.name else ""
        for result in child.results:
            if result.check != SPEED or result.state != "ok":
                yield _finding(result, of)
        if child.problem:
            yield Finding(f"process{of}", "fault", child.problem, _OUTPUT)


def _finding(result: ChipResult, of: str) -> Finding:
    remedy = _REMEDIES.get(result.check, _WRONG) if result.state == "fault" else ""
    state: State = "fault" if result.state == "fault" else "ok"
    finding = result.finding
    planned = result.figures.get("gib")
    if planned is not None and planned < HBM_GIB - _GIB_STEP:
        state = "note"
        finding += f"; plans assume {HBM_GIB:.2f}"
        remedy = f"set plan.hbm_gib = {planned:.2f}"
    figures = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in (*result.figures.items(), ("seconds", result.seconds))
        if name != VALUES
    }
    return Finding(f"{result.check}{of}", state, finding, remedy, figures)


# --- judgements


def _speeds(whole: Child) -> Iterator[Finding]:
    """Measured speeds against the plan's; plausible ones are kept for later plans."""
    measured = next((one for one in whole.results if one.check == SPEED), None)
    if measured is None or not measured.figures:
        return
    chip = TOPOLOGIES[_TOPOLOGY].chip
    shares = {name: measured.figures[name] / getattr(chip, name) for name in SPEEDS}
    for name, (what, unit, text) in _UNITS.items():
        value, planned, share = measured.figures[name], getattr(chip, name), shares[name]
        finding = f"{value / unit:,.0f} {text} of a chip; published: {planned / unit:,.0f}"
        figures = {"measured": value, "plan": planned}
        if _LEAST <= share <= _MOST:
            yield Finding(what, "ok", finding, figures=figures)
        else:
            remedy = "repeat it while nothing else uses the host; plans keep the published limits"
            yield Finding(what, "note", f"{finding}, which is not plausible", remedy, figures)
    if all(_LEAST <= share <= _MOST for share in shares.values()):
        now = datetime.now(UTC).isoformat(timespec="seconds")
        limits = ChipLimits(**{name: measured.figures[name] for name in SPEEDS}, measured=now)
        if save_limits(chip.name, limits):
            yield Finding("speeds", "ok", "kept: later plans on this host use them")
        else:
            remedy = f"make {cache_folder('')} writable, or set GEMMA_GRPO_CACHE"
            yield Finding("speeds", "note", "not kept: the cache cannot be written", remedy)


def _halves_against(whole: Child, halves: Sequence[Child]) -> Iterator[Finding]:
    """The log-probs of both halves are those of all chips: a chip has the same rows and shapes."""
    expected, *found = (_log_probs(one) for one in (whole, *halves))
    if expected is None or any(values is None for values in found):
        return  # which has findings
    bound = float(expected.figures["bound"])
    values = [one.figures[VALUES] for one in found if one is not None]
    largest = float(np.abs(np.subtract(values, expected.figures[VALUES])).max())
    figures = {"largest": largest, "bound": bound}
    text = "the log-probs of two processes at once, with half of the chips each, "
    if largest <= bound:
        how = f"differ by at most {largest:.3g} from" if largest else "are bit for bit"
        yield Finding(_HALVES, "ok", f"{text}{how} those of all chips", figures=figures)
    else:
        how = f"differ by {largest:.3g} from those of all chips, allowed {bound:.3g}"
        yield Finding(_HALVES, "fault", text + how, _WRONG, figures)


def _log_probs(child: Child) -> ChipResult | None:
    return next((one for one in child.results if VALUES in one.figures), None)
