"""Finds the function or class of a reward by its name: `file.py:name` or `module:name`.

Importing a user's code may run anything, so that this happens in reward processes only.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import pkgutil
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from rewards.base import describe_error

_ROOT = Path(__file__).resolve().parents[1]


def resolve(function: str) -> object:
    """Imports what `function` names, e.g. `rewards.correctness:exact_answer`.

    A file is loaded under a name of its own, so that it can have the name of another module. What
    lies beside it can be imported, unless another module has the same name.

    Raises:
        ValueError: if there is no such file, module or function (with the nearest name), or if
            importing it fails.
    """
    place, _, name = function.rpartition(":")
    if not place or not name:
        raise ValueError("is not of the form file.py:function or module:function")
    module = _load(Path(place)) if place.endswith(".py") else _import(place)
    found = getattr(module, name, None)
    if found is None:
        known = [key for key, value in vars(module).items() if callable(value)]
        raise ValueError(f"{place} has no {name!r}{_nearest(name, known, place)}")
    return found


def source_sha256(function: str) -> str | None:
    """Hash of the source of what `function` names, after `resolve`; None if there is none.

    Of a file it covers what has been imported from its folder, too; of a module its own file.
    """
    place = function.rpartition(":")[0]
    if place.endswith(".py"):
        folder = _file(Path(place)).parent
        loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        paths = {Path(path) for path in loaded if path and Path(path).is_relative_to(folder)}
    else:
        own = sys.modules[place].__file__
        paths = {Path(own)} if own else set()
    content = b"".join(path.read_bytes() for path in sorted(paths))
    return hashlib.sha256(content).hexdigest() if paths else None


def uploaded(path: Path, root: Path = _ROOT) -> Path:
    """Where a job has a user's file: its path on the host that submitted, below the job's root."""
    absolute = path.absolute()
    return root / "submitted" / "files" / absolute.relative_to(absolute.anchor)


def _file(path: Path) -> Path:
    """The file to load: in a job its copy, as it was when the job was submitted."""
    copy = uploaded(path)
    return copy if copy.is_file() else path.absolute()


def _load(path: Path) -> ModuleType:
    """The module of a file."""
    file = _file(path)
    if not file.is_file():
        folder = path.parent
        beside = [one.name for one in folder.glob("*.py")] if folder.is_dir() else []
        raise ValueError(f"no file {path}{_nearest(path.name, beside, str(folder))}")
    name = f"reward_file_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Last, so that a file beside it never hides a module of the project or of a library.
    sys.path.append(str(file.parent))
    sys.modules[name] = module  # pickling and dataclasses look there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise ValueError(f"importing {path} raises {describe_error(error)}") from error
    return module


def _import(module_name: str) -> ModuleType:
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{module_name}.".startswith(f"{missing}."):
            raise ValueError(f"{module_name} needs {missing!r}: {error}") from error
    except BaseException as error:
        raise ValueError(f"importing {module_name} raises {describe_error(error)}") from error
    parent, _, last = missing.rpartition(".")
    beside = pkgutil.iter_modules(getattr(sys.modules.get(parent), "__path__", ()))
    file = f"{module_name.replace('.', '/')}.py:function"
    hint = _nearest(last, [module.name for module in beside], parent)
    raise ValueError(
        f"no module {missing!r}{hint or f'; name a file of yours by its path: {file}'}"
    )


def _nearest(name: str, known: list[str], where: str) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; nearest in {where}: {nearest[0]!r}" if nearest else ""
