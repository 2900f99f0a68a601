"""What a run's process tells its parent about progress."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from launch.progress import watched
from pipeline.clock import Heartbeat, PhaseClock
from pipeline.protocols import WorkerDied
from pipeline.run.console import Console

QUIET_S = 1e6


def reported(
    monkeypatch: pytest.MonkeyPatch,
    heartbeat: Callable[[], Awaitable[Heartbeat]],
    *,
    phase: str = "sample",
) -> tuple[bool, bool]:
    """Whether about 50 reports have told progress, and that the run is slow."""
    monkeypatch.setattr("launch.progress._EVERY_S", 0.0)
    phases, console = PhaseClock(lambda: QUIET_S), Console()

    async def work() -> tuple[bool, bool]:
        for _ in range(50):
            await asyncio.sleep(0)
        return console.status.progress > 0, console.status.slow

    with phases.during(phase):
        phases.now = lambda: 2 * QUIET_S
        processes = {"sampler 0": heartbeat}
        return asyncio.run(watched(work(), processes, phases=phases, console=console))


@pytest.mark.parametrize(
    ("beat", "phase", "moves", "slow"),
    [
        (Heartbeat("decode", 0.0), "sample", True, False),
        (Heartbeat("decode", QUIET_S), "sample", False, False),
        (Heartbeat("compile", QUIET_S), "loading", False, True),
        (Heartbeat(), "device_wait", True, False),  # for as long as others hold the devices
    ],
)
def test_the_progress_of_any_process_is_the_runs(
    monkeypatch: pytest.MonkeyPatch, beat: Heartbeat, phase: str, moves: bool, slow: bool
):
    async def heartbeat() -> Heartbeat:
        return beat

    assert reported(monkeypatch, heartbeat, phase=phase) == (moves, slow)


def test_a_process_that_does_not_answer_makes_no_progress_and_a_death_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
):
    async def silent() -> Heartbeat:
        await asyncio.Event().wait()
        raise AssertionError

    assert reported(monkeypatch, silent) == (False, False)

    async def dead() -> Heartbeat:
        raise WorkerDied("sampler 0", "its process ended unexpectedly")

    with pytest.raises(WorkerDied, match=r"^sampler 0: its process ended unexpectedly$"):
        reported(monkeypatch, dead)
