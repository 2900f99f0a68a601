"""The model card of an export: base, data, training settings and evaluations.

It is meant to be published: of local files and folders it has the names, not the places.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import PurePath
from typing import Any

from configs.schema import Config
from pipeline.data.models.model_source import HF
from pipeline.evaluate.summary import mean_key, metric_title, show_interval, show_mean

LICENSES = {"gemma2": "gemma", "gemma3_text": "gemma", "gemma4_text": "apache-2.0"}
"""The Hub's names of licences that the weights of a base, and what is made from them, are under; by
`model_type`."""
_PACKAGES = ("jax", "flax", "qwix", "google-tunix", "optax", "ray")


def model_card(
    config: Config,
    *,
    step: int,
    formats: Sequence[str],
    kind: str,
    dtype: str,
    multimodal: bool,
    evaluations: Iterable[Mapping[str, Any]] = (),
) -> str:
    """The text of `README.md`, in Markdown, with the front matter that the Hub reads.

    Args:
        config: the run's.
        step: version of the adapter.
        formats: formats in the folder: `hf`, `peft`, `orbax`.
        kind: `model_type` of the base's text model.
        dtype: dtype of the merged weights.
        multimodal: whether the base is part of a multimodal model.
        evaluations: the journal's `evaluated` entries of the run.
    """
    base, evaluations = _name(base_name(config.model.path)[0]), list(evaluations)
    tags = [*config.run.phases, "lora"]
    front: dict[str, Any] = {"tags": tags, "pipeline_tag": "text-generation"}
    if kind in LICENSES:
        front["license"] = LICENSES[kind]
    if config.model.path.startswith(HF):
        front["base_model"] = base
    named = _with_names(config.model_dump(mode="json"))
    settings = json.dumps(named, indent=2, ensure_ascii=False)
    lines = [
        "---",
        *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items()),
        "---",
        f"# {config.run.name}",
        "",
        f"`{base}`, {_history(config, step)} by gemma-grpo.",
        "",
        *(_untrained(evaluations, config) if step == 0 else []),
        *_contents(formats, dtype, multimodal=multimodal),
        "",
        "| | |",
        "|---|---|",
        *(f"| {what} | {fact} |" for what, fact in _facts(config, base).items()),
        "",
        *_measured(evaluations, config, step),
        "",
        "## All settings",
        "",
        "```json",
        settings,
        "```",
    ]
    return "\n".join(lines) + "\n"


def _name(path: str) -> str:
    """The name of a local file or folder; handles, datasets and other texts are unchanged."""
    is_path = path.startswith("/") and "/" in path[1:] and "\n" not in path
    return PurePath(path).name if is_path else path


def _with_names(value: Any) -> Any:
    """Settings with `_name` of each text."""
    if isinstance(value, dict):
        return {key: _with_names(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_names(item) for item in value]
    return _name(value) if isinstance(value, str) else value


def _history(config: Config, step: int) -> str:
    """Training history, such as `trained with SFT for 30 steps and GRPO for 50 steps`."""
    sft_steps = min(step, config.sft_steps)
    parts = {"SFT": sft_steps, "GRPO": step - sft_steps}
    trained = " and ".join(f"{phase} for {n} steps" for phase, n in parts.items() if n)
    return f"trained with {trained}" if trained else "with an untrained adapter,"


def _facts(config: Config, base: str) -> dict[str, str]:
    """What a reader wants to know first; all settings follow in the card."""
    model, lora = config.model, config.lora
    sources = [config.data.train, *config.data.mixture]
    return {
        "base": f"`{base}`, {model.dtype}, quantization {model.quantization}",
        "adapter": f"LoRA on `{lora.targets}`, rank {lora.rank}, alpha {lora.alpha:g}, "
        + lora.scaling,
        "GRPO on": ", ".join(f"`{_name(source.title)}`" for source in sources),
        "rewards": ", ".join(part.name for part in config.rewards.functions),
        **_serving(config),
        "made with": ", ".join(f"{name} {version(name)}" for name in _PACKAGES),
    }


def _serving(config: Config) -> dict[str, str]:
    """Settings for serving the model that are in none of its files."""

    def quoted(texts: Sequence[str]) -> str:
        return ", ".join(f"`{json.dumps(text, ensure_ascii=False)}`" for text in texts)

    found = {}
    if config.prompt.answer_prefix:
        found["prefix of the model's turn"] = quoted([config.prompt.answer_prefix])
    if config.rollout.stop_strings:
        found["stop strings"] = quoted(config.rollout.stop_strings)
    if config.prompt.thinking:
        found["chat template"] = "`enable_thinking = true`"
    return found


def base_name(path: str) -> tuple[str, str | None]:
    """The model's name at its source, and the revision if the path names one."""
    if path.startswith(HF):
        name, _, revision = path.removeprefix(HF).partition("@")
        return name, revision or None
    return path, None


def _contents(formats: Sequence[str], dtype: str, *, multimodal: bool) -> list[str]:
    lines = []
    if "hf" in formats:
        lines.append(f"* the merged model in {dtype}, for Hugging Face's tools")
    if "orbax" in formats:
        lines.append(f"* `flax/`: the merged model in {dtype}, an orbax checkpoint")
    if "peft" in formats:
        lines.append("* `adapter/`: the adapter alone, for PEFT, on the base")
    if multimodal:
        lines.append("\nThe base is a multimodal model, of which only the text model is trained.")
    return lines


def _measured(evaluations: Iterable[Mapping[str, Any]], config: Config, step: int) -> list[str]:
    """Measured accuracy or score of the base and of this version."""
    # The last of repeated measurements.
    measured = {(entry["name"], entry["step"]): entry for entry in evaluations}
    shown = [entry for entry in measured.values() if entry["step"] in {0, step}]
    if not shown:
        return []
    protocol, mean = config.eval, mean_key(shown[0])
    decoding = "greedy" if protocol.temperature == 0 else f"temperature {protocol.temperature:g}"
    judged = f"answer by {config.extraction}"
    if config.uses_rewards:
        judged = f"scored by `{config.metric}`"
    how = f"{decoding}, {protocol.samples} sample(s) per prompt, {judged}"
    return [
        f"## {mean.capitalize()}",
        "",
        f"The test split is `{_name(config.data.test.title)}`; {how}.",
        "`before` is the initial policy. The exported version is the one with the best validation",
        f"{mean}, so its validation {mean} is slightly optimistic.",
        "",
        f"| evaluation | step | {metric_title(shown[0])} [95%] | prompts |",
        "|---|---|---|---|",
        *(
            f"| {entry['name']} | {entry['step']} | {show_mean(entry)} {show_interval(entry)} "
            f"| {entry['n']} |"
            for entry in shown
        ),
    ]


def _untrained(evaluations: Iterable[Mapping[str, Any]], config: Config) -> list[str]:
    """Says of version 0 that it is the model before training, and why it is exported."""
    validated = any(entry["name"] == "validation" and entry["step"] for entry in evaluations)
    start = config.version_0
    why = "was written before training, and is replaced when a validated version is better"
    if validated:
        why = f"is the {start} model because no validated version was better"
    return [f"**This is the {start} model.** The export {why}.", ""]
