"""Every preset passes `--dry-run`: its settings with data and a model folder of the right form."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import presets
from launch import train
from launch.flags import SUBMITTED
from tests.launch.small_run import everything_below, write_rows

PROJECT = Path(__file__).parents[2]
ON_A_HUB = [preset for preset in presets() if "gsm8k" in preset]
assert {Path(one).name.partition("_gsm8k")[0] for one in ON_A_HUB} == {
    *("gemma2_2b", "gemma3_270m", "gemma3_1b", "gemma3_4b", "gemma4_e2b", "gemma4_e4b")
}


def gsm8k(first: int, count: int) -> list[dict[str, str]]:
    """Returns rows with GSM8K's columns."""
    return [
        {"question": f"{n} + {n}?", "answer": f"{n} + {n} is {2 * n}.\n#### {2 * n}"}
        for n in range(first, first + count)
    ]


@pytest.mark.parametrize("preset", ON_A_HUB)
def test_a_preset_passes_a_dry_run(
    preset: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    # As launch/submit.sh does: this machine need not have the devices.
    monkeypatch.setenv(SUBMITTED, "1")
    settings = ["--model.path", str(PROJECT / "launch/demo/tiny_gemma3")]
    settings += ["--run.dir", str(tmp_path / "runs"), "--wandb.mode", "disabled"]
    for number, split in enumerate(("train", "validation", "test")):
        path = tmp_path / f"{split}.jsonl"
        write_rows(path, gsm8k(1000 * number, 100))
        key = f"--data.{split}"
        settings += [f"{key}.path", str(path), f"{key}.subset", "none", f"{key}.split", "none"]
    path = tmp_path / "boolq.jsonl"
    write_rows(path, [{"passage": "Sky is up.", "question": "is sky up", "answer": True}])
    on_tpu = preset.endswith("v5e8.toml")
    if on_tpu:
        settings += ["--eval.sets.0.path", str(path), "--eval.sets.0.split", "none"]
    before = everything_below(tmp_path)
    assert train.main([str(PROJECT / preset), *settings, "--dry-run"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert f'    plan.platform = "{"tpu" if on_tpu else "gpu"}"' in shown
    assert "    eval.every_minutes = 30.0" in shown
    assert everything_below(tmp_path) == before
