"""Suggestions for mistakes: the nearest key, the nearest valid value."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Any

from configs.settings import INDEX, Setting, setting_parts, settings, settings_by_path, tables
from configs.toml_text import read_value, show_value

_TYPO_RATIO = 0.9
"""Similarity above which a key of the same name is the only suggestion."""
_MOST_INTEGER = 2**63 - 1
"""The largest integer of TOML."""
FROM_TRL = {
    "train_dataset": "data.train",
    "eval_dataset": "data.validation",
    "reward_funcs": "rewards.functions",
    "reward_weights": "rewards.functions",
    "importance_sampling_level": "learner.loss",
    "vllm_importance_sampling_correction": "learner.importance_cap",
    "report_to": "wandb.mode",
    "bf16": "model.dtype",
    "num_generations": "rollout.group_size",
    "generation_batch_size": "rollout.prompts_per_step",
    "max_completion_length": "rollout.max_new_tokens",
    "learning_rate": "learner.lr",
    "lr_scheduler_type": "learner.schedule",
    "beta": "learner.kl_coef",
    "loss_type": "learner.loss",
    "epsilon": "learner.clip_epsilon",
    "epsilon_high": "learner.clip_epsilon_high",
    "num_iterations": "learner.updates_per_batch",
    "scale_rewards": "learner.advantage",
    "mask_truncated_completions": "learner.overlong",
    "adam_beta2": "learner.adam_b2",
    "max_steps": "budget.steps",
    "num_train_epochs": "budget.steps",
    "eval_steps": "eval.every_steps",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "output_dir": "run.dir",
    "run_name": "run.name",
    "load_in_4bit": "model.quantization",
    "lora_alpha": "lora.alpha",
    "use_rslora": "lora.scaling",
    "target_modules": "lora.targets",
    "model_name_or_path": "model.path",
    "model_name": "model.path",
    "dataset_name": "data.train",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "warmup_ratio": "learner.warmup_steps",
    "train_files": "data.train",
    "val_files": "data.validation",
    "train_batch_size": "rollout.prompts_per_step",
    "n": "rollout.group_size",
    "n_samples_per_prompt": "rollout.group_size",
    "r": "lora.rank",
    "max_response_length": "rollout.max_new_tokens",
    "kl_loss_coef": "learner.kl_coef",
    "kl_loss_type": "learner.kl",
    "clip_ratio": "learner.clip_epsilon",
    "clip_ratio_high": "learner.clip_epsilon_high",
    "ppo_epochs": "learner.updates_per_batch",
    "adv_estimator": "learner.advantage",
    "advantage_estimator": "learner.advantage",
    "total_epochs": "budget.steps",
    "test_freq": "eval.every_steps",
    "save_freq": "checkpoint.every_steps",
}
"""Our keys for names of TRL, PEFT, verl and OpenRLHF; docs/from_trl.md has them."""
NO_KEY = {
    "ppo": 'there is no value model; learner.loss = "grpo" has the clipped ratio of PPO',
    "pause": "Ctrl-C or `ray job stop` ends the run with a checkpoint, the same command continues",
    "resume": "the same command resumes",
    "resume_from_checkpoint": "the same command resumes",
    "use_vllm": "the samplers are part of the run",
    "per_device_train_batch_size": "a step has rollout.prompts_per_step x rollout.group_size "
    "rollouts, in micro-batches that fit the memory",
    "gradient_accumulation_steps": "a step has rollout.prompts_per_step x rollout.group_size "
    "rollouts, in micro-batches that fit the memory",
    "gradient_checkpointing": "plan.remat, which the plan chooses",
    "lora_dropout": "adapters have no dropout",
    "logging_steps": "every step is recorded",
    "deepspeed": "plan.placement, plan.fsdp and plan.tp, which the plan chooses",
}
"""What there is instead of a setting of others, or an action, that has no key here."""
_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


def nearest_value(setting: Setting, value: object) -> str | None:
    """The valid value nearest to `value` as TOML, or in words; None if none is near."""
    if setting.choices:
        return _nearest_choice(setting.choices, value)
    if setting.type == "boolean":
        word = str(value).lower()
        return "true" if word in _TRUE else "false" if word in _FALSE else None
    if setting.type in {"integer", "number"}:
        number = read_value(value) if isinstance(value, str) else value
        if isinstance(number, int | float) and not isinstance(number, bool):
            return _nearest_number(setting, number)
    if setting.type == "string" and isinstance(value, int | float):
        return show_value(show_value(value))
    if setting.type == "array":
        return _nearest_list(setting, value)
    return None


def nearest_keys(path: Sequence[str | int]) -> list[str]:
    """Up to three dotted keys that the user may have meant by `path`, most likely first.

    In this order: the key for a name of TRL, keys of the same name in other tables, similar keys
    of the same table, keys of the table whose description contains the words, similar paths.
    """
    indices = [str(part) for part in path if str(part).isdecimal()]
    parts = setting_parts(path)
    leaf = parts[-1].replace("-", "_")
    if leaf in FROM_TRL:
        return [FROM_TRL[leaf]]
    whole = ".".join(parts)
    all_paths = [setting.path for setting in (*tables(), *settings())]
    similarity = {
        key: difflib.SequenceMatcher(None, key, whole).ratio()
        for key in all_paths
        if key.rpartition(".")[2] == leaf
    }
    same_name = sorted(similarity, key=lambda key: -similarity[key])
    if same_name and similarity[same_name[0]] >= _TYPO_RATIO:
        same_name = same_name[:1]
    siblings = _siblings(parts)
    names = {setting.path.rpartition(".")[2]: setting for setting in siblings}
    similar = [names[name].path for name in difflib.get_close_matches(leaf, names, n=1, cutoff=0.6)]
    words = leaf.replace("_", " ")
    described = [setting.path for setting in siblings if words in setting.description]
    # In an existing table, the shared table name makes every path similar.
    close = difflib.get_close_matches(whole, all_paths, n=1, cutoff=0.6)
    found = same_name[:3] or similar or described[:1] or ([] if len(parts) > 1 and names else close)
    return [_with_indices(key, indices) for key in found]


def sibling_names(path: Sequence[str | int]) -> list[str]:
    """The keys of the table that `path` is in; empty if there is no such table."""
    parts = setting_parts(path)
    return [setting.path.rpartition(".")[2] for setting in _siblings(parts)]


def _siblings(parts: Sequence[str]) -> list[Setting]:
    if len(parts) == 1:
        return list(tables())
    parent = settings_by_path().get(".".join(parts[:-1]))
    return list(parent.children()) if parent and parent.type == "object" else []


def _with_indices(key: str, indices: Sequence[str]) -> str:
    left = iter(indices)
    return ".".join(next(left, "0") if part == INDEX else part for part in key.split("."))


def _nearest_choice(choices: Sequence[object], value: object) -> str | None:
    if len(choices) == 1:
        return show_value(choices[0])
    by_name = {str(choice).lower(): choice for choice in choices}
    if value == "ppo" and "grpo" in by_name:
        return show_value("grpo")
    close = difflib.get_close_matches(str(value).lower(), by_name, n=1, cutoff=0.5)
    return show_value(by_name[close[0]]) if close else None


def _nearest_number(setting: Setting, number: float) -> str | None:
    node: Any = setting.node
    low = node.get("minimum", node.get("exclusiveMinimum", -math.inf))
    high = node.get("maximum", node.get("exclusiveMaximum", math.inf))
    if not math.isfinite(number):
        return None
    if setting.type == "integer":
        if number > min(high, _MOST_INTEGER):
            return show_value(high - ("exclusiveMaximum" in node)) if high < math.inf else None
        low += "exclusiveMinimum" in node
        high -= "exclusiveMaximum" in node
        return show_value(int(min(max(round(number), low), high)))
    if number <= low and "exclusiveMinimum" in node:
        return f"just above {show_value(low)}"
    if number >= high and "exclusiveMaximum" in node:
        return f"just below {show_value(high)}"
    return show_value(float(min(max(number, low), high)))


def _nearest_list(setting: Setting, value: object) -> str | None:
    (element,) = setting.children()
    fits = isinstance(value, {"string": str, "integer": int}.get(element.type, ()))
    return show_value([value]) if fits and not isinstance(value, bool) else None
