"""The evaluation protocol as JSON: what makes accuracies comparable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.schema import Config, Source
from configs.task import AnswerPlace
from pipeline.data.splits import LoadedSplit, fingerprint

PLACES: Mapping[AnswerPlace, str] = {
    "tags": "the last answer block",
    "completion": "the whole completion",
    "first_line": "the first line",
    "last_line": "the last line",
    "boxed": "the last \\boxed{...}",
    "stated": 'what follows the last "answer is" or "answer:"',
    "last_number": "the last number",
}
"""Where the answer is, in words."""


def protocol(config: Config) -> dict[str, Any]:
    """All settings that the result of an evaluation depends on, except the data."""
    rollout = config.rollout
    found: dict[str, Any] = {"temperature": config.eval.temperature}
    if config.eval.temperature:
        found |= {"top_k": rollout.top_k, "top_p": rollout.top_p, "min_p": rollout.min_p}
        found |= {"seed": config.run.seed}
    if config.uses_rewards:
        kept = {"name", "function", "weight", "args"}
        parts = config.rewards.functions
        found["rewards"] = [part.model_dump(mode="json", include=kept) for part in parts]
        found["overlong_tokens"] = rollout.overlong_tokens
    return {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "quantization": config.model.quantization,
        "rollout_weights": config.plan.rollout_weights,
        "kv_cache": config.plan.kv_cache,
        "prompt": config.prompt.model_dump(mode="json"),
        "max_prompt_tokens": rollout.max_prompt_tokens,
        "max_new_tokens": rollout.max_new_tokens,
        "stop_tokens": list(rollout.stop_tokens),
        "stop_strings": list(rollout.stop_strings),
        "forbidden_tokens": list(rollout.forbidden_tokens),
        **found,
        "samples": config.eval.samples,
        "extraction": config.extraction,
        "metric": config.metric,
    }


def data_facts(source: Source, split: LoadedSplit) -> dict[str, Any]:
    """Source, prompts, skipped rows and fingerprint of a set."""
    return {
        "source": source.model_dump(mode="json", exclude_none=True),
        "prompts": len(split.prompts),
        "malformed": len(split.malformed),
        "too_long": len(split.too_long),
        "fingerprint": fingerprint(split),
    }
