"""Mirrors of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.run.gcs_server import gcs_server
from tests.pipeline.run.s3_server import BUCKET, s3_server


@pytest.fixture(params=["file", "s3", "gs"])
def url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The mirror of a run, on another disk or on a server."""
    if request.param == "file":
        (tmp_path / "mirror").mkdir()
        yield f"file://{tmp_path}/mirror/run"
    elif request.param == "s3":
        with s3_server(monkeypatch):
            yield f"s3://{BUCKET}/runs/run"
    else:
        with gcs_server(monkeypatch, BUCKET, credentials=tmp_path / "no-credentials"):
            yield f"gs://{BUCKET}/runs/run"
