"""The evaluation protocol as JSON and as text: what makes accuracies comparable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from configs.evaluation import EXACT_ANSWER, WEIGHTED_SUM
from configs.schema import Config, Source
from configs.task import OVERLONG, AnswerPlace
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
    sampling: dict[str, Any] = {"temperature": config.eval.temperature}
    if config.eval.temperature:
        rollout = config.rollout
        sampling |= {"top_k": rollout.top_k, "top_p": rollout.top_p, "min_p": rollout.min_p}
        sampling |= {"seed": config.run.seed}
    return {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "quantization": config.model.quantization,
        "rollout_weights": config.plan.rollout_weights,
        "kv_cache": config.plan.kv_cache,
        "prompt": config.prompt.model_dump(mode="json"),
        "max_prompt_tokens": config.rollout.max_prompt_tokens,
        "max_new_tokens": config.rollout.max_new_tokens,
        "stop_tokens": list(config.rollout.stop_tokens),
        "stop_strings": list(config.rollout.stop_strings),
        "forbidden_tokens": list(config.rollout.forbidden_tokens),
        **sampling,
        "samples": config.eval.samples,
        "extraction": config.extraction,
        "metric": config.metric,
        **_rewards(config),
    }


def _rewards(config: Config) -> dict[str, Any]:
    """The settings that a reward metric depends on."""
    if not config.uses_rewards:
        return {}
    found = [
        part.model_dump(mode="json", include={"name", "function", "weight", "args"})
        for part in config.rewards.functions
    ]
    return {"rewards": found, "overlong_tokens": config.rollout.overlong_tokens}


def data_facts(source: Source, split: LoadedSplit) -> dict[str, Any]:
    """Source, prompts, skipped rows and fingerprint of a set."""
    return {
        "source": source.model_dump(mode="json", exclude_none=True),
        "prompts": len(split.prompts),
        "malformed": len(split.malformed),
        "too_long": len(split.too_long),
        "fingerprint": fingerprint(split),
    }


def protocol_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The result of `protocol` as text."""
    prompt = found["prompt"]
    turns = {"auto": "the model's turns", "gemma": "Gemma's turns", "plain": "plain text"}
    model = f"model: {found['model']}, {found['dtype']}, quantization {found['quantization']}"
    model += f", rollout weights {kind}" if (kind := found["rollout_weights"]) != "shared" else ""
    yield model + (f", KV cache {kind}" if (kind := found["kv_cache"]) != "model" else "")
    shots = len(prompt["shots"])
    yield (
        f"prompt: {turns[prompt['turn']]}, {shots} shots, template {prompt['template']!r}, "
        + (f"system {prompt['system']!r}" if prompt["system"] else "no system text")
        + (f", answers begin with {prefix!r}" if (prefix := prompt["answer_prefix"]) else "")
    )
    if found["temperature"]:
        sampling = f"sampled at temperature {found['temperature']:g}"
        sampling += f", top_k {found['top_k']}" if found["top_k"] else ""
        sampling += f", top_p {found['top_p']:g}" if found["top_p"] < 1 else ""
        sampling += f", min_p {found['min_p']:g}" if found["min_p"] else ""
        sampling += f", seed {found['seed']}"
    else:
        sampling = "greedy"
    stops = " or ".join(map(repr, found["stop_strings"]))
    yield (
        f"answers: {found['samples']} a prompt, {sampling}, "
        f"at most {found['max_new_tokens']} tokens"
        + (f", also ended by {stops}" if stops else "")
        + f"; {_judged_by(found)}"
    )


def _judged_by(found: Mapping[str, Any]) -> str:
    if found["metric"] == EXACT_ANSWER:
        return f"judged by {PLACES[found['extraction']]}"
    if found["metric"] != WEIGHTED_SUM:
        return f"scored by the reward {found['metric']!r}"
    terms = [f"{part['weight']:g} x {part['name']}" for part in found["rewards"]]
    terms += [f"1 x {OVERLONG}"] if found["overlong_tokens"] else []
    return f"scored by the reward {' + '.join(terms)}"
