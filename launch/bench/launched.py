"""A run of `launch.train` in a folder of its own, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.run.report.run_records import RunRecords, read_run


def train_command(config: str, settings: Mapping[str, Any], *, folder: str) -> list[str]:
    """The command of a run `run` in this folder, with changed settings and without W&B."""
    own = {"run.dir": folder, "run.name": "run", "wandb.mode": "disabled"}
    options = [f"--{key}={value}" for key, value in {**own, **settings}.items()]
    return [sys.executable, "-m", "launch.train", config, *options]


@contextmanager
def trained(
    config: str, settings: Mapping[str, Any], *, environment: Mapping[str, str]
) -> Iterator[RunRecords]:
    """Runs to the end, and yields the records, which the end of the block removes.

    A signal to this process also stops the run, and waits for it.

    Raises:
        RuntimeError: if the run failed, with the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        with subprocess.Popen(
            train_command(config, settings, folder=folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | environment,
        ) as run:
            try:
                output, _ = run.communicate()
            except BaseException:
                run.terminate()
                run.communicate()  # until its processes have ended, and use the folder no more
                raise
        if run.returncode:
            raise RuntimeError(f"launch.train ended with {run.returncode}: {output[-2000:]}")
        yield read_run(Path(folder, "run"))
