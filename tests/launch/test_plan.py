"""`launch.plan`: its output and files, exit statuses, light imports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from configs.machine import Machine
from launch import plan, train
from tests.pipeline.plan.presets import KNOWN

PROJECT = Path(__file__).parents[2]
PAST = "2024-01-01T00:00:00+00:00"
ONE_B = str(PROJECT / "configs/gemma3_1b_gsm8k_v5e8.toml")


def shown(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> tuple[str, str]:
    assert plan.main(argv) == status
    found = capsys.readouterr()
    return found.out, found.err


def test_the_topology_gives_the_devices_that_the_configuration_leaves_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("configs.short_forms.this_machine", lambda: Machine("cpu", 1, None, "-"))
    minimal = [str(PROJECT / "configs/minimal.toml"), "--model.path", "unsloth/gemma-3-1b-it"]
    for more, title, said in (
        (["--topology", "v5e-8"], "plan of minimal for v5e-8: 8 x TPU v5e", 0),
        (["--topology", "gpu-24"], "plan of minimal for gpu-24: 1 x GPU of 24 GB", 0),
        ([], "plan of minimal for cpu: 1 x CPU", 2),
    ):
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


def test_the_plan_for_another_topology(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    out, _ = shown(capsys, ONE_B, "--topology", "v6e-32", "--json", str(path))
    assert "plan only: v6e-32 can be planned for, from its published limits" in out
    figures = json.loads(path.read_text())
    assert figures["topology"]["chips"] == figures["plan"]["learner_devices"] == 32
    assert figures["plan"]["planned_sizes"] == ["slots", "micro_batch_tokens"]
    settings = [
        text
        for key, value in figures["plan"]["set"].items()
        for text in (f"--{key}", "none" if value is None else str(value))
    ]
    shown(capsys, ONE_B, "--topology", "v6e-32", *settings, "--json", str(path))
    again = json.loads(path.read_text())["plan"]
    assert again["configured"]
    for key in ("slots", "segment_steps", "micro_batch_tokens", "remat"):
        assert again[key] == figures["plan"][key]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--topology", "v5e-9"], "--topology v5e-9: unknown; known topologies"),
        (["--topology", "v6e-8", "--verify"], "--verify: programs can be compiled for v5e-1,"),
        (["--completion-tokens", "9999"], "--completion-tokens 9999: must be from 1 to"),
        (
            ["--model.path", "hf://a/b"],
            "model.path: hf://a/b: only Gemma 2, 3 and 4 can be trained",
        ),
        (["--model.path", "/nowhere"], "/nowhere"),
        (["--json", "/nowhere/plan.json"], "--json: no folder /nowhere"),
        (["--json", "/tmp"], "command line: --json: /tmp is a folder; name a file"),
        (["--budget.time", "none", "--budget.until", PAST], f"budget.until = {PAST} has passed"),
    ],
)
def test_mistakes_are_reported(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = shown(capsys, ONE_B, *argv, status=2)
    assert out == ""
    assert message in err


def test_a_plan_that_does_not_fit_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    many = ["--plan.placement", "colocated"]
    many += ["--plan.slots", "4096", "--plan.micro_batch_tokens", "16384"]
    many += ["--rollout.prompts_per_step", "256"]
    four = str(PROJECT / "configs/gemma3_4b_gsm8k_v5e8.toml")
    out, _ = shown(capsys, four, *many, status=1)
    assert "DOES NOT FIT: decode takes" in out
    assert "no plan.slots, no plan.micro_batch_tokens" in out  # planned sizes would fit


def test_the_shortage_and_what_would_fit_are_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    four = str(PROJECT / "configs/gemma3_4b_gsm8k_v5e8.toml")
    small = ["--topology", "v5e-1", "--plan.hbm_gib", "6"]
    out, _ = shown(capsys, four, *small, status=1)
    assert "  DOES NOT FIT: the base alone takes ~7.23 GiB of the 5.70 that may be used\n" in out
    assert re.search(r'^model.quantization = "nf4"  .*  settings$', out, re.MULTILINE)
    assert re.search(r"^--topology v5e-4 \(.*  hardware$", out, re.MULTILINE)
    assert re.search(r"^plan\.hbm_gib = [\d.]+  .*  settings$", out, re.MULTILINE)
    out, _ = shown(capsys, four, "--topology", "v5e-1", "--plan.hbm_gib", "2", status=1)
    assert "no setting that takes less memory makes it fit, nor do all of them together" in out


def test_a_budget_that_is_too_small_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = shown(capsys, ONE_B, "--budget.time", "3m", status=1)
    assert "TOO SMALL" in out
    assert "1 it does not, or no step fits the budget" in plan.DESCRIPTION


def test_train_refuses_plan_only_topologies(capsys: pytest.CaptureFixture[str]) -> None:
    many = ["--plan.learner_devices=16", "--plan.placement=colocated"]
    assert train.main([ONE_B, *many, "--dry-run"]) == 2
    assert "a process of 16 chips spans 2 hosts of v5e-16" in capsys.readouterr().err
