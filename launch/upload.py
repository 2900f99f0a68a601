"""Writes the configuration of a job, for launch/submit.sh.

    python -m launch.upload FOLDER CONFIG.toml [--table.key VALUE ...]

writes it with absolute paths to FOLDER/submitted, which `launch.train` reads as it reads a run
folder, and prints the name of the run, which becomes part of the job's name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from configs.load import config_to_json, load_config
from launch.train import parse_command

SUBMITTED = "submitted"
"""Folder of the job's configuration."""


def main(argv: Sequence[str]) -> int:
    """Writes the configuration and prints the run's name; returns the exit status."""
    try:
        command = parse_command(argv[1:])
        config = load_config(command.path, command.overrides)
    except ValueError:
        return 0  # the dry run reports all mistakes in the configuration
    folder = Path(argv[0]) / SUBMITTED
    folder.mkdir()
    (folder / "config.json").write_text(config_to_json(config), encoding="utf-8")
    print(config.run.name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
