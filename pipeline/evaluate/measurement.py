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


async def open_adapter(samplers: Sequence[Sampler], path: str | None) -> OpenedAdapter:
    """Loads the adapter at `path`, or none, into all samplers.

    Raises:
        FileNotFoundError: if there is no adapter.
        ValueError: if it cannot be used, or is not for this base.
    """
    opened = await asyncio.gather(*(sampler.open_adapter(path) for sampler in samplers))
    return opened[0]


async def answer(
    samplers: Sequence[Sampler],
    requests: Sequence[RolloutRequest],
    *,
    temperature: float,
    adapter: OpenedAdapter,
    advance: Advance = lambda _: None,
) -> list[Completion]:
    """One completion per request, in their order, under the loaded adapter.

    Raises:
        MismatchError: if a completion was sampled under another adapter.
    """
    ended = 0

    def report(completions: Sequence[Completion]) -> None:
        nonlocal ended
        ended += len(completions)
        advance(len(completions))

    generated, _ = await dispatch.generate(
        samplers, requests, temperature=temperature, report=report
    )
    mismatch.check_labels(generated, Published(adapter.version, adapter.sha256, None))
    advance(len(generated) - ended)
    return generated


async def measure(
    samplers: Sequence[Sampler],
    tests: Mapping[str, Sequence[Prompt]],
    *,
    config: Config,
    tokenizer: Tokenizer,
    path: str | None,
    advance: Advance,
    scorer: Scorer | None = None,
) -> Measured:
    """Evaluates the policy with the adapter at `path`, or the base alone, on each test set.

    Only reward metrics need the scorer. Raises as `open_adapter` and `answer`.
    """
    adapter = await open_adapter(samplers, path)
    protocol, found = config.eval, {}
    maker = PromptMaker(config.prompt, tokenizer)
    for name, prompts in tests.items():
        completions = await answer(
            samplers,
            evaluation.requests(prompts, phase=name, samples=protocol.samples),
            temperature=protocol.temperature,
            adapter=adapter,
            advance=advance,
        )
        score = scorer.score if scorer is not None and config.uses_rewards else None
        found[name] = await evaluation.evaluate(
            prompts, completions, config=config, maker=maker, score=score
        )
    return Measured(adapter, found)
