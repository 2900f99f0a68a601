"""What launch/submit.sh and the job that it submits tell each other.

    python -m launch.submission CONFIG.toml [--table.key VALUE ...]

prints the name of the run, for the names of the job.
"""

from __future__ import annotations

import os
import sys
import time

from configs.budget import Budget

VARIABLE = "GEMMA_GRPO_SUBMITTED_S"
"""Environment variable with the submission's seconds since 1970."""


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


def main() -> None:
    """Prints the name of the run that `launch.train` would start with the same arguments."""
    # Imported late: a run that is no job needs none of it.
    from configs.cli import parse
    from configs.load import load_config
    from launch.train import command_flags

    command = parse(sys.argv[1:], prog="launch/submit.sh", description="", flags=command_flags())
    print(load_config(command.path, command.overrides).run.name)


if __name__ == "__main__":
    main()
