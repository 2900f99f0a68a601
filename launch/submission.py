"""Submission time of a job, which launch/submit.sh puts into the job's environment."""

from __future__ import annotations

import os
import time

from configs.budget import Budget

VARIABLE = "GEMMA_GRPO_SUBMITTED_S"
"""Environment variable with the submission time in seconds since 1970; set in the job, and while
launch/submit.sh checks the request."""


def waited_s(budget: Budget, *, started: float) -> float:
    """Returns the seconds between submission and start that count as used; 0 if they do not count.

    Args:
        budget: `budget.from_submission` makes them count.
        started: start of this process by `time.monotonic`.

    Raises:
        ValueError: if they count and this process is not a submitted job.
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
    # Clocks of two machines differ a little; the result must not be negative.
    return max(0.0, now_s - float(text))
