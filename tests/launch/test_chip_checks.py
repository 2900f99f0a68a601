"""`launch.doctor --chips`: which processes it starts, and how it judges their results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch import chip_checks
from launch.chip_checks import Child
from launch.chip_results import SPEED, VALUES, ChipResult
from launch.host_checks import Finding
from pipeline.plan.chip_limits import load_limits
from pipeline.plan.cost_model.hardware import TOPOLOGIES
from pipeline.plan.topology import HBM_GIB
from tests.launch.test_doctor import OTHER, PROJECT, Imitation, good

__all__ = ["good"]

V5E = TOPOLOGIES["v5e-8"].chip
GOOD = {"bytes_per_s": 0.9 * V5E.bytes_per_s, "bf16_flops": 180e12, "int8_flops": 350e12}


def not_made(imitated: Imitation) -> Finding:
    """The only finding on a host whose chips cannot be checked: no process was started."""
    (found,) = chip_checks.chip_checks(imitated.host(), None)
    assert (found.check, found.state) == ("chip checks", "fault")
    return found


def test_without_chips_a_sentence_says_what_is_missing(good: Imitation):
    good.chips(0)
    found = not_made(good)
    assert found.finding == "not made: there is no TPU chip on this host"
    assert "configs/demo.toml" in found.remedy


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda host: host.process(4242, "python3", "/dev/accel3", uid=OTHER),
            f"the chips are in use by pid 4242 (python3, user {OTHER})",
        ),
        (
            lambda host: (host.write("/dev/accel1", mode=0o600), host.given.update(uid=OTHER)),
            "this user may not use the chips",
        ),
        (
            lambda host: (host.write("/tmp/libtpu_lockfile"), host.given.update(uid=OTHER)),
            "/tmp/libtpu_lockfile is of another user",
        ),
    ],
)
def test_chips_that_cannot_be_opened_are_not_opened(
    good: Imitation, change: Callable[[Imitation], object], why: str
):
    change(good)
    assert not_made(good).finding == f"not made: {why}"


def test_halves_of_a_host_have_the_chips_that_ray_would_give_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GEMMA_GRPO_CACHE", raising=False)
    both = {"JAX_PLATFORMS": "tpu,cpu"}
    assert chip_checks._variables("tpu", range(8), shared=False) == both
    second = chip_checks._variables("tpu", range(4, 8), shared=True)
    assert second == both | {"TPU_VISIBLE_CHIPS": "4,5,6,7"}


# --- processes


def started(part: str, platform: str, chips: range, *more: str) -> tuple[Child, list[Finding]]:
    child = Child(part, platform, chips, more)
    return child, list(chip_checks._found([child]))


def test_a_process_without_its_devices_is_a_fault():
    _, (found,) = started("half", "tpu", range(4))
    assert (found.check, found.state) == ("process, chips 0 to 3", "fault")
    assert found.finding.startswith("the process ended with status 1 after its start: ")
    assert "plan.platform = 'tpu' needs 4 tpu device(s)" in found.finding
    assert "python -m launch.chips" in found.remedy


def test_a_process_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(chip_checks._LIMIT_S, "all", 0.0)
    child, found = started("all", "cpu", range(1))
    assert found[-1].state == "fault"
    assert child.problem.startswith("the process did not end in 0 s after ")
    assert child._process.poll() is not None


# --- judgements


class Ended:
    """A process that has printed these results."""

    def __init__(self, *results: ChipResult) -> None:
        self.results = list(results)


def scored(*values: float) -> Any:
    figures = {VALUES: list(values), "bound": 0.1}
    return Ended(ChipResult("ok", "", figures, check="log-probs"))


@pytest.mark.parametrize(
    ("second", "state", "words"),
    [
        ((-1.0, -2.0), "ok", "are bit for bit those of all chips"),
        ((-1.0, -2.05), "ok", "differ by at most 0.05 from those of all chips"),
        ((-1.0, -2.5), "fault", "differ by 0.5 from those of all chips, allowed 0.1"),
        ((float("nan"), -2.0), "fault", "differ by nan"),
    ],
)
def test_the_halves_must_compute_what_all_chips_compute(
    second: tuple[float, ...], state: str, words: str
):
    whole = scored(-1.0, -2.0)
    (found,) = chip_checks._halves_against(whole, [scored(-1.0, -2.0), scored(*second)])
    assert (found.check, found.state) == ("halves", state)
    assert words in found.finding


def measured(**figures: float) -> list[Finding]:
    whole: Any = Ended(ChipResult("ok", "measured", figures, check=SPEED))
    return list(chip_checks._speeds(whole))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GEMMA_GRPO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.usefixtures("own_cache")
def test_plausible_speeds_are_kept_for_later_plans():
    *speeds, kept = measured(**GOOD)
    assert [one.state for one in (*speeds, kept)] == ["ok"] * 4
    assert speeds[0].finding == "737 GB/s of a chip; published: 819"
    assert speeds[0].figures == {"measured": GOOD["bytes_per_s"], "plan": 819e9}
    found = load_limits(V5E.name)
    assert found is not None
    assert {name: getattr(found, name) for name in GOOD} == GOOD


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("share", [0.4, 1.2, float("nan")])
@pytest.mark.parametrize("name", GOOD)
def test_implausible_speeds_are_not_kept(name: str, share: float):
    found = measured(**GOOD | {name: share * getattr(V5E, name)})
    assert sorted(one.state for one in found) == ["note", "ok", "ok"]
    assert load_limits(V5E.name) is None


def test_less_memory_than_plans_assume_is_a_note():
    for gib, state in ((HBM_GIB, "ok"), (15.5, "note")):
        result = ChipResult("ok", f"8 x TPU with {gib} GiB", {"gib": gib}, check="chips opened")
        found = chip_checks._finding(result, "")
        assert found.state == state
        assert ("set plan.hbm_gib = 15.50" in found.remedy) == (state == "note")


@pytest.mark.slow
def test_all_checks_on_virtual_devices(tmp_path: Path):
    file = tmp_path / "doctor.json"
    command = ["configs/demo.toml", "--chips", "--json", str(file), "--wandb.mode=disabled"]
    done = subprocess.run(
        [sys.executable, "-m", "launch.doctor", *command],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {one["check"]: one for one in json.loads(file.read_text(encoding="utf-8"))["checks"]}
    skipped = {name for name, one in found.items() if one["finding"].startswith("skipped")}
    assert skipped == {"flash attention", "flash attention, gradient", "speed"}
    ran = {"gradient", "decode, int8 caches", "checkpoint", "halves"}
    assert ran | {"log-probs, chips 4 to 7", "collectives, chips 0 to 3"} <= found.keys()
    assert found["halves"]["finding"].endswith("are bit for bit those of all chips")
    assert found["log-probs"]["figures"]["largest"] < found["log-probs"]["figures"]["bound"]
    assert "halves" in done.stdout
    assert "log-probs, chips 0 to 3: ok" in done.stderr
