"""Ray reads these variables when it is imported, so this package sets them first."""

import os

# `uv run` would make Ray's workers run a copy of the project in a fresh environment.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
if "RAY_ADDRESS" not in os.environ:
    # A cluster that this process starts has one node, whose address is 127.0.0.1. Despite its name
    # the variable is read on every platform.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
