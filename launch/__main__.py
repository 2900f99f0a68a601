"""One command for all: `gemma-grpo COMMAND ...` is `python -m launch.COMMAND ...`."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from launch.exits import EXIT_MISTAKE

COMMANDS = {
    "train": "start or resume a run",
    "doctor": "whether this host can run a configuration, and what is missing",
    "plan": "what fits and how long it takes; needs no accelerator",
    "data": "show what the model will see",
    "reward": "try reward functions offline, or on recorded rollouts",
    "evaluate": "compare base and tuned policy on the test prompts",
    "runs": "list runs and checkpoints",
    "export": "write the merged model and the adapter of a run",
    "chat": "ask base and tuned policy the same questions",
    "report": "write a run's report, or a comparison of runs, as one HTML page",
    "bench": "measure the project's claims",
}
HELP = "gemma-grpo COMMAND --help describes a command; it is python -m launch.COMMAND."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status, 2 if there is no such command."""
    given = sys.argv[1:] if argv is None else argv
    name = given[0] if given else ""
    if name in COMMANDS:
        module = "launch.bench.__main__" if name == "bench" else f"launch.{name}"
        status: int = importlib.import_module(module).main(given[1:])
        return status
    lines = [f"  {command:<10}{what}" for command, what in COMMANDS.items()]
    shown = "\n".join(["usage: gemma-grpo COMMAND ...", "", *lines, "", HELP])
    if name in {"-h", "--help"}:
        print(shown)
        return 0
    nearest = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"unknown; did you mean {nearest[0]}?" if nearest else f"unknown\n\n{shown}"
    print(f"command line: {name}: {hint}" if name else shown, file=sys.stderr)
    return EXIT_MISTAKE


if __name__ == "__main__":
    sys.exit(main())
