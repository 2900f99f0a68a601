"""`launch.plan`: its output and files, exit statuses, light imports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from configs.machine import Machine
from launch import plan
from tests.pipeline.plan.presets import KNOWN

PROJECT = Path(__file__).parents[2]
ONE_B, FOUR_B = (str(PROJECT / f"configs/gemma3_{n}b_gsm8k_v5e8.toml") for n in (1, 4))


def shown(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> tuple[str, str]:
    assert plan.main(argv) == status
    found = capsys.readouterr()
    return found.out, found.err


def test_the_topology_gives_the_devices_that_the_configuration_leaves_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, gpu = Machine("cpu", 1, "-"), Machine("gpu", 1, "1 x NVIDIA H100", "h100", 59.73)
    minimal = [str(PROJECT / "configs/minimal.toml"), "--model.path", "unsloth/gemma-3-1b-it"]
    for machine, more, title, said in (
        (cpu, ["--topology", "v5e-8"], "plan of minimal for v5e-8: 8 x TPU v5e", 0),
        (gpu, ["--topology", "l4"], "plan of minimal for l4: 1 x NVIDIA L4 of 16.87", 0),
        (gpu, [], "plan of minimal for h100: 1 x NVIDIA H100 of 59.73", 1),
        (cpu, [], "plan of minimal for cpu: 1 x CPU", 2),
    ):
        monkeypatch.setattr("configs.short_forms.this_machine", lambda found=machine: found)
        out, err = shown(capsys, *minimal, *more)
        assert out.startswith(title)
        assert len(err.splitlines()) == said


@pytest.mark.parametrize("preset", KNOWN)
def test_every_preset_is_planned(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(PROJECT)  # the path of the demo's model is relative to it
    out, err = shown(capsys, preset, "--json", str(tmp_path / "plan.json"))
    assert err == ""
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert figures["plan"]["fits"]
    assert figures["plan"]["configured"] != figures["plan"]["auto"]
    assert f"~{figures['step']['tokens_per_s']:,.0f} trained tokens per second" in out
    assert len(out.splitlines()) <= 70
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_what_does_not_fit_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--plan.placement", "colocated", "--plan.slots", "8", "--plan.hbm_gib", "0.1"]
    out, _ = shown(capsys, FOUR_B, *given, "--plan.micro_batch_tokens", "16384", status=1)
    assert re.search("DOES NOT FIT: .*: base ~7.23, ", out)
    assert "no setting that takes less memory makes it fit, nor do all of them together" in out
    assert "budget not estimated: the plan does not fit" in out
    out, _ = shown(capsys, ONE_B, "--budget.time", "3m", status=1)
    assert "TOO SMALL" in out
