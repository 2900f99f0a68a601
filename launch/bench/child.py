"""Runs one measurement in a separate process, isolated from the memory and settings of others.

    python -m launch.bench.child MODULE FUNCTION       keyword arguments as JSON on standard input

The function's result is the last line of standard output, as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from pipeline.compute.devices import malloc_environment

CPU_ONLY = {"JAX_PLATFORMS": "cpu", **malloc_environment()}
"""Environment of measurements on the CPU, the same as in a run's processes."""


def in_child(
    function: str, arguments: Mapping[str, Any], *, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Calls `module:function` with keyword arguments in a new process; returns its result.

    Raises:
        RuntimeError: if the process failed, with the last lines of its standard error.
    """
    module, name = function.split(":")
    done = subprocess.run(
        [sys.executable, "-m", "launch.bench.child", module, name],
        input=json.dumps(arguments),
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        tail = done.stderr.strip().splitlines()[-20:]
        raise RuntimeError("\n".join([f"{function} ended with {done.returncode}:", *tail]))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Runs the function in the child process."""
    module, name = sys.argv[1:]
    function = getattr(importlib.import_module(module), name)
    print(json.dumps(function(**json.load(sys.stdin))))


if __name__ == "__main__":
    main()
