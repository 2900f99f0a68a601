"""Imports the reward functions of a configuration by their names `module:function`.

    python -m rewards.resolve MODULE:FUNCTION ...

writes a line for each function that cannot be imported, and exits with status 1 if there is one.
"""

from __future__ import annotations

import difflib
import pkgutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from types import ModuleType

from rewards.base import RewardFunction, describe_error


def resolve(function: str) -> RewardFunction:
    """Imports `function`, e.g. `rewards.correctness:exact_answer`.

    Raises:
        ValueError: if there is no such module or function (with the nearest name), if importing
            the module fails, or if the object is not callable.
    """
    module_name, _, name = function.partition(":")
    if not module_name or not name:
        raise ValueError(f"{function!r} is not of the form module:function")
    module = _import(module_name, function=function)
    found = getattr(module, name, None)
    if found is None:
        known = [key for key, value in vars(module).items() if _is_public_function(key, value)]
        raise ValueError(
            f"{function!r}: {module_name} has no {name!r}{_nearest(name, known, module_name)}"
        )
    if not callable(found):
        raise ValueError(f"{function!r} is of type {type(found).__name__}, not a function")
    resolved: RewardFunction = found
    return resolved


def _import(module_name: str, *, function: str) -> ModuleType:
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{module_name}.".startswith(f"{missing}."):
            raise ValueError(f"{function!r}: {module_name} needs {missing!r}: {error}") from error
    except BaseException as error:
        raise ValueError(
            f"{function!r}: importing {module_name} raises {describe_error(error)}"
        ) from error
    parent, _, last = missing.rpartition(".")
    paths = getattr(import_module(parent), "__path__", ()) if parent else None
    known = [module.name for module in pkgutil.iter_modules(paths)]
    where = parent or "Python's path"
    raise ValueError(f"{function!r}: no module {missing!r}{_nearest(last, known, where)}")


def _is_public_function(name: str, value: object) -> bool:
    return callable(value) and not name.startswith("_") and not isinstance(value, type)


def _nearest(name: str, known: list[str], where: str) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; nearest in {where}: {nearest[0]!r}" if nearest else ""


def _main(functions: Sequence[str]) -> int:
    mistakes = []
    with redirect_stdout(sys.stderr):  # keeps output of imported modules apart from the mistakes
        for function in functions:
            try:
                resolve(function)
            except ValueError as error:
                mistakes.append(" ".join(str(error).split()))
    sys.stdout.writelines(f"{mistake}\n" for mistake in mistakes)
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
