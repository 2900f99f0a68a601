"""Checks that the sampled policy is the learned policy.

Three checks: log-probs under a random adapter at start (`probe_statistic`), hash and version at
every sync, and the mean log-prob difference of every update, whose 99.9th percentile the alarm
`disagreement` watches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np

from configs.schema import Config
from pipeline.protocols import Learner, Sampler
from pipeline.rollout import dispatch
from pipeline.types import Completion, Prompt, Published, RolloutName, RolloutRequest

_PROBED_PROMPTS = 8
_NOT_LOADED = (
    "an adapter was not loaded. Please report this fault of the program; the same command "
    "continues from the last checkpoint"
)
_PIECE = 64
"""Tokens over which the probe's differences are averaged: a fault in a part of a sequence shows."""


class MismatchError(RuntimeError):
    """Sampler and learner are not the same policy; the message has the remedy for the user."""


def check_mean(metrics: Mapping[str, float], *, bound: float) -> None:
    """Checks the mean difference of an update; one that trained on nothing has none.

    Raises:
        MismatchError: if it is above the bound.
    """
    mean = metrics.get("mismatch_mean", 0.0)
    if not mean <= bound:
        raise MismatchError(
            f"log-probs of sampler and learner differ by {mean:.3g} on average, allowed "
            f"{bound:.3g} (mismatch.mean_stop): the policy that is sampled is not the one that "
            "is learned. If learner/mismatch_mean has grown over many steps in metrics.jsonl, "
            "rounding has grown with the adapter: a lower learner.lr, or plan.rollout_weights and "
            "plan.kv_cache as they are by default, avoid it, and a higher mismatch.mean_stop "
            "allows it when the run is resumed. If it has jumped, a program or a device is at fault"
        )


async def check_probe(
    samplers: Sequence[Sampler], learner: Learner, prompts: Sequence[Prompt], *, config: Config
) -> float:
    """Sends a random adapter through samplers and learner; returns the largest `probe_statistic`.

    Short completions are sampled several times, so that its mean is over enough tokens.

    Raises:
        MismatchError: if it is above `mismatch.probe`, or the adapter changes nothing.
    """
    published, bound = await learner.publish("probe"), config.mismatch_bounds.probe
    chosen, largest = prompts[:_PROBED_PROMPTS], 0.0
    samples = ceil(_PIECE / (len(chosen) * config.rollout.max_new_tokens))
    for number, sampler in enumerate(samplers):
        await sync([sampler], published)
        requests = [
            RolloutRequest(RolloutName("probe", 0, prompt.id, sample), prompt.tokens)
            for sample in range(number * samples, (number + 1) * samples)
            for prompt in chosen
        ]
        drawn, _ = await dispatch.generate(
            [sampler], requests, temperature=config.rollout.temperature
        )
        check_labels(drawn, published)
        sampled = np.concatenate([completion.logprobs for completion in drawn])
        scored = np.concatenate(await learner.score(drawn, which="probe"))
        without = np.concatenate(await learner.score(drawn, which="current"))
        if np.array_equal(scored, without):
            raise MismatchError(
                "a random adapter changes no log-prob of the learner: LoRA does not reach its "
                "model. This is a fault of the program; please report it with the model and the "
                "versions that launch.doctor prints"
            )
        found = probe_statistic(sampled, scored, without)
        if not found <= bound:
            name = f"sampler {number}" if len(samplers) > 1 else "the sampler"
            raise MismatchError(_refusal(name, found, bound))
        largest = max(largest, found)
    return largest


def probe_statistic(sampled: np.ndarray, scored: np.ndarray, without: np.ndarray) -> float:
    """How far sampler and learner differ, as a share of what the adapter changes.

    The tokens are divided into pieces of about 64. The result is the largest mean over a piece of
    |sampled - scored|, divided by the mean over all tokens of |scored - without|. Rounding adds to
    each token a difference that is small beside the adapter's effect, whatever the model, though a
    single improbable token may differ by more than 1 in bfloat16. A fault (a layer without its
    adapter, a wrong position or mask, another slot's prompt) moves all tokens of a piece.

    Args:
        sampled: the sampler's log-probs of its tokens under the adapter.
        scored: the learner's, under the same adapter.
        without: the learner's, without it.
    """
    difference = np.abs(sampled - scored)
    pieces = np.array_split(difference, max(1, len(difference) // _PIECE))
    # NumPy's maximum, not Python's, which may pass over a NaN.
    return float(np.max([piece.mean() for piece in pieces]) / np.abs(scored - without).mean())


def _refusal(name: str, found: float, bound: float) -> str:
    measured = (
        f"under a random adapter the log-probs of {name} differ from the learner's by "
        f"{found:.3g} of what the adapter changes, allowed {bound:.3g} (mismatch.probe; mean over "
        f"{_PIECE} tokens)."
    )
    if not np.isfinite(found):
        return (
            f"{measured} Log-probs that are no numbers come from weights or activations that "
            "overflow: check model.path, and model.dtype against the type of its weights"
        )
    return (
        f"{measured} Likely causes: layers without their adapter, a wrong position or mask in the "
        "KV caches, or rounding. To tell them apart, start another run in float32 (--run.name NAME "
        "--model.dtype float32, no int8 settings), where rounding stays below 0.0001. If that run "
        f"starts, rounding is the cause: allow it here with --mismatch.probe {2 * found:.2g}, or "
        "leave plan.rollout_weights and plan.kv_cache at their defaults. If not, please report it"
    )


async def sync(samplers: Sequence[Sampler], published: Published) -> None:
    """Loads an adapter into the samplers and compares hashes.

    Raises:
        MismatchError: if a sampler holds anything else afterwards.
    """
    for sampler in samplers:
        held = await sampler.load(published)
        if held != published.sha256:
            raise MismatchError(
                f"a sampler holds adapter {held[:12]}, version {published.version} is "
                f"{published.sha256[:12]}: {_NOT_LOADED}"
            )


def check_labels(completions: Sequence[Completion], published: Published) -> None:
    """Checks that every completion carries version and hash of the published adapter.

    Raises:
        MismatchError: naming the first completion that does not.
    """
    for completion in completions:
        label = (completion.version, completion.adapter_sha256)
        if label != (published.version, published.sha256):
            raise MismatchError(
                f"rollout {completion.name} was sampled by version {label[0]} ({label[1][:12]}), "
                f"published is {published.version} ({published.sha256[:12]}): {_NOT_LOADED}"
            )
