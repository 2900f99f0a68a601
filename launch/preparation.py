"""Checks before devices are reserved: run folder, model folder, data, rewards, W&B."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np

from configs.base import MissingSetting, is_handle, nearest_hint
from configs.errors import MistakeCollector
from configs.load import load_config
from configs.resume import code_changes, diff_configs, is_accepted, refusal
from configs.schema import Config
from launch.exits import say
from launch.flags import SUBMITTED, SUPERVISOR
from launch.fork import check_base
from launch.reward_columns import check_columns, scored_splits
from pipeline.budget import Budget, extension, used_s
from pipeline.data.load import check_rows, load_data, setting_name
from pipeline.data.models import hf_folder
from pipeline.data.models.fingerprint import weights_fingerprint
from pipeline.data.models.hf_config import read_model_shape
from pipeline.data.models.model_source import find_model
from pipeline.data.order import check_window
from pipeline.data.splits import EVAL_SET_PREFIX, LoadedData
from pipeline.data.text.special_tokens import check_tokenizer
from pipeline.data.text.tokenizer import Tokenizer
from pipeline.data.text.tokenizer_files import open_tokenizer
from pipeline.deadline import least_run_s, show_duration
from pipeline.evaluate.metric import check_references, with_metric
from pipeline.plan.search.fitting import with_chosen_placement
from pipeline.plan.search.suggestions import settings_text
from pipeline.run import tracking
from pipeline.run.history import STARTED, provenance
from pipeline.run.mirror import check_mirror
from pipeline.run.run_folder import RunFolder
from rewards.base import RewardFacts
from rewards.processes.host import check


@dataclass(frozen=True)
class Prepared:
    """A validated request, checked as far as possible without devices.

    The run folder does not exist yet if the run is new. `extend` is a budget to add, `reward_code`
    the SHA-256 of the file that defines each reward function, by name, `base` the fingerprint of
    the base's weights.
    """

    config: Config
    data: LoadedData
    tokenizer: Tokenizer
    folder: RunFolder
    extend: Budget | None
    wandb_mode: tracking.Mode
    reward_code: Mapping[str, str] = field(default_factory=dict)
    base: str | None = None


def placed(config: Config) -> Config:
    """Returns the configuration with the placement of the run; prints what the planner chooses.

    Raises:
        ValueError: if no placement suits the other settings.
    """
    folder = RunFolder.of(config)
    saved = load_config(folder.path) if folder.holds_run else None
    try:
        found = with_chosen_placement(config, saved)
    except FileNotFoundError:
        return config  # a missing model is reported by `prepare`
    if config.plan.placement == "auto" and SUPERVISOR not in os.environ:
        changes = diff_configs(config.model_dump(mode="json"), found.model_dump(mode="json"))
        chosen = settings_text({key: value for key, _, value in changes})
        say(f'with plan.placement = "auto" this run has {chosen}')
    return found


def finished(config: Config, *, extend: str | None, accept: Collection[str] = ()) -> str | None:
    """Returns a message if the run has used its budget; None if there is work to do.

    Raises:
        ValueError: if the folder holds a run with other settings, or a finished run whose budget
            was raised after its learning rate had decayed to zero.
    """
    folder = RunFolder.of(config)
    folder.check(config, accept=accept)
    summary = folder.summary
    if extend is not None or summary is None or summary["ended"] != "finished":
        return None
    budget, deadline_s = Budget.of(config, folder), summary["deadline_s"] or 0
    if budget.steps is not None and summary["steps"] < budget.steps:
        return None
    more_time = budget.time_s is not None and deadline_s < budget.time_s
    if more_time or (budget.until_s is not None and summary.get("until_s") != budget.until_s):
        if config.plans_decay:
            raise ValueError(
                f"{budget.name}: the run in {folder.path} is finished, and its learning rate has "
                "decayed to zero; --run.name starts another run"
            )
        return None
    return (
        f"{folder.path} is finished after {summary['steps']} steps; its results are in "
        "summary.json. --run.name starts another run, --extend continues this one"
    )


def prepare(
    config: Config,
    *,
    extend: str | None,
    accept: Collection[str] = (),
    found: MistakeCollector | None = None,
) -> Prepared:
    """Checks everything and prints what was found.

    `found` has the mistakes that are already known; `accept`: see `configs.resume`.

    Raises:
        FileNotFoundError: if model, tokenizer or data are missing.
        ValueError: with all mistakes, one line each. A check that depends on a refused setting is
            skipped.
    """
    found = found or MistakeCollector()
    folder, more, base = found.attempt(RunFolder.of, config), None, None
    chosen = found.attempt(tracking.choose_mode, config)
    found.attempt(check_devices, config)
    if folder is not None:
        found.attempt(folder.check_writable)
        found.attempt(check_mirror, config.run.mirror, folder.path)
    found.attempt(lambda: _check_folder("learner.teacher", config.learner.teacher))
    rewards = found.attempt(lambda: check(config.rewards))
    model, tokenizer = _check_model(config, found)
    if folder is not None:
        if extend is not None:
            more = found.attempt(extension, extend, config, folder)
        base = _check_weights(config, found, folder, model=model, more=more)
    data = _check_data(config, found, tokenizer, folder)
    if data is not None and folder is not None:
        config = _check_metric(config, found, data, folder)
    if rewards is not None and data is not None:
        if folder is not None:
            found.attempt(check_same_code, folder, reward_code(rewards), accept=accept)
        found.attempt(check_columns, rewards, list(scored_splits(config, data)))
    found.raise_if_any()
    assert tokenizer is not None
    assert rewards is not None
    assert data is not None
    assert chosen is not None
    assert folder is not None
    mode, why = chosen
    if mode == "offline":
        why += f"; files in {folder.path / 'wandb'}"
    for line in (why, *data.report):
        say(line)
    return Prepared(config, data, tokenizer, folder, more, mode, reward_code(rewards), base)


def _check_folder(key: str, path: str | None) -> None:
    if path is not None and not Path(path).is_dir():
        raise FileNotFoundError(f"{key}: no folder {path}{nearest_hint(Path(path))}")


def check_start(config: Config, model: Path | None) -> None:
    """Checks the adapter of `lora.start`, and the tensors of a flax checkpoint.

    Without the model's folder only the settings of an adapter in PEFT's format are checked.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if it cannot be read, or does not fit the model or the settings.
    """
    start = config.lora.start
    _check_folder("lora.start", start)
    # Imported late: they import JAX.
    if model is not None and (start is not None or hf_folder.flax_folder(model) is not None):
        from pipeline.compute import opening

        opening.check_model(model, config)
    elif start is not None:
        from pipeline.compute.model import adapter_source

        adapter_source.check_start(config.lora)


def check_devices(config: Config) -> None:
    """Compares the plan with the devices of this machine, without taking them.

    The devices of a submitted run belong to other machines, so nothing is compared where it is
    submitted (`SUBMITTED` is set) or in the job (`RAY_ADDRESS` is set).

    Raises:
        ValueError: if this machine has too few devices, or the cluster's are to be counted here.
    """
    plan, chips = config.plan, config.run.tpu_chips
    if {SUBMITTED, "RAY_ADDRESS"} & os.environ.keys():
        if chips is not None:
            raise ValueError(
                f"run.tpu_chips = {chips}: a cluster counts the chips of its nodes; remove it, and "
                f"start the node with `ray start --resources='{{\"TPU\": {chips}}}'`"
            )
        return
    if plan.platform == "cpu":
        return
    # Imported late: it imports Ray.
    from actors.placement import count_devices, total_resources

    ((name, amount),) = total_resources(plan).items()
    count = count_devices(name, given=chips)
    if count < amount:
        counted = "this machine has" if chips is None else "run.tpu_chips gives"
        raise ValueError(
            f"plan.platform = {plan.platform!r} needs {amount:g} {name}, and {counted} {count}; "
            "no other kind of device is used instead. launch/submit.sh submits the run to a "
            "cluster that has them, python -m launch.doctor explains the count"
        )


def open_model_files(config: Config) -> Tokenizer:
    """Finds or downloads the model, checks its files and opens the tokenizer.

    Raises:
        FileNotFoundError: if model or tokenizer are missing.
        ValueError: with the mistakes in them, in words for the user.
    """
    found = MistakeCollector()
    _, tokenizer = _check_model(config, found)
    found.raise_if_any()
    assert tokenizer is not None
    return tokenizer


def _check_model(config: Config, found: MistakeCollector) -> tuple[Path | None, Tokenizer | None]:
    """Checks the model's files; returns its folder if they are valid, and the tokenizer.

    Nothing is downloaded for a request that has mistakes.
    """
    path = getattr(getattr(config, "model", None), "path", None)
    if path is None or (is_handle(path) and not found.is_empty):
        return None, None
    folder, is_valid = found.attempt(find_model, config.model), False
    if folder is not None:
        is_valid = found.attempt(_check_model_folder, folder) is not None
        found.attempt(check_targets, config, folder)
    there = folder is not None or config.model.tokenizer is not None
    tokenizer = found.attempt(open_tokenizer, config.model) if there else None
    if tokenizer is not None:
        found.attempt(_check_pieces, config, tokenizer, folder)
    return folder if is_valid else None, tokenizer


def check_targets(config: Config, folder: Path) -> None:
    """Checks `lora.targets` with the `config.json` of the model, if there is one.

    Raises:
        ValueError: if it matches no matrix, or the model is not supported.
    """
    if (folder / "config.json").is_file():
        read_model_shape(hf_folder.read_text_config(folder)).adapter_parameters(config.lora)


def _check_model_folder(folder: Path) -> Path:
    if (skipped := hf_folder.check_folder(folder)) is not None:
        say(skipped)
    return folder


def _check_weights(
    config: Config,
    found: MistakeCollector,
    folder: RunFolder,
    *,
    model: Path | None,
    more: Budget | None,
) -> str | None:
    """Checks weights, a new run's first adapter and the time; returns the base's fingerprint."""
    if not folder.holds_run:
        found.attempt(check_start, config, model)
    if model is None:
        return None
    base = found.attempt(_same_base, config, folder, model)
    budget = found.attempt(Budget.of, config, folder)
    if budget is not None:
        weights_bytes = sum(path.stat().st_size for path in model.rglob("*.safetensors"))
        found.attempt(_check_time, budget, folder, weights_bytes, more=more)
    return base


def _same_base(config: Config, folder: RunFolder, model: Path) -> str:
    """The fingerprint of the base's weights; compares it with that at the start of the run.

    Raises:
        ValueError: if it has changed, or is not that of the run from which this one forks.
    """
    base = weights_fingerprint(model)
    at_start = next((entry.get("base") for entry in folder.events(STARTED)), None)
    if at_start not in {None, base}:
        raise ValueError(
            f"model.path: the weights in {model} have changed since {folder.path} started; restore "
            "them, or start another run with --run.name"
        )
    check_base(config, base)
    return base


def _check_data(
    config: Config, found: MistakeCollector, tokenizer: Tokenizer | None, folder: RunFolder | None
) -> LoadedData | None:
    """Returns the data, if valid; checks only the rows if settings or tokenizer have mistakes."""
    try:
        data = None if tokenizer is None else load_data(config, tokenizer)
    except MissingSetting:
        data = None
    except (ValueError, FileNotFoundError) as mistake:
        found.add(mistake)
        return None
    if data is None:
        found.attempt(check_rows, config)
        return None
    if folder is not None:
        found.attempt(_check_same_data, data, folder)
    found.attempt(_check_steps, config, data)
    return data


def _check_metric(
    config: Config, found: MistakeCollector, data: LoadedData, folder: RunFolder
) -> Config:
    """Returns the configuration with its metric; checks that the data have what it needs."""
    evaluated = {"validation": data.validation, "test": data.test}
    sets = {f"{EVAL_SET_PREFIX}{name}": split for name, split in data.sets.items()}
    by_setting = {setting_name(name): split for name, split in (evaluated | sets).items()}
    saved = found.attempt(lambda: folder.saved_config) if folder.holds_run else None
    measured = found.attempt(with_metric, config, by_setting, saved=saved)
    if measured is not None:
        found.attempt(check_references, measured, by_setting)
    return measured or config


def _check_steps(config: Config, data: LoadedData) -> None:
    rollout = config.rollout
    if rollout.prompts_per_step > len(data.train.prompts):
        raise ValueError(
            f"rollout.prompts_per_step = {rollout.prompts_per_step} is more than the "
            f"{len(data.train.prompts)} prompts of data.train; nearest valid: "
            f"{len(data.train.prompts)}"
        )
    if rollout.max_prompts_per_step is not None:
        check_window(data.train.prompts, window=rollout.max_prompts_per_step, weights=data.weights)


def _check_pieces(config: Config, tokenizer: Tokenizer, folder: Path | None) -> None:
    mistakes, rollout = [], config.rollout
    for key in ("stop_tokens", "forbidden_tokens"):
        for piece in getattr(rollout, key):
            try:
                problem = tokenizer.problem_of(np.array([tokenizer.piece_id(piece)]))
            except ValueError as error:
                problem = str(error)
            if problem is not None:
                mistakes.append(f"rollout.{key}: {problem}")
    for text in rollout.stop_strings:
        decoded = tokenizer.decode(tokenizer.encode(text))
        if decoded != text:
            mistakes.append(
                f"rollout.stop_strings: {text!r} never appears in generated text: "
                f"{tokenizer.path} decodes it to {decoded!r}; tokens without text belong to "
                "rollout.stop_tokens"
            )
    if folder is not None:
        try:
            check_tokenizer(
                tokenizer, folder=folder, vocab_size=None, stop_tokens=rollout.stop_tokens
            )
        except ValueError as mistake:
            mistakes.append(str(mistake))
    if mistakes:
        raise ValueError("\n".join(mistakes))


def reward_code(rewards: Sequence[RewardFacts]) -> dict[str, str]:
    """SHA-256 of the file that defines each reward function, by name."""
    return {facts.name: facts.sha256 for facts in rewards if facts.sha256 is not None}


def check_same_code(folder: RunFolder, code: Mapping[str, str], *, accept: Collection[str]) -> None:
    """Refuses to resume a run whose reward functions have changed, unless that is accepted.

    Raises:
        ValueError: naming each changed part.
    """
    changes = code_changes(provenance(folder.entries()).get("rewards", {}), code)
    refused = [change for change in changes if not is_accepted(change, accept)]
    if refused:
        raise ValueError(
            f"the reward functions have changed since {folder.path} was last started; "
            f"{refusal(refused)}"
        )


def _check_time(
    budget: Budget, folder: RunFolder, weights_bytes: int, *, more: Budget | None
) -> None:
    """Refuses a budget that is too small by estimates alone, before anything is measured.

    An unfinished run with a checkpoint is never refused: if too little time is left, the run ends
    with the version that it has.

    Raises:
        ValueError: naming the minimum.
    """
    now_s, budget = time.time(), budget if more is None else budget + more
    clock = f"it is {datetime.now().astimezone():%Y-%m-%dT%H:%M:%S%z} now"
    summary = folder.summary
    is_finished = summary is not None and summary["ended"] == "finished"
    if budget.until_s is not None and not is_finished:
        if budget.until_s > now_s:
            say(f"{budget.name}; {clock}")
        elif any(entry["step"] for entry in folder.events("checkpoint")):
            say(f"{budget.name} has passed: {clock}; the run ends with its latest version")
        else:
            raise ValueError(f"{budget.name} has passed: {clock}; set a later one")
    elapsed_s = used_s(folder) if is_finished else 0.0
    deadline_s = budget.deadline_s(elapsed_s=elapsed_s, now_s=now_s)
    if deadline_s is None or (not is_finished and any(True for _ in folder.events(STARTED))):
        return
    left_s, least_s = max(deadline_s - elapsed_s, 0.0), least_run_s(weights_bytes)
    if left_s < least_s:
        raise ValueError(
            f"{budget.name} is too short: {show_duration(left_s)} of it are left; loading, one "
            f"step and the export at the end take at least {show_duration(least_s)} (estimated)"
        )


def _check_same_data(data: LoadedData, folder: RunFolder) -> None:
    """Compares the prompts with those at the start of the run; settings only name their files.

    Raises:
        ValueError: naming the changed splits.
    """
    at_start = next((entry["data"] for entry in folder.events(STARTED)), data.fingerprints)
    changed = [name for name, found in data.fingerprints.items() if at_start.get(name) != found]
    if changed:
        raise ValueError(
            f"{' and '.join(map(setting_name, changed))}: the prompts have changed since "
            f"{folder.path} started; restore them, or start another run with --run.name"
        )
