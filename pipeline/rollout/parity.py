"""Invariant 1: the sampled policy is the learned policy.

Three checks: log-probs under a random probe adapter at start, hash and version at every sync, and
the log-prob difference of every update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from configs.schema import Config
from pipeline.contracts.adapters import Published
from pipeline.contracts.rollouts import Completion, Prompt, RolloutName, RolloutRequest
from pipeline.contracts.workers import Learner, Sampler

_PROBED_PROMPTS = 8


class ParityError(RuntimeError):
    """Sampler and learner are not the same policy."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of |sampler's log-prob - learner's log-prob|.

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
        """Configured bounds, else the measured ones of this base and these rollout weights."""
        parity, measured = config.parity, _measured(config)
        return Bounds(
            probe=parity.probe or measured.probe,
            mean_stop=parity.mean_stop or measured.mean_stop,
            p999_alarm=parity.p999_alarm or measured.p999_alarm,
        )

    def alarm(self, metrics: Mapping[str, float]) -> str | None:
        """Checks the metrics of an update; returns an alarm to journal, if any.

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


_EXACT = Bounds(probe=1e-4, mean_stop=1e-4, p999_alarm=1e-3)
_ROUNDED = Bounds(probe=0.25, mean_stop=0.05, p999_alarm=0.5)
# More than twice the values of the demo, except the mean, which is not below that of bf16.
_MERGED = Bounds(probe=0.5, mean_stop=0.05, p999_alarm=0.5)
_INTEGERS = {
    "int8": Bounds(probe=0.75, mean_stop=0.05, p999_alarm=0.5),
    "int8_matmul": Bounds(probe=1.0, mean_stop=0.1, p999_alarm=1.25),
}
"""Bounds by `plan.rollout_weights`, if the sampler rounds otherwise than the learner's base."""


def _measured(config: Config) -> Bounds:
    model, plan = config.model, config.plan
    if plan.rollout_weights in _INTEGERS:
        return _INTEGERS[plan.rollout_weights]
    if model.dtype == "bfloat16":
        return _MERGED if plan.rollout_weights == "merged" else _ROUNDED
    # If activations, or keys and values, are rounded to integers, differences of float32's size
    # select other integers.
    rounded = model.quantization == "int8_matmul" or plan.kv_cache == "int8"
    return _ROUNDED if rounded else _EXACT


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
    generated: list[Completion] = []
    for number, sampler in enumerate(samplers):
        await sync([sampler], published)
        requests = [
            RolloutRequest(RolloutName("probe", 0, prompt.id, number), prompt.tokens)
            for prompt in prompts[:_PROBED_PROMPTS]
        ]
        generated += await sampler.generate(requests, temperature=temperature)
    check_labels(generated, published)
    scored = await learner.score(generated, which="probe")
    difference = _largest_difference([completion.logprobs for completion in generated], scored)
    if not difference <= bound:
        raise ParityError(
            f"under a random adapter sampler and learner differ by {difference:.3g} in log-prob, "
            f"allowed {bound:.3g} (parity.probe)"
        )
    # Two sides that both ignore the adapter agree perfectly.
    effect = _largest_difference(await learner.score(generated, which="current"), scored)
    if effect == 0.0:
        raise ParityError("a random adapter changes no log-prob: LoRA does not reach the model")
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
