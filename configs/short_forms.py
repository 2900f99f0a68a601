"""What a short configuration leaves out: short forms of values, and what file and machine imply."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.base import absolute_input
from configs.evaluation import EXACT_ANSWER, WEIGHTED_SUM
from configs.machine import Machine, nvidia_gpus, this_machine
from configs.settings import Setting, find_setting
from configs.task import OVERLONG, REWARD_METRICS

KeyPath = tuple[str | int, ...]

_REWARD = "rewards.functions.N"
_TAKEN = {WEIGHTED_SUM, OVERLONG, *REWARD_METRICS}
"""Names of other rewards and metrics."""
_LONGEST_NAME = 200


def long_form(value: Any, base: Path, path: KeyPath = ()) -> Any:
    """The settings at `path` without short forms, and with absolute paths of what a run reads.

    `"my.csv"` is `{ path = "my.csv" }` for a source, `0.1` a share and 0 no split, and
    `"my.py:short"` the reward of this function, with its name if that is free. Settings may be
    invalid.
    """
    setting = find_setting(path) if path else None
    if setting is not None:
        value = _without_short_form(value, setting)
    if isinstance(value, Mapping):
        return {key: long_form(item, base, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [long_form(item, base, (*path, n)) for n, item in enumerate(value)]
    if setting is None or not isinstance(value, str) or "input" not in setting.node:
        return value
    try:
        return absolute_input(value, setting.node["input"], base)
    except ValueError:
        return value  # the validation reports it


def _without_short_form(value: Any, setting: Setting) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    kind = "string" if isinstance(value, str) else "number" if is_number else ""
    key = setting.node.get("short", {}).get(kind)
    if key is not None:
        value = None if value == 0 and setting.optional else {key: value}
    if setting.path == _REWARD and isinstance(value, Mapping) and "name" not in value:
        name = str(value.get("function", "")).rpartition(":")[2].strip("_")
        name = "correct" if name == EXACT_ANSWER else f"{name}_function" if name in _TAKEN else name
        return {"name": name, **value} if name else value
    return value


def completed(tree: Mapping[str, Any], *, name: str) -> tuple[dict[str, Any], list[str]]:
    """The settings with those that file name and machine imply, and what was assumed, in words."""
    tree = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
    run, plan, model = tree.setdefault("run", {}), tree.setdefault("plan", {}), tree.get("model")
    if isinstance(run, dict):
        run.setdefault("name", slug(name))
    assumed = []
    if isinstance(plan, dict):
        if plan.get("platform", "auto") == "auto":
            assumed.append(_add_machine(plan))
        elif plan["platform"] == "gpu" and "gpu" not in plan:
            machine = nvidia_gpus()
            if said := _add_card(plan, machine).removeprefix(", "):
                assumed.append(f"{said}: this machine has {machine.why}")
        if plan["platform"] == "cpu" and isinstance(model, dict):
            model.setdefault("dtype", "float32")
    return tree, assumed


def slug(name: str) -> str:
    """A name for a run that is like `name`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-_.")[:_LONGEST_NAME] or "run"


def _add_machine(plan: dict[str, Any]) -> str:
    """Adds the devices of this machine; says so."""
    machine = this_machine()
    plan["platform"] = machine.platform
    if plan.get("placement") != "split":
        plan.setdefault("learner_devices", machine.devices)
    count = plan.get("learner_devices", 1)
    return (
        f'plan.platform = "auto" is "{machine.platform}" with plan.learner_devices = {count}'
        f"{_add_card(plan, machine)}: this machine has {machine.why}"
    )


def _add_card(plan: dict[str, Any], machine: Machine) -> str:
    """Adds kind and memory of this machine's NVIDIA GPU; says so."""
    if machine.platform != "gpu":
        return ""
    plan.setdefault("gpu", machine.gpu)
    if machine.hbm_gib is not None:
        plan.setdefault("hbm_gib", machine.hbm_gib)
    if plan["gpu"] is not None:
        said = f', plan.gpu = "{plan["gpu"]}"'
    else:
        said = ", no plan.gpu (plans assume the speed of a known one with as much memory)"
    return said + (f", plan.hbm_gib = {plan['hbm_gib']}" if "hbm_gib" in plan else "")
