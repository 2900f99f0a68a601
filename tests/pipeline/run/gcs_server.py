"""A local server of Google Cloud Storage."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gcp_storage_emulator.server import create_server


@contextmanager
def gcs_server(
    monkeypatch: pytest.MonkeyPatch, bucket: str, *, credentials: Path
) -> Iterator[None]:
    """Runs a server of one empty bucket, which gs:// of this process and its children uses.

    Args:
        monkeypatch: sets environment variables.
        bucket: its name.
        credentials: folder without any, in place of the user's: they are not for this server.
    """
    import fsspec

    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket=bucket)
    server.start()
    host, port = server._api._httpd.server_address
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{host}:{port}")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(credentials))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    fsspec.get_filesystem_class("gs").clear_instance_cache()
    try:
        yield
    finally:
        server.stop()
        fsspec.get_filesystem_class("gs").clear_instance_cache()
