"""Invariant 1: the policy that is sampled is the policy that is learned.

Three checks: log-probs under a random probe adapter at start, hash and version at every sync, and
the difference of log-probs during the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from configs.schema import Config
from pipeline.datatypes import Completion, Prompt, Published, RolloutName, RolloutRequest
from pipeline.interfaces import Learner, Sampler

_PROBED_PROMPTS = 8


class ParityError(RuntimeError):
    """Sampler and learner are not the same policy."""


@dataclass(frozen=True)
class Bounds:
    """Largest |sampler's - learner's log-prob| that is put up with.

    Attributes:
        probe: of any token at start.
        mean_stop: a step's mean above it ends the run.
        p999_alarm: a step's 99.9th percentile above it is journaled.
    """

    probe: float
    mean_stop: float
    p999_alarm: float

    @staticmethod
    def of(config: Config) -> Bounds:
        """Configured bounds, else the measured defaults of the base's type.

        Where activations, or keys and values, are rounded to integers, differences of float32's
        size choose other ones.
        """
        model = config.model
        rounded = model.quantization == "int8_matmul" or config.plan.kv_cache == "int8"
        exact = model.dtype == "float32" and not rounded
        parity = config.parity
        return Bounds(
            probe=parity.probe or (1e-4 if exact else 0.25),
            mean_stop=parity.mean_stop or (1e-4 if exact else 0.05),
            p999_alarm=parity.p999_alarm or (1e-3 if exact else 0.5),
        )

    def alarm(self, metrics: Mapping[str, float]) -> str | None:
        """Judges a step's metrics; returns what to journal, if anything.

        Raises:
            ParityError: if the mean is above its bound.
        """
        mean, p999 = metrics.get("parity_mean", 0.0), metrics.get("parity_p999", 0.0)
        if not mean <= self.mean_stop:
            raise ParityError(
                f"log-probs of sampler and learner differ by {mean:.3g} on average, allowed "
                f"{self.mean_stop:.3g} (parity.mean_stop): the policy that is sampled is not the "
                "one that is learned"
            )
        if not p999 <= self.p999_alarm:
            return f"99.9th percentile of log-prob difference {p999:.3g} > {self.p999_alarm:.3g}"
        return None


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
        ParityError: if a difference is above `bound`, or if the adapter changes nothing.
    """
    published = await learner.publish("probe")
    drawn: list[Completion] = []
    for number, sampler in enumerate(samplers):
        await sync([sampler], published)
        requests = [
            RolloutRequest(RolloutName("probe", 0, prompt.id, number), prompt.tokens)
            for prompt in prompts[:_PROBED_PROMPTS]
        ]
        drawn += await sampler.generate(requests, temperature=temperature)
    check_labels(drawn, published)
    scored = await learner.score(drawn, which="probe")
    difference = _largest_difference([completion.logprobs for completion in drawn], scored)
    if not difference <= bound:
        raise ParityError(
            f"under a random adapter sampler and learner differ by {difference:.3g} in log-prob, "
            f"allowed {bound:.3g} (parity.probe)"
        )
    # Two sides that both ignore the adapter agree perfectly.
    effect = _largest_difference(await learner.score(drawn, which="current"), scored)
    if effect == 0.0:
        raise ParityError("a random adapter changes no log-prob: LoRA does not reach the model")
    return difference


def _largest_difference(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    # NumPy's maximum, not Python's, which may pass over a NaN.
    return float(np.max([np.abs(a - b).max() for a, b in zip(one, other, strict=True)]))


async def sync(samplers: Sequence[Sampler], published: Published) -> None:
    """Gives the samplers an adapter and compares hashes.

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
    """Every completion must carry version and hash of the adapter in force, as its last stretch.

    Raises:
        ParityError: naming the first that does not.
    """
    for completion in completions:
        label = (completion.version, completion.adapter_sha256)
        if label != (published.version, published.sha256):
            raise ParityError(
                f"rollout {completion.name} was drawn by version {label[0]} ({label[1][:12]}), "
                f"in force is {published.version} ({published.sha256[:12]})"
            )
