"""All that can be checked before devices are taken: run folder, model folder, data, rewards, W&B."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configs.schema import Config
from pipeline import hf_folder, tracking
from pipeline.budget import Budget, extension
from pipeline.dataset import load_data
from pipeline.run_dir import RunFolder
from pipeline.splits import LoadedData
from pipeline.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prepared:
    """A request that nothing is wrong with, as far as can be told without devices.

    Attributes:
        config: what to do.
        data: prompts of the splits.
        tokenizer: the model's.
        folder: the run folder; not made yet if the run is new.
        extend: budget to add, if any.
        wandb_mode: how W&B will run.
    """

    config: Config
    data: LoadedData
    tokenizer: Tokenizer
    folder: RunFolder
    extend: Budget | None
    wandb_mode: tracking.Mode


def finished(config: Config, *, extend: str | None) -> str | None:
    """A sentence if the run has used its budget; None if there is something to do.

    Raises:
        ValueError: if the folder holds a run with other settings.
    """
    folder = RunFolder.of(config)
    folder.check(config)
    summary = folder.summary
    if extend is not None or summary is None or summary["ended"] != "finished":
        return None
    budget = Budget.of(config, folder)
    if budget.steps is not None and summary["steps"] < budget.steps:
        return None
    return (
        f"{folder.path} is finished after {summary['steps']} steps; its results are in "
        "summary.json. --run.name starts another run, --extend goes on with this one"
    )


def prepare(config: Config, *, extend: str | None) -> Prepared:
    """Checks everything and says what was found.

    Raises:
        FileNotFoundError: if model, tokenizer or data are not there.
        ValueError: what is wrong with them, in words for the user.
    """
    folder = RunFolder.of(config)
    more = None if extend is None else extension(extend, config, folder)
    mode, why = tracking.choose_mode(config)
    print(f"{why}; files in {folder.path / 'wandb'}" if mode == "offline" else why, flush=True)
    model = Path(config.model.path)
    hf_folder.read_config(model)
    hf_folder.weight_files(model)
    tokenizer = Tokenizer(model)
    for piece in (*config.rollout.stop_tokens, *config.rollout.forbidden_tokens):
        tokenizer.piece_id(piece)
    data = load_data(config, tokenizer)
    if config.rollout.prompts_per_step > len(data.train.prompts):
        raise ValueError(
            f"rollout.prompts_per_step = {config.rollout.prompts_per_step} is more than the "
            f"{len(data.train.prompts)} prompts of data.train"
        )
    for line in data.report:
        print(line, flush=True)
    return Prepared(config, data, tokenizer, folder, more, mode)
