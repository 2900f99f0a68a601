"""Exports the trained policy as a Hugging Face folder, and proves it by loading it back."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipeline.datatypes import Completion, ExportReport
from pipeline.learner.learner import Learner
from pipeline.model import lora, save
from pipeline.model.policy import Params, Policy

BOUND = {"float32": 1e-4, "bfloat16": 0.25}
"""Largest log-prob difference between policy and export; merging rounds to the base's type."""


def merged(policy: Policy, base: Params, adapter: Params) -> dict[str, np.ndarray]:
    """Base plus adapter in host memory, in the base's type."""
    params = {}
    for name, value in base.items():
        change = lora.delta(name, adapter, lora=policy.lora)
        whole = value if change is None else (value + change).astype(value.dtype)
        params[name] = np.asarray(whole)
    return params


def export(
    learner: Learner,
    folder: Path,
    *,
    like: Path,
    examples: Sequence[Completion],
    adapter: Params | None = None,
) -> ExportReport:
    """Writes the merged model, reloads it, compares log-probs, and only then puts it in place.

    Args:
        learner: whose base is merged with the adapter.
        folder: where the export will be; one that is there already is replaced.
        like: the folder the base came from.
        examples: completions whose log-probs are compared.
        adapter: what is exported; None: the learner's current one.

    Raises:
        RuntimeError: if the reloaded export scores tokens differently; `folder` is left as it was.
    """
    policy, adapter = learner.policy, adapter or learner.state.adapter
    fresh = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save.save_folder(fresh, merged(policy, learner.base, adapter), like=like)
    reloaded = learner.score(examples, adapter=policy.no_adapter(), base=policy.load_base(fresh))
    trained = learner.score(examples, adapter=adapter)
    difference = float(np.abs(np.concatenate(reloaded) - np.concatenate(trained)).max())
    dtype = str(Policy.embedding(learner.base).dtype)
    if not difference <= BOUND[dtype]:
        raise RuntimeError(
            f"the export in {fresh} scores tokens differently from the policy: "
            f"{difference:.3g}, allowed {BOUND[dtype]:g}"
        )
    old = folder.with_name(folder.name + ".old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    return ExportReport(str(folder), difference, sum(len(row) for row in trained))
