"""Eight virtual CPU devices for the whole run; must be imported before JAX is."""

from __future__ import annotations

import os
import sys

DEVICES = "--xla_force_host_platform_device_count=8"

assert "jax" not in sys.modules, "JAX was imported before the tests could choose its devices"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}".strip()

from hypothesis import settings  # noqa: E402  # after the environment, like everything

# No test may depend on how busy the machine is.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")
