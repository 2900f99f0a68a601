"""`launch.evaluate` and `launch.chat`: refused requests, notes, questions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from configs.load import config_to_json, load_config
from launch import chat, evaluate
from launch.evaluate import Prepared
from pipeline.data.text.tokenizer_files import read_tokenizer
from tests.launch.small_run import everything_below, write_checkpoint


@pytest.fixture
def request_file(request_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The request; no weights are read."""
    monkeypatch.setattr("launch.preparation.open_model_files", lambda _: read_tokenizer(tokenizer))
    return request_path


def make_run(request_file: Path, *overrides: tuple[str, str]) -> Path:
    """Makes a run folder for the request, with a checkpoint."""
    config = load_config(request_file, overrides)
    folder = Path(config.run.dir) / config.run.name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config_to_json(config), encoding="utf-8")
    write_checkpoint(folder, 3)
    return folder


def prepared(*arguments: str | Path) -> Prepared:
    return evaluate.prepare([str(one) for one in arguments])


def test_a_version_is_evaluated_and_the_run_keeps_the_result(request_file: Path):
    folder = make_run(request_file)
    found = prepared(folder)
    assert found.config.lora.start == str(folder / "checkpoints" / "3")
    assert found.result is not None
    assert found.result.parent == folder / "evaluations"
    assert list(found.tests) == ["test"]
    found = prepared(request_file)  # of a configuration, its base
    assert (found.result, found.config.lora.start) == (None, None)


def test_settings_that_differ_from_training_are_noted(request_file: Path):
    folder = make_run(request_file)
    found = prepared(folder, "--prompt.system=Think.", "--eval.temperature=1.0")
    assert found.notes == ("prompt.system is 'Think.'; the run was trained with ''",)


def test_a_policy_is_evaluated_without_quantization(request_file: Path):
    rounded = [
        ("plan.rollout_weights", "int8"),
        ("plan.kv_cache", "int8"),
        ("learner.importance_cap", "2.0"),
    ]
    run = make_run(request_file, *rounded)
    for extra, kind in (([], "shared"), (["--plan.rollout_weights=int8_matmul"], "int8_matmul")):
        found = prepared(run, *extra).config
        assert (found.plan.rollout_weights, found.plan.kv_cache) == (kind, "model")


SMALL = "{folder}/small.toml"


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (evaluate.main, [SMALL, "--json", "no/a.json"], "command line: --json: no folder {folder}"),
        (evaluate.main, [SMALL, "--data.test.path=gone.jsonl"], "data.test.path: no file"),
        (evaluate.main, [SMALL, "--eval.samples=2"], "needs eval.temperature above 0"),
        (chat.main, [], "command line: RUN_DIR[@STEP|@best|@last]|CONFIG.toml is missing"),
        (chat.main, ["data"], "{folder}/data/config.json is damaged: not a JSON object"),
        (chat.main, ["runs/small", "--temperature=-1"], "--temperature -1: must be at least 0"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    request_file: Path,
    capsys: pytest.CaptureFixture[str],
    main: Callable[[list[str]], int],
    arguments: list[str],
    message: str,
):
    folder = request_file.parent
    make_run(request_file)
    (folder / "data").mkdir()
    (folder / "data" / "config.json").write_text("[]", encoding="utf-8")
    before = everything_below(folder)
    assert main([one.format(folder=folder) for one in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message.format(folder=folder) in line
    assert everything_below(folder) == before
