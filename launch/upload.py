"""Collects what a job needs of the user, for launch/submit.sh.

    python -m launch.upload FOLDER CONFIG.toml [--table.key VALUE ...]

writes the configuration with absolute paths to FOLDER/submitted, which `launch.train` reads as it
reads a run folder; copies the modules of the current folder that the configuration's reward
functions need into FOLDER, beside the project's source; and prints the name of the run, which
becomes part of the job's name. Reward functions of files (`file.py:function`) are read where they
are. The source is parsed, not run: imports inside functions are found, imports of computed names
are not. Only Python modules are copied. The dry run in FOLDER that follows reports whether the
functions can be imported there.
"""

from __future__ import annotations

import ast
import importlib.util
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from configs.base import REWARD_FILE
from configs.load import config_to_json, load_config
from launch.exits import EXIT_MISTAKE
from launch.train import parse_command

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("actors", "configs", "launch", "pipeline", "rewards")
"""The project's packages, which are uploaded as a whole."""
JOB_FOLDER = "submitted"
"""Folder of the job's configuration."""


def user_modules(functions: Iterable[str], folder: Path) -> list[Path]:
    """Returns the files of `folder` that define reward functions, and all that they import from it.

    Args:
        functions: as in `rewards.functions`; those of files need no module.
        folder: the first entry of Python's path.

    Raises:
        ValueError: with a line for each module that a job could not import, because a package of
            the project has the same name, or because it is neither in `folder` nor installed.
    """
    places = [function.rpartition(":")[0] for function in functions]
    pending = [place for place in places if not place.endswith(REWARD_FILE)]
    missing = [name for name in pending if not _is_importable(name, folder)]
    mistakes = [
        f"no module {name!r} in {folder} and none installed; submit from the folder that has it, "
        "or install it where Ray runs"
        for name in missing
    ]
    files: dict[Path, None] = {}
    seen = set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        shadowed = _shadowed_file(name, folder)
        if shadowed is not None:
            mistakes.append(
                f"{shadowed} cannot be imported: a package of this project has the same name; "
                "rename it"
            )
            continue
        for file in _files(name, folder):
            if file not in files:
                files[file] = None
                pending += _imports(file, folder)
    if mistakes:
        lines = dict.fromkeys(f"rewards.functions: {mistake}" for mistake in mistakes)
        raise ValueError("\n".join(lines))
    return list(files)


def _is_importable(name: str, folder: Path) -> bool:
    """Whether the top-level package is in `folder`, in the project or installed."""
    top = name.partition(".")[0]
    if not top or top in PACKAGES:
        return True  # the dry run checks the rest of the name
    here = (folder / top).is_dir() or (folder / f"{top}.py").is_file()
    return here or importlib.util.find_spec(top) is not None


def _shadowed_file(name: str, folder: Path) -> Path | None:
    """Returns the user's file that a package of the project shadows; None if there is none."""
    top = name.partition(".")[0]
    if top not in PACKAGES:
        return None
    files = [folder / f"{top}.py"]
    if folder != PROJECT:
        files += _files(name, folder)
    return next((file for file in files if file.is_file()), None)


def _files(name: str, folder: Path) -> Iterator[Path]:
    """Yields the files of a module and of its parent packages that are in `folder`."""
    path = folder
    for part in name.split("."):
        package, module = path / part / "__init__.py", path / f"{part}.py"
        if package.is_file():
            yield package
        elif module.is_file():
            yield module
            return
        path /= part


def _imports(file: Path, folder: Path) -> Iterator[str]:
    """Yields the names that a file imports: modules, and names imported from modules."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # the dry run reports it
    package = file.parent.relative_to(folder).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            parts = [*parents, *([node.module] if node.module else [])]
            yield from (".".join([*parts, alias.name]) for alias in node.names)


def main(argv: Sequence[str]) -> int:
    """Writes the configuration, copies the modules, prints the run's name; returns the status."""
    upload, folder = Path(argv[0]), Path.cwd().resolve()
    try:
        command = parse_command(argv[1:])
        config = load_config(command.path, command.overrides)
    except ValueError:
        return 0  # the dry run reports all mistakes in the configuration
    try:
        files = user_modules([part.function for part in config.rewards.functions], folder)
    except (ValueError, OSError) as mistake:
        print(mistake, file=sys.stderr)
        return EXIT_MISTAKE
    for file in files:
        copy = upload / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    (upload / JOB_FOLDER).mkdir()
    (upload / JOB_FOLDER / "config.json").write_text(config_to_json(config), encoding="utf-8")
    print(config.run.name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
