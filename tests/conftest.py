"""JAX settings of the tests; must be imported before JAX.

Eight virtual CPU devices. Most of a test's time is compilation, so XLA skips expensive passes, and
all processes share one compilation cache.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile

FLAGS = (
    "--xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

assert "jax" not in sys.modules, "JAX was imported before the tests could choose its devices"
os.environ["JAX_PLATFORMS"] = "cpu"
if FLAGS not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="gemma-grpo-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"

from hypothesis import settings  # noqa: E402  # after the environment is set

# No test may depend on how busy the machine is.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")
