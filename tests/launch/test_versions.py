"""Names of versions of a run, what `launch.evaluate` and `launch.export` make of them; `--push`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import LocalTokenNotFoundError

from configs.load import config_to_json, load_config
from launch import evaluate, export
from launch.exits import Failure
from launch.push import check_push, push
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


# --- launch.export --push


class Hub:
    """Answers as `HfApi` does; the errors are those of `whoami` and of `upload_folder`."""

    endpoint = "https://hub"

    def __init__(self) -> None:
        self.login: Exception | None = None
        self.upload: Exception | None = None
        self.pushed: list[dict[str, Any]] = []

    def whoami(self) -> None:
        if self.login is not None:
            raise self.login

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        assert (name, private, exist_ok) == ("ann/tuned", True, True)

    def upload_folder(self, **given: Any) -> None:
        if self.upload is not None:
            raise self.upload
        self.pushed.append(given)


def test_an_export_is_pushed_or_stays_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    assert check_push("hf://ann/tuned") == "ann/tuned"
    for hub.login, told in (
        (LocalTokenNotFoundError(), "there is no login; log in with"),
        (httpx.ConnectError("nobody answers"), "the hub cannot be reached, or refuses"),
    ):
        with pytest.raises((ValueError, Failure), match=told):
            check_push("hf://ann/tuned")
    hub.upload = httpx.ConnectError("the connection broke")
    with pytest.raises(Failure, match="is complete; push it with: hf upload ann/tuned /"):
        push(tmp_path, "ann/tuned", private=True, title="demo")
    hub.upload = None
    push(tmp_path, "ann/tuned", private=True, title="demo")
    assert capsys.readouterr().out.endswith("pushed: https://hub/ann/tuned\n")
    (given,) = hub.pushed
    assert (given["folder_path"], given["commit_message"]) == (tmp_path, "demo")
    assert "adapter/*" in given["delete_patterns"]  # of an earlier export
