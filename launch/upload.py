"""The files of a job: the project's source, and what its reward functions need of the user.

The user's source is parsed, not run: imports inside functions are found, imports of computed names
are not. Only Python modules are copied. The dry run among the copies reports whether the functions
can be imported there.
"""

from __future__ import annotations

import ast
import importlib.util
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from configs.base import REWARD_FILE
from rewards.resolve import uploaded

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("actors", "configs", "launch", "pipeline", "rewards")
"""The project's packages, which are uploaded as a whole."""


def copy_source(upload: Path) -> None:
    """Copies the project's source and presets."""
    for package in PACKAGES:
        for pattern in ("*.py", "*.toml"):
            for file in (PROJECT / package).rglob(pattern):
                _copy(file, upload / file.relative_to(PROJECT))


def copy_user_files(functions: Collection[str], folder: Path, upload: Path) -> None:
    """Copies what the reward functions import: `user_modules`, and `reward_files`.

    Raises:
        ValueError: see `user_modules`.
    """
    files = reward_files(functions)
    for file in user_modules(functions, folder.resolve()):
        _copy(file, upload / file.relative_to(folder.resolve()))
    for file in files:
        _copy(file, uploaded(file, upload))


def _copy(file: Path, copy: Path) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, copy)


def reward_files(functions: Iterable[str]) -> list[Path]:
    """Returns the files of functions `file.py:name`, and all that they import from their folders.

    A module of the project comes before one of the same name beside the file.
    """
    found: dict[Path, None] = {}
    for file in _named_files(functions):
        found[file] = None
        names = [name for name in _imports(file, file.parent) if _top(name) not in PACKAGES]
        found |= dict.fromkeys(_with_imports(names, file.parent)[0])
    return list(found)


def user_modules(functions: Iterable[str], folder: Path) -> list[Path]:
    """Returns the files of `folder` that define reward functions, and all that they import from it.

    Args:
        functions: as in `rewards.functions`; of those in files, the imports.
        folder: the first entry of Python's path.

    Raises:
        ValueError: with a line for each module that a job could not import, because a package of
            the project has the same name, or because it is neither in `folder` nor installed.
    """
    functions = list(functions)
    places = [function.rpartition(":")[0] for function in functions]
    modules = [place for place in places if not place.endswith(REWARD_FILE)]
    mistakes = [
        f"no module {name!r} in {folder} and none installed; submit from the folder that has it, "
        "or install it where Ray runs"
        for name in modules
        if not _is_importable(name, folder)
    ]
    imported = [name for file in _named_files(functions) for name in _imports(file, file.parent)]
    names = [*modules, *(name for name in imported if _top(name) not in PACKAGES)]
    files, shadowed = _with_imports(names, folder)
    mistakes += [
        f"{file} cannot be imported: a package of this project has the same name; rename it"
        for file in shadowed
    ]
    if mistakes:
        lines = dict.fromkeys(f"rewards.functions: {mistake}" for mistake in mistakes)
        raise ValueError("\n".join(lines))
    return files


def _named_files(functions: Iterable[str]) -> Iterator[Path]:
    """Yields the files of functions `file.py:name`; the dry run reports those that are missing."""
    places = dict.fromkeys(function.rpartition(":")[0] for function in functions)
    files = (Path(place) for place in places if place.endswith(REWARD_FILE))
    return (file for file in files if file.is_file())


def _with_imports(names: Iterable[str], folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of modules in `folder` and of all that they import from it.

    Also files that would be imported if a package of the project had not the same name.
    """
    files: dict[Path, None] = {}
    shadowed, seen, pending = list[Path](), set[str](), list(names)
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if (own := _shadowed_file(name, folder)) is not None:
            shadowed.append(own)
            continue
        for file in _files(name, folder):
            if file not in files:
                files[file] = None
                pending += _imports(file, folder)
    return list(files), shadowed


def _top(name: str) -> str:
    return name.partition(".")[0]


def _is_importable(name: str, folder: Path) -> bool:
    """Whether the top-level package is in `folder`, in the project or installed."""
    top = _top(name)
    if not top or top in PACKAGES:
        return True  # the dry run checks the rest of the name
    here = (folder / top).is_dir() or (folder / f"{top}.py").is_file()
    return here or importlib.util.find_spec(top) is not None


def _shadowed_file(name: str, folder: Path) -> Path | None:
    """Returns the user's file that a package of the project shadows; None if there is none."""
    top = _top(name)
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
