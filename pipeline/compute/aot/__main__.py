"""The TPU compiler as a child process; `pipeline.plan.compiler` starts it.

    python -m pipeline.compute.aot            reads a request from standard input

Runs in the environment `topology.TPU_COMPILER`. The request is a JSON object with `config`, `shape`
and `programs`. The answers are lines of JSON on standard output, one per program as soon as it is
compiled, in any order: its name and `compile.program_figures`.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

from configs.schema import Config
from pipeline.compute.aot.compile import program_figures
from pipeline.data.models.model_shape import ModelShape

_PARALLEL_COMPILATIONS = 2
"""Each compilation keeps one core busy and takes some GiB of memory."""


def main() -> None:
    """Compiles the requested programs."""
    request = json.load(sys.stdin)
    config = Config.model_validate_json(json.dumps(request["config"]))
    sizes = request["shape"]
    shape = ModelShape(**{**sizes, "local": tuple(sizes["local"])})
    with ThreadPoolExecutor(min(_PARALLEL_COMPILATIONS, os.cpu_count() or 1)) as pool:
        names = {
            pool.submit(program_figures, config, shape, name): name for name in request["programs"]
        }
        for future in as_completed(names):
            sys.stdout.write(json.dumps([names[future], future.result()]) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
