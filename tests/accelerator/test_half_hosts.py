"""Two processes with half of the chips each, as in split placement on a TPU host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from configs.machine import tpu_chips
from pipeline.compute.devices import environment
from tests.accelerator.conftest import Report
from tests.accelerator.forms import log_probs
from tests.accelerator.small_model import SmallModel

pytestmark = pytest.mark.accelerator

HOST, HALF = 8, 4
PROJECT = Path(__file__).parents[2]
LIMIT_S = 420
"""Seconds after which a process counts as hanging: several times what it should take."""


def test_two_processes_compute_what_one_does(
    request: pytest.FixtureRequest, report: Report, *, virtual: bool
):
    if not virtual and len(tpu_chips()) != HOST:
        pytest.skip(f"needs a TPU host with {HOST} chips")
    platform = "cpu" if virtual else "tpu"
    halves = []
    for first in (0, HALF):
        variables = environment(platform=platform, count=HALF)
        if platform == "tpu":  # Ray does this; `open_mesh` does the rest
            variables["TPU_VISIBLE_CHIPS"] = ",".join(map(str, range(first, first + HALF)))
        command = [sys.executable, "-m", "tests.accelerator.half_host", platform, str(HALF)]
        halves.append(
            subprocess.Popen(
                command, cwd=PROJECT, env=os.environ | variables, stdout=subprocess.PIPE, text=True
            )
        )
    try:
        outputs = [one.communicate(timeout=LIMIT_S)[0] for one in halves]
    finally:
        for one in halves:
            one.kill()
    assert [one.returncode for one in halves] == [0, 0]
    # This process takes the chips only now.
    whole = log_probs(SmallModel.on(request.getfixturevalue("chips")))["log-probs"]
    bound = request.getfixturevalue("forms").log_probs().bound
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    largest = float(np.abs(np.subtract(found, whole)).max())
    report(
        f"log-probs of both halves differ by at most {largest:.3g} from those of all chips, "
        f"{bound:.3g} allowed",
        {"largest": largest, "bound": bound},
    )
    assert largest <= bound
