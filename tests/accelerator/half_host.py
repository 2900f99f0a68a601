"""A process that has half of a host's chips.

    python -m tests.accelerator.half_host PLATFORM DEVICES

Checks collectives over its chips, and prints the log-probs of the small model's tokens as JSON.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from pipeline.compute.devices import open_mesh
from tests.accelerator import devices
from tests.accelerator.forms import log_probs
from tests.accelerator.small_model import SmallModel


def main(platform: str, count: int) -> None:
    """Computes on this process's chips."""
    chips = list(open_mesh(platform=platform, count=count).devices.flat)
    for name, (found, wanted) in devices.exchanged(chips, count).items():
        np.testing.assert_array_equal(found, wanted, err_msg=name)
    found = log_probs(SmallModel.on(chips))["log-probs"]
    sys.stdout.write(json.dumps(found.astype(float).tolist()) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
