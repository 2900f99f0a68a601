"""Whether a PEFT adapter fits a policy, and the adapter under the policy's names if it does."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from configs.schema import Lora
from pipeline.compute.model.peft_folder import PeftAdapter, named
from pipeline.compute.model.policy import Policy
from pipeline.compute.model.projections import Pair, Place, from_pairs, pair_shapes, rank_needed


def fit(found: PeftAdapter, policy: Policy) -> dict[str, np.ndarray]:
    """A PEFT adapter in the policy's shapes; what it adds to the base is the same.

    Raises:
        ValueError: listing what does not fit the base or the settings of the adapter.
    """
    shapes = {name: shape.shape for name, shape in policy.adapter_shapes.items()}
    problems = _scale_problems(found, policy.lora)
    fitting: dict[str, np.ndarray] = {}
    known: set[Place] = set()
    for matrix in (name.removesuffix("_lora_a") for name in shapes if name.endswith("_lora_a")):
        a, b = shapes[f"{matrix}_lora_a"], shapes[f"{matrix}_lora_b"]
        wanted = pair_shapes(matrix, a, b)
        known |= wanted.keys()
        pairs = {place: found.pairs[place] for place in wanted if place in found.pairs}
        wrong = _matrix_problems(matrix, pairs, wanted, room=b[0], rank=policy.lora.rank)
        problems += wrong
        if not wrong:
            both = from_pairs(matrix, pairs, a=a, b=b)
            fitting |= {f"{matrix}_lora_{half}": x for half, x in zip("ab", both, strict=True)}
    targets = policy.lora.targets
    problems += [
        f"surplus: {named(place)}, which lora.targets = {targets!r} does not adapt in this base"
        for place in sorted(found.pairs.keys() - known)
    ]
    if problems:
        lines = "\n  ".join(problems)
        raise ValueError(f"lora.start: {found.folder} does not fit:\n  {lines}")
    return fitting


def _matrix_problems(
    matrix: str,
    pairs: Mapping[Place, Pair],
    wanted: Mapping[Place, tuple[int, int]],
    *,
    room: int,
    rank: int,
) -> list[str]:
    """What keeps these projections out of a matrix that has this room."""
    if not pairs:
        missing = " and ".join(named(place) for place in wanted)
        return [f"missing: {missing}, which lora.targets adapts"]
    problems = []
    for place, (a, b) in pairs.items():
        found, base = (a.shape[1], b.shape[0]), wanted[place]
        if found != base:
            problems.append(
                f"shape of {named(place)}: from {found[0]} to {found[1]}, in the base "
                f"from {base[0]} to {base[1]}"
            )
        if a.shape[0] not in {rank, room}:
            problems.append(f"rank of {named(place)}: {a.shape[0]}, lora.rank is {rank}")
    if not problems and rank_needed(list(pairs.values())) > room:
        problems.append(
            f"lora_A of the projections in {matrix} differ; room for that is made only where "
            "lora.start names such an adapter"
        )
    return problems


def _scale_problems(found: PeftAdapter, settings: Lora) -> list[str]:
    scales = sorted({found.scale(place) for place in found.pairs})
    if all(math.isclose(scale, settings.scale, rel_tol=1e-6) for scale in scales):
        return []
    rank = settings.rank
    alpha = scales[0] * (math.sqrt(rank) if settings.scaling == "rslora" else rank)
    what = (
        f"scale: it was trained with {', '.join(f'{scale:g}' for scale in scales)}; lora.alpha = "
        f"{settings.alpha:g}, lora.rank = {rank} and lora.scaling = {settings.scaling!r} make "
        f"{settings.scale:g}; nearest valid: lora.alpha = {alpha:g}"
    )
    return [what]
