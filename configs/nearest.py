"""Suggestions for mistakes: the nearest key, the nearest valid value."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from contextlib import suppress

from configs.settings import INDEX, Setting, setting_parts, settings, settings_by_path, tables
from configs.toml_text import show_value

_TYPO_RATIO = 0.9
"""Similarity above which a key of the same name is the only suggestion."""
_BOOLEANS = {"true": "true", "yes": "true", "1": "true"} | dict.fromkeys(
    ("false", "no", "0"), "false"
)
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
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
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


def nearest_value(setting: Setting, value: object) -> str | None:
    """The valid value nearest to `value` as TOML, or in words; None if none is near."""
    node = setting.node
    if setting.type == "boolean":
        return _BOOLEANS.get(str(value).lower())
    if setting.type in {"integer", "number"} and isinstance(value, str):
        with suppress(ValueError):
            value = float(value)  # in quotes
    choices = node.get("enum", [node["const"]] if "const" in node else [])
    if value == "ppo" and "grpo" in choices:
        return show_value("grpo")
    by_name = {str(choice).lower(): choice for choice in choices}
    for name in difflib.get_close_matches(str(value).lower(), by_name, n=1, cutoff=0.5):
        return show_value(by_name[name])
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
        return None
    if value <= node.get("exclusiveMinimum", -math.inf):
        return f"just above {show_value(node['exclusiveMinimum'])}"
    if value >= node.get("exclusiveMaximum", math.inf):
        return f"just below {show_value(node['exclusiveMaximum'])}"
    near = min(max(value, node.get("minimum", -math.inf)), node.get("maximum", math.inf))
    if setting.type == "integer":
        return show_value(round(near))
    return show_value(float(near)) if setting.type == "number" else None


def nearest_keys(path: Sequence[str | int]) -> list[str]:
    """Up to three dotted keys that the user may have meant by `path`, most likely first.

    In this order: the key for a name of TRL, keys of the same name in other tables, similar keys
    of the same table, similar paths.
    """
    indices = [str(part) for part in path if str(part).isdecimal()]
    parts = setting_parts(path)
    leaf = parts[-1].replace("-", "_")
    if leaf in FROM_TRL:
        return [FROM_TRL[leaf]]
    whole = ".".join(parts)
    all_paths = [setting.path for setting in (*tables(), *settings())]
    same_name = [key for key in all_paths if key.rpartition(".")[2] == leaf]
    same_name = difflib.get_close_matches(whole, same_name, n=3, cutoff=0.0)
    if difflib.get_close_matches(whole, same_name, n=1, cutoff=_TYPO_RATIO):
        same_name = same_name[:1]
    names = {setting.path.rpartition(".")[2]: setting.path for setting in _siblings(parts)}
    similar = [names[name] for name in difflib.get_close_matches(leaf, names, n=1, cutoff=0.6)]
    # In an existing table, the shared table name makes every path similar.
    close = difflib.get_close_matches(whole, all_paths, n=1, cutoff=0.6)
    found = same_name or similar or ([] if len(parts) > 1 and names else close)
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
