"""Scores the recorded rollouts of a run again, with the reward functions of a configuration."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from configs.load import load_config
from configs.schema import Config
from launch.exits import EXIT_MISTAKE, Failure
from pipeline.rollout.scoring import SUM, score_parts
from pipeline.run.report.rescoring import Figures, Rescored, rescoring_figures, rescoring_lines
from pipeline.run.rollout_records import recorded_input
from pipeline.run.run_folder import RunFolder
from rewards.base import Outcome, RewardInput, Tags
from rewards.processes.host import RewardHost
from rewards.processes.log import RewardLog

_CHUNK = 256
"""Rollouts that are scored between two updates of the progress."""

Record = Mapping[str, Any]
Recorded = Sequence[tuple[Record, RewardInput]]


def prepare_rescoring(
    config: Config, run_dir: str, *, steps: str | None, show: int
) -> Callable[[RewardLog], tuple[Figures, Iterator[str], bool]]:
    """Reads the recorded rollouts; returns the work, see `launch.reward.Work`.

    Args:
        config: with the reward functions.
        run_dir: folder of the run.
        steps: first and last step, as "A:B", "A:", ":B" or "A"; None: all.
        show: completions of each kind in the report.

    Raises:
        FileNotFoundError: if there are no such rollouts.
        ValueError: if they cannot be read or scored again.
    """
    folder = RunFolder(Path(run_dir).expanduser())
    tags = Tags.of_run(load_config(folder.path))
    first, last = _range(steps)
    numbers = folder.rollout_steps()
    asked = [one for one in numbers if first <= one and (last is None or one <= last)]
    if not asked:
        has = f"it has steps {numbers[0]} to {numbers[-1]}" if numbers else "it has none"
        raise FileNotFoundError(f"{folder.rollouts}: no rollouts of the steps asked for; {has}")
    names = [f"step_{one:06d}" for one in asked]
    recorded = list(_read(folder, names, tags))
    if not recorded:
        raise ValueError(f"{folder.rollouts}: no rollouts in {', '.join(names)}")
    return partial(_rescore, config, recorded, show)


def _rescore(
    config: Config, recorded: Recorded, show: int, log: RewardLog
) -> tuple[Figures, Iterator[str], bool]:
    outcomes = asyncio.run(_score(config, [given for _, given in recorded], log=log))
    rollouts = [
        _rescored(record, given, own, config)
        for (record, given), own in zip(recorded, outcomes, strict=True)
    ]
    figures = rescoring_figures(rollouts, extraction=config.extraction, show=show)
    return figures, rescoring_lines(figures), not figures["errors"]


async def _score(
    config: Config, inputs: Sequence[RewardInput], *, log: RewardLog
) -> list[dict[str, Outcome]]:
    """Scores all inputs.

    Raises:
        Failure: if a function cannot be used, with a line for each.
    """
    host, found = RewardHost(config.rewards, log=log), list[dict[str, Outcome]]()
    try:
        try:
            await host.start()
        except ValueError as error:
            raise Failure(error, EXIT_MISTAKE) from None
        with tqdm(total=len(inputs), unit="rollout", delay=2, leave=False, disable=None) as bar:
            for start in range(0, len(inputs), _CHUNK):
                found += await host.score(inputs[start : start + _CHUNK])
                bar.update(len(found) - start)
    finally:
        await host.close()
    return found


def _read(
    folder: RunFolder, names: Sequence[str], tags: Tags
) -> Iterator[tuple[Record, RewardInput]]:
    for name in names:
        for record in folder.read_rollouts(name):
            yield record, recorded_input(record, tags=tags)


def _rescored(
    record: Record, given: RewardInput, outcomes: Mapping[str, Outcome], config: Config
) -> Rescored:
    scores = score_parts(outcomes, num_tokens=record["num_tokens"], config=config)
    return Rescored(
        step=record["step"],
        sample=record["sample"],
        given=given,
        before={**record["rewards"], SUM: record["reward"]},
        after={**scores.rewards, SUM: scores.reward},
        errors=scores.errors,
    )


def _range(steps: str | None) -> tuple[int, int | None]:
    """First and last step.

    Raises:
        ValueError: if the text has another form.
    """
    if steps is None:
        return 0, None
    match = re.fullmatch(r"(\d*)(:?)(\d*)", steps, re.ASCII)
    if match is None or not (match[1] or match[3]):
        raise ValueError(f"command line: --steps {steps}: must be A:B, A:, :B or a single step")
    first = int(match[1] or 0)
    last = int(match[3]) if match[3] else None if match[2] else first
    if last is not None and last < first:
        raise ValueError(
            f"command line: --steps {steps}: the last step is before the first; nearest valid: "
            f"{first}:{first}"
        )
    return first, last
