"""Invariant 1: the sampled policy is the learned policy.

Three checks: log-probs under a random probe adapter at start, hash and version at every sync, and
the mean log-prob difference of every update, whose 99.9th percentile the alarm `disagreement`
watches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.contracts.adapters import Published
from pipeline.contracts.rollouts import Completion, Prompt, RolloutName, RolloutRequest
from pipeline.contracts.workers import Learner, Sampler
from pipeline.rollout import dispatch

_PROBED_PROMPTS = 8


class ParityError(RuntimeError):
    """Sampler and learner are not the same policy."""


def check_mean(metrics: Mapping[str, float], *, bound: float) -> None:
    """Checks the mean difference of an update; one that trained on nothing has none.

    Raises:
        ParityError: if it is above the bound.
    """
    mean = metrics.get("parity_mean", 0.0)
    if not mean <= bound:
        raise ParityError(
            f"log-probs of sampler and learner differ by {mean:.3g} on average, allowed "
            f"{bound:.3g} (parity.mean_stop): the policy that is sampled is not the one that is "
            "learned"
        )


async def check_probe(
    samplers: Sequence[Sampler],
    learner: Learner,
    prompts: Sequence[Prompt],
    *,
    bound: float,
    temperature: float,
) -> float:
    """Sends a random adapter through samplers and learner; returns the largest difference.

    Raises:
        ParityError: if a difference is above `bound` or half of what the adapter changes.
    """
    published = await learner.publish("probe")
    generated: list[Completion] = []
    for number, sampler in enumerate(samplers):
        await sync([sampler], published)
        requests = [
            RolloutRequest(RolloutName("probe", 0, prompt.id, number), prompt.tokens)
            for prompt in prompts[:_PROBED_PROMPTS]
        ]
        completions, _ = await dispatch.generate([sampler], requests, temperature=temperature)
        generated += completions
    check_labels(generated, published)
    scored = await learner.score(generated, which="probe")
    difference = _largest_difference([completion.logprobs for completion in generated], scored)
    if not difference <= bound:
        raise ParityError(
            f"under a random adapter sampler and learner differ by {difference:.3g} in log-prob, "
            f"allowed {bound:.3g} (parity.probe)"
        )
    # Two sides that ignore the adapter agree perfectly; if one does, they differ by its effect.
    effect = _largest_difference(await learner.score(generated, which="current"), scored)
    if effect == 0.0:
        raise ParityError("a random adapter changes no log-prob: LoRA does not reach the model")
    if difference > effect / 2:
        raise ParityError(
            f"under a random adapter sampler and learner differ by {difference:.3g} in log-prob, "
            f"which the adapter changes by {effect:.3g} at most: LoRA does not reach one of them, "
            'or rounding hides it; model.dtype = "float32" tells which'
        )
    return difference


def _largest_difference(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    # NumPy's maximum, not Python's, which may pass over a NaN.
    return float(np.max([np.abs(a - b).max() for a, b in zip(one, other, strict=True)]))


async def sync(samplers: Sequence[Sampler], published: Published) -> None:
    """Loads an adapter into the samplers and compares hashes.

    Raises:
        ParityError: if a sampler holds anything else afterwards.
    """
    for sampler in samplers:
        held = await sampler.load(published)
        if held != published.sha256:
            raise ParityError(
                f"a sampler holds adapter {held[:12]}, version {published.version} is "
                f"{published.sha256[:12]}"
            )


def check_labels(completions: Sequence[Completion], published: Published) -> None:
    """Checks that every completion carries version and hash of the published adapter.

    Raises:
        ParityError: naming the first completion that does not.
    """
    for completion in completions:
        label = (completion.version, completion.adapter_sha256)
        if label != (published.version, published.sha256):
            raise ParityError(
                f"rollout {completion.name} was sampled by version {label[0]} ({label[1][:12]}), "
                f"in force is {published.version} ({published.sha256[:12]})"
            )
