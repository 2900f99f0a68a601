"""Sets variables that Ray reads when it is imported, and Python's path in Ray's workers."""

import os
import sys
from pathlib import Path

# `uv run` would make Ray's workers run a copy of the project in a fresh environment.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
if "RAY_ADDRESS" not in os.environ:
    # A cluster that this process starts has one node, whose address is 127.0.0.1. Despite its name
    # the variable is read on every platform.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # Its GCS does not come back: processes that have lost it end after so many seconds, not 60.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "5")

# Ray puts the driver's folder first on its workers' path. As in `launch`, it becomes the last.
_CURRENT = Path.cwd()
if Path(__file__).resolve().parents[1] != _CURRENT:
    sys.path.sort(key=lambda entry: Path(entry).resolve() == _CURRENT)
