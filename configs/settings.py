"""The schema as a list of dotted keys, with the allowed values of each in words.

Derived from the JSON schema that pydantic generates for `configs.schema`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from configs.base import OnResume
from configs.schema import Config
from configs.toml_text import show_value

INDEX = "N"
"""Placeholder of a list index in a setting's path, e.g. `rewards.functions.N.weight`."""


@dataclass(frozen=True)
class Setting:
    """Schema of one dotted key: a value, a list or a table.

    Attributes:
        path: the dotted key, with `N` for a list index.
        node: its JSON schema, references resolved. Keys of ours are `implied` (what the value is
            if it is not set, in words), `short` (the key that a value in place of a table has, by
            its type), `input` (the kind of a path) and `words` (a pattern).
        type: `integer`, `number`, `string`, `boolean`, `array` or `object` (a table); `any` below
            a table of free keys.
        default: the default value; None if there is none.
        description: of the field.
        optional: whether it may be unset without a default (`none` unsets it).
        required: whether it must be set.
        on_resume: what a change means for a resume, by itself or by its table; see `configs.base`.
    """

    path: str
    node: Mapping[str, Any]
    type: str
    default: object
    description: str
    optional: bool
    required: bool
    on_resume: OnResume

    @property
    def has_free_keys(self) -> bool:
        """Whether it is a table whose keys are the user's."""
        return self.node.get("additionalProperties") is True

    @property
    def allowed(self) -> str:
        """The allowed values in words: type, bounds, choices."""
        return _allowed(self.node)

    def children(self) -> Iterator[Setting]:
        """The keys of a table, or the element of a list; empty for a plain value."""
        needed = self.node.get("required", ())
        inner = {
            key: (node, key in needed) for key, node in self.node.get("properties", {}).items()
        }
        if "items" in self.node:
            inner[INDEX] = (self.node["items"], True)
        for key, (node, required) in inner.items():
            path = f"{self.path}.{key}" if self.path else key
            yield _setting(path, node, required=required, on_resume=self.on_resume)


def find_setting(path: Sequence[str | int]) -> Setting | None:
    """The setting at `path`, where integers and digits are list indices; None if there is none.

    Every key below a table of free keys, such as `rewards.functions.N.args`, is a setting.
    """
    if INDEX in path:
        return None
    parts = setting_parts(path)
    key = ".".join(parts)
    if key in settings_by_path():
        return settings_by_path()[key]
    for end in range(1, len(parts)):
        table = settings_by_path().get(".".join(parts[:end]))
        if table is not None and table.has_free_keys:
            free: dict[str, Any] = {"type": "any"}
            return replace(table, path=key, node=free, **free, optional=True, required=False)
    return None


def setting_parts(path: Sequence[str | int]) -> list[str]:
    """The parts of `path` with `N` in place of each index."""
    return [INDEX if str(part).isdecimal() else str(part) for part in path]


def settings() -> tuple[Setting, ...]:
    """All keys that have a value, in the schema's order: tables if one may stand in their place."""
    return tuple(
        setting
        for setting in settings_by_path().values()
        if (setting.type != "object" or setting.has_free_keys or "short" in setting.node)
        and not setting.path.endswith(f".{INDEX}")
    )


def tables() -> tuple[Setting, ...]:
    """The top-level tables, in the schema's order."""
    return tuple(_root().children())


@cache
def settings_by_path() -> dict[str, Setting]:
    """All keys, tables and list elements of the schema, by path."""

    def below(setting: Setting) -> Iterator[Setting]:
        for child in setting.children():
            yield child
            yield from below(child)

    return {setting.path: setting for setting in below(_root())}


def _root() -> Setting:
    return _setting("", _schema(), required=True)


@cache
def _schema() -> dict[str, Any]:
    return Config.model_json_schema()


def _setting(
    path: str, node: Mapping[str, Any], *, required: bool, on_resume: OnResume = "alters"
) -> Setting:
    optional = False
    while "$ref" in node or "anyOf" in node:
        rest = {key: value for key, value in node.items() if key not in {"$ref", "anyOf"}}
        if "$ref" in node:
            node = {**_schema()["$defs"][node["$ref"].rpartition("/")[2]], **rest}
        else:
            # All unions of the schema are unions with null.
            optional = True
            (kind,) = (option for option in node["anyOf"] if option != {"type": "null"})
            node = {**kind, **rest}
    return Setting(
        path,
        node,
        type=node["type"],
        default=node.get("default"),
        description=node.get("description", ""),
        optional=optional,
        required=required and "implied" not in node,
        on_resume=node.get("on_resume", on_resume),
    )


_NOUNS = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "object": "a table",
}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def _allowed(node: Mapping[str, Any]) -> str:
    if "const" in node:
        return show_value(node["const"])
    if "enum" in node:
        return f"one of {', '.join(map(show_value, node['enum']))}"
    if "short" in node:
        return f"a table, or its {' or '.join(node['short'].values())}"
    if node.get("type") == "array":
        element = _allowed(_setting("", node["items"], required=True).node)
        return f"a list{', not empty' if node.get('minItems') else ''}; each element: {element}"
    bounds = [f"{word} {show_value(node[key])}" for key, word in _BOUNDS.items() if key in node]
    words = _NOUNS[node["type"]]
    words += f" {node['words']}" if "words" in node else ""
    words += ", not empty" if node.get("minLength") else ""
    words += f", at most {node['maxLength']} characters" if "maxLength" in node else ""
    return words + (f", {' and '.join(bounds)}" if bounds else "")
