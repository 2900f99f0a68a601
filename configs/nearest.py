"""Suggestions for mistakes: the nearest key, the nearest valid value."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from contextlib import suppress

from configs.alarms import THRESHOLDS
from configs.settings import INDEX, Setting, setting_parts, settings, settings_by_path, tables
from configs.toml_text import show_value

_TYPO_RATIO = 0.9
"""Similarity above which a key of the same name is the only suggestion."""


def nearest_value(setting: Setting, value: object) -> str | None:
    """The valid value nearest to `value` as TOML, or in words; None if none is near."""
    node = setting.node
    if setting.type in {"integer", "number"} and isinstance(value, str):
        with suppress(ValueError):
            value = float(value)  # in quotes
    choices = node.get("enum", [node["const"]] if "const" in node else [])
    if value == "ppo" and "grpo" in choices:  # its clipped ratio is that of PPO
        return show_value("grpo")
    by_name = {str(choice).lower(): choice for choice in choices}
    for name in difflib.get_close_matches(str(value).lower(), by_name, n=1, cutoff=0.5):
        return show_value(by_name[name])
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
        return None
    if value <= node.get("exclusiveMinimum", -math.inf):
        return f"just above {show_value(node['exclusiveMinimum'])}"
    if value >= node.get("exclusiveMaximum", math.inf):
        return f"just below {show_value(node['exclusiveMaximum'])}"
    near = min(max(value, node.get("minimum", -math.inf)), node.get("maximum", math.inf))
    if setting.type == "integer":
        return show_value(round(near))
    return show_value(float(near)) if setting.type == "number" else None


def nearest_keys(path: Sequence[str | int]) -> list[str]:
    """Up to three dotted keys that the user may have meant by `path`, most likely first.

    In this order: keys of the same name in other tables, keys of the same table that are longer
    or similar, similar paths. The names of alarms are values of keys.
    """
    indices = [str(part) for part in path if str(part).isdecimal()]
    parts = setting_parts(path)
    leaf = parts[-1].replace("-", "_")
    if parts[0] == "alarms" and leaf in THRESHOLDS:
        return ["alarms.stop", "alarms.off"]
    whole = ".".join(parts)
    all_paths = [setting.path for setting in (*tables(), *settings())]
    same_name = [key for key in all_paths if key.rpartition(".")[2] == leaf]
    same_name = difflib.get_close_matches(whole, same_name, n=3, cutoff=0.0)
    if difflib.get_close_matches(whole, same_name, n=1, cutoff=_TYPO_RATIO):
        same_name = same_name[:1]
    parent = settings_by_path().get(".".join(parts[:-1]))
    siblings = parent.children() if parent and parent.type == "object" else ()
    names = {setting.path.rpartition(".")[2]: setting.path for setting in siblings}
    longer = [name for name in names if name.startswith(f"{leaf}_")][:1]
    near = longer or difflib.get_close_matches(leaf, names, n=1, cutoff=0.75)
    similar = [names[name] for name in near]
    # In an existing table, the shared table name makes every path similar.
    close = difflib.get_close_matches(whole, all_paths, n=1, cutoff=0.75)
    found = same_name or similar or ([] if names else close)
    return [_with_indices(key, indices) for key in found]


def _with_indices(key: str, indices: Sequence[str]) -> str:
    left = iter(indices)
    return ".".join(next(left, "0") if part == INDEX else part for part in key.split("."))
