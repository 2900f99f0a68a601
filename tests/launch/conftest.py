"""What all tests with Ray share: one cluster, and one finished run on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.cluster_fixtures import FinishedJob, Head, finished_job, running_head


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    with running_head() as found:
        yield found


@pytest.fixture(scope="session")
def job(head: Head, tmp_path_factory: pytest.TempPathFactory) -> FinishedJob:
    """A submitted run of two steps that has finished."""
    return finished_job(head, tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="session")
def finished(job: FinishedJob) -> Path:
    """The folder of a finished run; tests may add files, and change copies only."""
    assert job.status == 0, job.output
    return job.run
