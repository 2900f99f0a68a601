"""What launch/submit.sh uploads of the user's own: reward modules and the modules they import.

    python -m launch.upload FOLDER CONFIG.toml [--table.key VALUE ...]

copies into FOLDER, beside the project's source, the modules of the current folder that the
configuration's reward functions need, and prints the name of the run, which the job's names carry.
The modules' source is read, not run: imports inside functions are found, imports of computed names
are not. Files that are no Python modules are not copied. The dry run in FOLDER that follows tells
whether the functions can be imported there.
"""

from __future__ import annotations

import ast
import importlib.util
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from configs.load import load_config
from launch.exits import EXIT_MISTAKE
from launch.train import parse_command

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("actors", "configs", "launch", "pipeline", "rewards")
"""The project's own packages, which are uploaded whole."""


def user_modules(functions: Iterable[str], folder: Path) -> list[Path]:
    """Files of `folder` that define reward functions, and those of all that they import from it.

    Args:
        functions: as `rewards.functions` names them, module:function.
        folder: the first one on Python's path.

    Raises:
        ValueError: with a line for each module that a job could not import: it has the name of a
            package of the project, or it is neither in `folder` nor installed.
    """
    waiting = [function.partition(":")[0] for function in functions]
    missing = [name for name in waiting if not _can_be_found(name, folder)]
    mistakes = [
        f"no module {name!r} in {folder} and none installed; submit from the folder that it is in, "
        "or install it where Ray runs"
        for name in missing
    ]
    files: dict[Path, None] = {}
    seen = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        clash = _clash(name, folder)
        if clash is not None:
            what = "a package of this project has the same name; rename it"
            mistakes.append(f"{clash} cannot be imported: {what}")
            continue
        for file in _files(name, folder):
            if file not in files:
                files[file] = None
                waiting += _imports(file, folder)
    if mistakes:
        lines = dict.fromkeys(f"rewards.functions: {mistake}" for mistake in mistakes)
        raise ValueError("\n".join(lines))
    return list(files)


def _can_be_found(name: str, folder: Path) -> bool:
    """Whether the first part of a module's name is in `folder`, ours or installed."""
    top = name.partition(".")[0]
    if not top or top in PACKAGES:
        return True  # whether the rest of the name is right the dry run tells
    here = (folder / top).is_dir() or (folder / f"{top}.py").is_file()
    return here or importlib.util.find_spec(top) is not None


def _clash(name: str, folder: Path) -> Path | None:
    """The user's file in the place of a package of the project, if this is what is imported."""
    top = name.partition(".")[0]
    if top not in PACKAGES:
        return None
    files = [folder / f"{top}.py"]
    if folder != PROJECT:
        files += _files(name, folder)
    return next((file for file in files if file.is_file()), None)


def _files(name: str, folder: Path) -> Iterator[Path]:
    """Those of a module and of the packages that it is in, as far as they are in `folder`."""
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
    """Names of what a file may import; some are no modules but what is imported from them."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # the dry run tells
    package = file.parent.relative_to(folder).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            parts = [*above, *([node.module] if node.module else [])]
            yield from (".".join([*parts, alias.name]) for alias in node.names)


def main(argv: Sequence[str]) -> int:
    """Copies the modules and prints the run's name; returns the exit status."""
    upload, folder = Path(argv[0]), Path.cwd().resolve()
    try:
        command = parse_command(argv[1:])
        config = load_config(command.path, command.overrides)
    except ValueError:
        return 0  # the dry run tells all that is wrong with the configuration
    try:
        files = user_modules([part.function for part in config.rewards.functions], folder)
    except (ValueError, OSError) as mistake:
        print(mistake, file=sys.stderr)
        return EXIT_MISTAKE
    for file in files:
        copy = upload / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    print(config.run.name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
