"""Caches measured speeds for the next run of the same programs on the same machine.

There is one file per machine, versions, sources and settings that a speed depends on. The key does
not contain the devices, because the control plane opens none: the reader checks that the devices
are the same and equally fast.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.contracts.builds import cores
from pipeline.contracts.cache_folder import cache_folder, read_cached_json, write_cached_json
from pipeline.contracts.programs import devices_of
from pipeline.contracts.sizes import sized
from pipeline.contracts.speeds import Speeds
from pipeline.plan.compiler import sources, versions
from pipeline.plan.cost_model.programs import depends_on
from pipeline.plan.search.fitting import PlanCase
from pipeline.plan.size_choice import smallest_sizes

_OF_PLAN = ("placement", "samplers", "platform", "prompt_buckets", "prefill_tokens", "hbm_gib")


def load_speeds(case: PlanCase) -> Speeds | None:
    """The cached speeds of a run's programs, if there are any."""
    content = read_cached_json(_file(_key(case)))
    if content is None:
        return None
    try:
        return Speeds.of_json(content.get("speeds"))
    except ValueError:  # written by another version
        return None


def save_speeds(case: PlanCase, speeds: Speeds) -> None:
    """Replaces the cached speeds; does nothing if the cache folder is not writable."""
    key = _key(case)
    write_cached_json(_file(key), {"speeds": speeds.to_json(), "key": key})


def _key(case: PlanCase) -> dict[str, Any]:
    """Everything that speeds depend on except the devices, as JSON values."""
    config = case.config
    small = sized(config, smallest_sizes(config))
    programs = (
        "segment 1",
        "gradient 1",
        *(["reference_top_k 1"] if config.learner.uses_reference_top_k else []),
    )
    plan = config.plan.model_dump(mode="json")
    return {
        "machine": machine(),
        "versions": versions(),
        "sources": {which: sources(which) for which in ("sampler", "learner")},
        "programs": {name: depends_on(small, case.shape, name) for name in programs},
        "devices": {name: vars(devices_of(small, name)) for name in programs},
        "plan": {name: plan[name] for name in _OF_PLAN},
        "prompts": list(config.prompt_buckets),
    }


@cache
def machine() -> dict[str, Any]:
    """The host's processor and number of cores."""
    return {"processor": _processor(), "cores": cores()}


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    names = [line.partition(":")[2] for line in text.splitlines() if line.startswith("model name")]
    return names[0].strip() if names else platform.machine()


def _file(key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder("calibration") / f"{digest}.json"
