"""Names the version of a policy: RUN_DIR, RUN_DIR@STEP, RUN_DIR@best, RUN_DIR@last, an export.

`launch.evaluate`, `launch.chat` and `launch.export` take such a name, and `run.fork` all but an
export. RUN_DIR alone is the best version by validation if there is one, otherwise the last.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.base import home, nearest_hint
from configs.load import load_config, read_saved_config
from configs.overrides import Override
from configs.schema import Config
from launch.exits import say
from pipeline.run.checkpoint_files import BEST, best_version, read_checkpoints
from pipeline.run.run_folder import RunFolder

METAVAR = "RUN_DIR[@STEP|@best|@last]"
MEANING = (
    "a run folder and the version of its policy: a step, the best by validation, or the last "
    "(default: the best if there is one, otherwise the last); or the export in a run folder"
)
LAST = "last"
_VERSION = re.compile(r"(?P<run>.+)@(?P<version>\d+|best|last)")


@dataclass(frozen=True)
class Version:
    """A version of a run's policy: `adapter` is the folder of a checkpoint, or an export."""

    run: Path
    adapter: Path

    def config(self, overrides: Sequence[Override] = ()) -> Config:
        """The run's settings; the folder may have been moved since the run.

        Raises:
            ConfigError: if they cannot be read, or the overrides have mistakes.
        """
        config = load_config(self.run, overrides)
        path = self.run.resolve()
        run = config.run.model_copy(update={"dir": str(path.parent), "name": path.name})
        return config.model_copy(update={"run": run})


def read_policy(name: str, overrides: Sequence[Override]) -> tuple[Config, Version | None]:
    """The settings of a policy, with the placement of its run, and its version.

    A TOML file stands for its base, which has no version.

    Raises:
        ConfigError: if the settings have mistakes.
        FileNotFoundError: as `find_version`.
        ValueError: as `find_version`.
    """
    # Imported late: `--help` does not need it, and it imports this module.
    from launch.preparation import placed

    if Path(name).suffix == ".toml":
        return placed(load_config(name, overrides, say=say)), None
    version = find_version(name)
    return placed(version.config(overrides)), version


def split_version(name: str) -> tuple[Path, str | None]:
    """The folder in a version's name, and the step, `best` or `last`; None: not given."""
    match, folder = _VERSION.fullmatch(name), home() / Path(name).expanduser()
    if match is None or folder.exists():
        return folder, None
    return home() / Path(match["run"]).expanduser(), match["version"]


def find_version(name: str) -> Version:
    """Finds a version by its name.

    Raises:
        FileNotFoundError: if there is no such folder, or no such version; names those that exist.
        ValueError: if the folder is neither a run's nor an export in one.
    """
    folder, which = split_version(name)
    if not folder.is_dir():
        hint = nearest_hint(folder)
        if not hint and "@" in name:
            hint = "; after @ comes a step, best or last"
        raise FileNotFoundError(f"command line: no folder {folder}{hint}")
    if _is_run(folder):
        return Version(folder, find_checkpoint(folder, which))
    if which is None and (folder / "adapter").is_dir() and _is_run(folder.parent):
        return Version(folder.parent, folder)
    raise ValueError(
        f"command line: {folder} is no run folder and no export in one; as a base, give a "
        f"configuration with --model.path {folder}"
    )


def _is_run(folder: Path) -> bool:
    """Whether the folder has a run's `config.json`; that of a model has no settings of a run."""
    file = folder / "config.json"
    return file.exists() and "rollout" in read_saved_config(file)


def find_checkpoint(run: Path, which: str | None) -> Path:
    """The folder of one of a run's checkpoints.

    `which` is `best` (by validation), `last`, or a step; None: the best if there is one, otherwise
    the last.

    Raises:
        FileNotFoundError: naming the existing checkpoints.
    """
    folder = RunFolder(run).checkpoints
    found = {str(one.step): one.path for one in read_checkpoints(folder)}
    last = next(reversed(found.values()), None)
    if best_version(folder) is not None:
        found[BEST] = folder / BEST
    if last is not None:
        found[LAST] = last
    which = which or (BEST if BEST in found else LAST)
    if which in found:
        return found[which]
    existing = f"there are {', '.join(found)}" if found else "there is none yet"
    raise FileNotFoundError(f"{run} has no checkpoint {which}; {existing}")
