"""Test results of an earlier end of the run; no later end may report less than that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.run.run_folder import ENDED, RunFolder


def earlier_result(folder: RunFolder, name: str, *, adapter: str) -> dict[str, Any] | None:
    """The last result of a test set, before and after; None if it never came to that.

    Args:
        folder: of the run.
        name: of the set.
        adapter: hash of the one that is to be tested. The result of another one names the `step`
            whose it is.
    """
    for entry in reversed(list(folder.events(ENDED))):
        summary = entry["summary"]
        if summary["ended"] != "finished":
            continue
        found = _of_set(summary.get("eval", {}), name)
        if "after" in found:
            if "step" in found or summary["adapter_sha256"] == adapter:
                return found
            return {**found, "step": summary.get("best", {}).get("step", summary["steps"])}
    return None


def _of_set(results: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = results if name == "test" else results.get("sets", {}).get(name, {})
    return {key: value for key, value in found.items() if key != "sets"}
