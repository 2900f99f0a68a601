"""`launch.train`: refused requests, their messages, and that nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from configs.load import load_config
from launch import preparation, train
from launch.preparation import Prepared
from pipeline.run.mirror import Copier, Snapshot
from pipeline.run.run_folder import RunFolder
from tests.launch.s3_server import s3_bucket
from tests.launch.small_run import everything_below


@pytest.fixture(autouse=True)
def _no_reward_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test starts the process that imports reward functions; test_reward.py has them."""
    monkeypatch.setattr(preparation, "check", lambda _: [])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Prepared]:
    """Collects the runs that would have been started."""
    from launch import session

    runs: list[Prepared] = []

    async def run_session(prepared: Prepared, *, started: float) -> int:
        runs.append(prepared)
        return 0

    monkeypatch.setattr(session, "run_session", run_session)
    monkeypatch.setattr(
        "launch.supervise.supervise", lambda argv, _: train.main([*argv, "--no-supervise"])
    )
    return runs


Refused = Callable[..., list[str]]


@pytest.fixture
def refused(
    request_path: Path, started: list[Prepared], capsys: pytest.CaptureFixture[str]
) -> Refused:
    """Runs the command, which must refuse and leave nothing behind; returns the lines on stderr."""

    def run(*arguments: str) -> list[str]:
        before = everything_below(request_path.parent)
        for dry in ([], ["--dry-run"]):
            assert train.main([str(request_path), *arguments, *dry]) == 2
            shown = capsys.readouterr().err.splitlines()
        assert everything_below(request_path.parent) == before
        assert started == []
        return shown

    return run


@pytest.fixture
def ended(request_path: Path) -> Callable[..., RunFolder]:
    """Makes the run folder of a run that ended."""

    def make(*, ended: str = "finished", steps: int = 3, **summary: Any) -> RunFolder:
        config = load_config(request_path)
        folder = RunFolder.of(config)
        folder.create(config)
        folder.write_summary({"ended": ended, "steps": steps, "deadline_s": None, **summary})
        folder.close()
        return folder

    return make


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def mirror(
    request: pytest.FixtureRequest, request_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """An empty mirror."""
    folder = request_path.parent / "mirror"
    folder.mkdir()
    with s3_bucket(monkeypatch) if request.param == "s3" else nullcontext(str(folder)) as url:
        yield url


def test_promise_3_the_run_of_a_lost_host_is_fetched(
    request_path: Path,
    ended: Callable[..., RunFolder],
    started: list[Prepared],
    capsys: pytest.CaptureFixture[str],
    mirror: str,
):
    folder = ended()
    Copier(f"{mirror}/small").copy(Snapshot(folder.path))
    folder.path.rename(request_path.parent / "lost")
    command = [str(request_path), "--run.mirror", mirror]
    before = everything_below(request_path.parent)
    assert train.main([*command, "--dry-run"]) == 0
    assert everything_below(request_path.parent) == before
    capsys.readouterr()
    assert train.main(command) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" ", 1)[0] for line in said] == ["fetching", str(folder.path)]
    assert (folder.summary or {})["steps"] == 3
    assert started == []


def test_mistakes_of_all_kinds_are_reported_at_once(
    request_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NETRC", "/nonexistent")
    for name in ("WANDB_API_KEY", "RAY_ADDRESS", "GEMMA_GRPO_SUBMITTED"):
        monkeypatch.delenv(name, raising=False)
    folder = request_path.parent
    lines = refused(
        *("--learner.lrr", "1"),
        *("--model.dtype", "float16"),
        *("--rollout.group_size", "1"),
        *("--plan.row_tokens", "67"),
        *("--plan.platform", "tpu"),
        *("--prompt.template", "{qestion} {anwser}"),
        *("--data.test.path", "tset.jsonl"),
        *("--rollout.stop_tokens", '["<eot>"]'),
        *("--lora.start", "gone"),
        *("--eval.sets", "[{name = 'more', path = 's3://bucket/more.jsonl'}]"),
        *("--run.dir", str(request_path)),
        *("--wandb.mode", "online"),
        *("--budget.steps", "none", "--budget.time", "10s"),
    )
    parts = (
        "command line: --learner.lrr: unknown; did you mean --learner.lr?",
        'command line: --model.dtype = "float16": must be one of',
        "command line: --rollout.group_size = 1: must be an integer, at least 2",
        "command line: --plan.row_tokens = 67: must hold the longest sequence, 68 tokens",
        'command line: --eval.sets.0.path = "s3://bucket/more.jsonl": s3:// is not supported',
        f'run.dir = "{request_path}": {request_path} cannot be written: Not a directory; choose',
        "wandb.mode = 'online', but this machine has no W&B login",
        "plan.platform = 'tpu' needs 2 TPU, and this machine has 0",
        f"lora.start: no folder {folder}/gone",
        "rollout.stop_tokens: ",
        "budget.time = 10s is too short",
        f"data.train: {folder}/train.jsonl has no column 'qestion'; nearest: 'question' (of",
        f"data.train: {folder}/train.jsonl has no column 'anwser'; ",
        f"data.test.path: no file {folder}/tset.jsonl; nearest: {folder}/test.jsonl",
    )
    for part in parts:
        assert [line for line in lines if line.startswith(part)], (part, lines)
    assert len(lines) == len(parts)


def test_a_dry_run_prints_what_would_run_and_leaves_nothing_behind(
    request_path: Path, started: list[Prepared], capsys: pytest.CaptureFixture[str]
):
    before = everything_below(request_path.parent)
    assert train.main([str(request_path), "--dry-run"]) == 0
    assert everything_below(request_path.parent) == before
    said = capsys.readouterr().out.splitlines()
    for line in (
        "train: 6 prompts",
        "    tom has 0 apples.<end_of_turn>",
        "its reference answer: '0'",
        "measured by equality with the reference (eval.metric); answer: the last answer block",
    ):
        assert line in said
    assert '    model.dtype = "float32"' in said
    assert not any("learner.lr" in line for line in said)
    runs = request_path.parent / "runs"
    assert said[-1] == (
        f"the request is valid: without --dry-run it starts the run in {runs}/small"
    )
    file = request_path.parent / "all.json"
    assert train.main([str(request_path), "--dry-run", "--json", str(file)]) == 0
    whole = json.loads(file.read_text())
    assert (whole["valid"], whole["prompts"]) == (True, {"train": 6, "test": 4})
    assert whole["config"]["run"]["dir"] == str(runs)
    assert whole["config"]["learner"]["lr"] == 5e-5
    assert whole["changed"]["rollout.max_new_tokens"] == 8
    assert started == []


def test_a_changed_setting_is_refused_with_both_values_or_accepted_by_its_name(
    request_path: Path, ended: Callable[..., RunFolder], refused: Refused, started: list[Prepared]
):
    folder = ended(ended="interrupted")
    rate, changed = ("--learner.lr", "1e-4"), ("--run.seed", "1", "--learner.kl_coef", "0.5")
    told, *lines = refused(*rate, *changed, "--budget.steps", "9", "--accept", "learner.lr")
    assert told.startswith(f"{folder.path} contains a run with other settings; resume it with the")
    assert lines == [
        "  run.seed: was 0, now 1",
        "  learner.kl_coef: was 0.0, now 0.5 (--accept learner.kl_coef)",
    ]
    assert train.main([str(request_path), *rate, "--accept", "learner.lr"]) == 0
    assert started[0].config.learner.lr == 1e-4


def test_extend_adds_to_a_finished_run_only(
    request_path: Path, ended: Callable[..., RunFolder], refused: Refused, started: list[Prepared]
):
    (line,) = refused("--extend", "5")
    assert line.startswith("--extend: there is no finished run in ")
    folder = ended()
    assert train.main([str(request_path), "--extend", "50"]) == 0
    assert started[0].extend is not None
    assert (started[0].extend.steps, started[0].extend.time_s) == (50, None)
    # The process that holds the folder's lock journals it.
    assert list(folder.events("extended")) == []
