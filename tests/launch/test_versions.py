"""Names of versions of a run, and what `launch.evaluate` and `launch.export` make of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import config_to_json, load_config
from launch import evaluate, export
from launch.versions import find_version
from pipeline.run.run_folder import RunFolder


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("moved", "checkpoints/best"),
        ("moved@best", "checkpoints/best"),
        ("moved@last", "checkpoints/12"),
        ("moved@3", "checkpoints/3"),
        ("moved/export", "export"),
    ],
)
def test_a_version_has_one_name_in_all_commands(moved: Path, name: str, adapter: str):
    found = find_version(name)
    assert (found.run, found.adapter) == (moved, moved / adapter)
    config = found.config([("eval.temperature", "1.0")])
    assert (config.run.dir, config.run.name) == (str(moved.parent), "moved")
    assert config.eval.temperature == 1


def test_without_a_validation_the_last_version_is_meant(moved: Path):
    (moved / "checkpoints" / "best" / "adapter.safetensors").unlink()
    assert find_version("moved").adapter == moved / "checkpoints" / "12"


def test_a_version_is_evaluated_and_the_run_keeps_the_result(moved: Path):
    found = evaluate.prepare(["moved@3", "--prompt.system=Think.", "--eval.temperature=1.0"])
    assert found.config.lora.start == str(moved / "checkpoints" / "3")
    assert found.result is not None
    assert found.result.parent == moved / "evaluations"
    assert list(found.tests) == ["test"]
    assert found.notes == ("prompt.system is 'Think.'; the run was trained with ''",)
    found = evaluate.prepare(["small.toml"])  # of a configuration, its base
    assert (found.result, found.config.lora.start) == (None, None)


def test_a_policy_is_evaluated_without_quantization(moved: Path, request_path: Path):
    rounded = {"plan.rollout_weights": "int8", "plan.kv_cache": "int8", "learner.kl_coef": "0.1"}
    rounded["learner.importance_cap"] = "2.0"
    config = load_config(request_path, list(rounded.items()))
    (moved / "config.json").write_text(config_to_json(config), encoding="utf-8")
    for extra, kind in (([], "shared"), (["--plan.rollout_weights=int8_matmul"], "int8_matmul")):
        found = evaluate.prepare(["moved", *extra]).config
        assert (found.plan.rollout_weights, found.plan.kv_cache) == (kind, "model")


def test_a_version_is_exported_and_compared_with_recorded_texts(moved: Path):
    command = ["moved@3", "--out", "out", "--format", "peft", "hf"]
    found = export.prepare(command)
    assert RunFolder.of(found.config).path == moved
    assert export.working_config(found).lora.start == str(moved / "checkpoints" / "3")
    assert found.formats == ("hf", "peft")
    assert len(found.examples) == 1
    (moved / "rollouts" / "test_after.jsonl").unlink()
    with pytest.raises(ValueError, match="holds no texts on which"):
        export.prepare(command)
