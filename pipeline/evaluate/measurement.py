"""Evaluates one policy on all test sets, with samplers that open adapters themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from configs.schema import Config
from pipeline.data.text.prompts import PromptMaker
from pipeline.data.text.tokenizer import Tokenizer
from pipeline.evaluate import evaluation
from pipeline.evaluate.evaluation import Evaluation
from pipeline.protocols import Sampler, Scorer
from pipeline.rollout import dispatch, mismatch
from pipeline.types import Completion, OpenedAdapter, Prompt, Published, RolloutRequest

Advance = Callable[[int], None]
"""Receives the number of new answers."""


@dataclass(frozen=True)
class Measured:
    """A policy's evaluations, by set."""

    adapter: OpenedAdapter
    evaluations: Mapping[str, Evaluation]


_REFILLS = 4
"""Fillings of a sampler's slots per call: each call ends with idle slots, and progress is reported
after each."""


async def open_adapter(samplers: Sequence[Sampler], path: str | None) -> OpenedAdapter:
    """Loads the adapter at `path`, or none, into all samplers.

    Raises:
        FileNotFoundError: if there is no adapter.
        ValueError: if it cannot be used, or is not for this base.
        MismatchError: if the samplers do not hold the same one.
    """
    first, *others = await asyncio.gather(*(sampler.open_adapter(path) for sampler in samplers))
    for other in others:
        if other.sha256 != first.sha256:
            raise mismatch.MismatchError(
                f"samplers opened different adapters: {first.sha256[:12]} and {other.sha256[:12]}"
            )
    return first


async def answer(
    samplers: Sequence[Sampler],
    requests: Sequence[RolloutRequest],
    *,
    at_once: int,
    temperature: float,
    adapter: OpenedAdapter,
    advance: Advance = lambda _: None,
) -> list[Completion]:
    """One completion per request, in their order, under the loaded adapter.

    Args:
        samplers: at least one.
        requests: of any groups.
        at_once: requests per sampler and call; progress is reported after each call.
        temperature: 0 is greedy.
        adapter: the loaded one.
        advance: receives the number of new answers.

    Raises:
        MismatchError: if a completion was sampled under another adapter.
    """
    named = sorted(requests, key=lambda request: request.name)
    generated: dict[object, Completion] = {}
    step = at_once * len(samplers)
    for start in range(0, len(named), step):
        part = named[start : start + step]
        completions, _ = await dispatch.generate(samplers, part, temperature=temperature)
        mismatch.check_labels(completions, Published(adapter.version, adapter.sha256, None))
        generated |= {completion.name: completion for completion in completions}
        advance(len(part))
    return [generated[request.name] for request in requests]


async def measure(
    samplers: Sequence[Sampler],
    tests: Mapping[str, Sequence[Prompt]],
    *,
    config: Config,
    slots: int,
    tokenizer: Tokenizer,
    path: str | None,
    advance: Advance,
    scorer: Scorer | None = None,
) -> Measured:
    """Evaluates the policy with the adapter at `path`, or the base alone, on each test set.

    Args:
        samplers: at least one.
        tests: prompts by set.
        config: the protocol.
        slots: of each sampler.
        tokenizer: decodes completions.
        path: of the adapter.
        advance: receives the number of new answers.
        scorer: runs the reward functions; only reward metrics need it.

    Raises:
        FileNotFoundError: as `open_adapter`.
        ValueError: as `open_adapter`.
        MismatchError: as `open_adapter` and `answer`.
    """
    adapter = await open_adapter(samplers, path)
    protocol, found = config.eval, {}
    maker = PromptMaker(config.prompt, tokenizer)
    for name, prompts in tests.items():
        completions = await answer(
            samplers,
            evaluation.requests(prompts, phase=name, samples=protocol.samples),
            at_once=_REFILLS * slots,
            temperature=protocol.temperature,
            adapter=adapter,
            advance=advance,
        )
        score = scorer.score if scorer is not None and config.uses_rewards else None
        found[name] = await evaluation.evaluate(
            prompts, completions, config=config, maker=maker, score=score
        )
    return Measured(adapter, found)
