"""When a job was submitted: launch/submit.sh puts it into the job's environment."""

from __future__ import annotations

import os
import time

from configs.budget import Budget

VARIABLE = "GEMMA_GRPO_SUBMITTED_S"
"""Environment variable with the submission's seconds since 1970, in the job and while
launch/submit.sh checks the request."""


def waited_s(budget: Budget, *, started: float) -> float:
    """Seconds between submission and start that count as used; 0 if those do not count.

    Args:
        budget: says whether they do.
        started: when this process started, on the scale of `time.monotonic`.

    Raises:
        ValueError: if they count and this is no submitted job.
    """
    if not budget.from_submission:
        return 0.0
    text = os.environ.get(VARIABLE)
    if text is None:
        raise ValueError(
            "budget.from_submission: this is not a job that launch/submit.sh has submitted; submit "
            "it, or remove the setting"
        )
    now_s = time.time() - (time.monotonic() - started)
    # Clocks of two machines differ a little; nobody starts before he is submitted.
    return max(0.0, now_s - float(text))
