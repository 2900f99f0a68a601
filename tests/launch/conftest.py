"""What tests of commands share: requests that need no devices, one Ray cluster, a finished run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.load import config_to_json, load_config
from pipeline.run.run_folder import RunFolder
from tests.demo_texts import write_tokenizer
from tests.launch.cluster_fixtures import (
    SECRETS,
    FinishedJob,
    Head,
    running_head,
    submit,
    write_config,
)
from tests.launch.small_run import write_best, write_checkpoint, write_request


@pytest.fixture(autouse=True)
def _own_signal_handlers() -> Iterator[None]:
    """Removes the handlers that a command has installed in the process of the tests."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        if handler is not None:  # not of Python
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small tokenizer."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def request_path(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of a small valid request, in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GEMMA_GRPO_HOME", raising=False)
    return write_request(tmp_path, tokenizer=tokenizer)


@pytest.fixture
def moved(request_path: Path) -> Path:
    """A run that has been moved: checkpoints of steps 3 and 12, the best, an export, answers."""
    folder = request_path.parent / "moved"
    write_checkpoint(folder, 3)
    write_checkpoint(folder, 12)
    write_best(folder, 9)
    (folder / "checkpoints" / "14.orbax-checkpoint-tmp").mkdir()
    (folder / "export" / "adapter").mkdir(parents=True)
    (folder / "export" / "config.json").write_text('{"model_type": "gemma3_text"}')
    config = config_to_json(load_config(request_path))
    (folder / "config.json").write_text(config, encoding="utf-8")
    (folder / "rollouts").mkdir()
    RunFolder(folder).write_rollouts("test_after", [{"text": "tom has 3 apples."}])
    return folder


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    with running_head() as found:
        yield found


@pytest.fixture(scope="session")
def job(head: Head, tmp_path_factory: pytest.TempPathFactory) -> FinishedJob:
    """A submitted run of two steps that has finished."""
    folder = tmp_path_factory.mktemp("finished")
    variables: dict[str, Any] = {**SECRETS, "WANDB_MODE": "offline"}
    status, output = submit(head, write_config(folder, name="finished"), **variables)
    return FinishedJob(folder / "runs" / "finished", status, output)


@pytest.fixture(scope="session")
def finished(job: FinishedJob) -> Path:
    """The folder of a finished run; tests may add files, and change copies only."""
    assert job.status == 0, job.output
    return job.run
