"""The lease of a mirror: one process writes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import psutil
import pytest

from pipeline.run.mirror_lease import LAPSE_S, Holder, Lease, LeaseLostError
from pipeline.run.mirror_store import Store
from tests.fakes import FakeClock

ON_DISK = pytest.mark.parametrize("url", ["file"], indirect=True)
"""For what does not depend on the kind of store."""
ELSEWHERE = Holder("theirs", "far", "boot pid", 7, 0.0)


class Hosts:
    """Two hosts, and a clock that advances while one waits."""

    def __init__(self, url: str) -> None:
        self.store, self.clock, self.said = Store(url), FakeClock(), list[str]()
        self.clock.seconds = 1e9
        self.actions: list[Any] = []
        self.ours = self.lease(Holder.here())
        self.theirs = self.lease(ELSEWHERE)

    def lease(self, holder: Holder) -> Lease:
        return Lease(self.store, holder, now=self.clock, wait=self.wait)

    def wait(self, seconds: float) -> None:
        self.clock.seconds += seconds
        if self.actions:
            self.actions.pop(0)()

    def held_by(self) -> str | None:
        found = self.store.read_lease()
        return None if found is None else str(found["host"])


@pytest.fixture
def hosts(url: str) -> Hosts:
    return Hosts(url)


def test_a_free_lease_is_taken_and_given_back(hosts: Hosts):
    hosts.theirs.acquire(hosts.said.append)
    assert hosts.held_by() == "far"
    hosts.theirs.release()
    assert hosts.held_by() is None
    hosts.ours.acquire(hosts.said.append)
    hosts.ours.renew()
    hosts.theirs.release()
    assert hosts.held_by() == Holder.here().host
    assert hosts.said == []


def test_a_lease_that_is_renewed_is_refused(hosts: Hosts):
    hosts.theirs.acquire(hosts.said.append)
    hosts.actions = [lambda: None, hosts.theirs.renew]
    what = (
        r"^run\.mirror: .* is written by process 7 on host far since 2001-09-09T01:46:40Z, last "
        r"sign of life 2001-09-09T01:46:51Z; stop that run, or set another run\.name"
    )
    with pytest.raises(ValueError, match=what):
        hosts.ours.acquire(hosts.said.append)
    assert hosts.held_by() == "far"
    (line,) = hosts.said
    assert "waiting for another one until 2001-09-09T01:51:40Z" in line


@ON_DISK
def test_a_lease_lapses(hosts: Hosts):
    hosts.theirs.acquire(hosts.said.append)
    began_s = hosts.clock.seconds
    hosts.ours.acquire(hosts.said.append)
    assert hosts.clock.seconds - began_s == pytest.approx(LAPSE_S, abs=10)
    with pytest.raises(LeaseLostError, match="is written by process"):
        hosts.theirs.renew()


@ON_DISK
def test_a_clock_that_is_ahead_does_not_keep_a_lease_for_ever(hosts: Hosts):
    hosts.clock.seconds += 1e6
    hosts.theirs.acquire(hosts.said.append)
    hosts.clock.seconds -= 1e6
    hosts.ours.acquire(hosts.said.append)
    assert hosts.held_by() == Holder.here().host


def test_of_two_that_take_it_at_once_one_has_it(hosts: Hosts):
    hosts.actions = [
        lambda: hosts.store.write_lease({**vars(ELSEWHERE), "since": "", "renewed_s": 1e9})
    ]
    with pytest.raises(ValueError, match="on host far"):
        hosts.ours.acquire(hosts.said.append)
    assert hosts.held_by() == "far"


@ON_DISK
def test_the_lease_of_a_dead_process_of_this_host_is_free(hosts: Hosts):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started_s = psutil.Process(child.pid).create_time()
    alive = replace(Holder.here(), id="child", pid=child.pid, started_s=started_s)
    hosts.lease(alive).acquire(hosts.said.append)
    with pytest.raises(LeaseLostError):
        hosts.ours.renew()
    child.communicate(b"\n")
    hosts.ours.acquire(hosts.said.append)
    assert hosts.said == []


@ON_DISK
def test_a_process_with_the_id_of_a_dead_one_does_not_hold_its_lease(hosts: Hosts):
    reused = replace(Holder.here(), id="dead", started_s=1.0)
    assert (reused.is_dead, reused.pid) == (True, os.getpid())
    hosts.lease(reused).acquire(hosts.said.append)
    hosts.ours.acquire(hosts.said.append)
    assert hosts.said == []


@ON_DISK
@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1, "sha256": "0"}'])
def test_a_damaged_lease_is_free(hosts: Hosts, text: str):
    hosts.store._write(hosts.store._path("lease.json"), text.encode())
    hosts.ours.acquire(hosts.said.append)
    assert hosts.held_by() == Holder.here().host
