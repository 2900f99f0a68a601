"""Tries the reward functions of a configuration on probes of its training data."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from configs.schema import Config
from launch.exits import EXIT_MISTAKE, Failure, say
from launch.preparation import Prepared
from launch.reward_columns import check_columns, scored_splits
from launch.reward_rows import case_rows, probe_rows, read_training_data
from pipeline.data.references import reference_notices
from pipeline.data.splits import LoadedData
from pipeline.evaluate.notices import data_notices
from pipeline.evaluate.protocol import PLACES
from pipeline.run.report.reward_check import Figures, check_figures, check_lines, finding_lines
from rewards.checks.cases import Case, mismatches, parse_cases
from rewards.checks.findings import Finding, find
from rewards.checks.probes import Probe, make_probes
from rewards.checks.trial import Trial, run_trial
from rewards.processes.host import RewardHost
from rewards.processes.log import RewardLog

_DRY_RUN_ROWS = 8
_CHARACTERS_PER_TOKEN = 4


def prepare_check(
    config: Config, *, rows: int, form: str | None, cases: str | None
) -> Callable[[RewardLog], tuple[Figures, list[str], bool]]:
    """Reads data and cases; returns the check, see `launch.reward.Work`.

    Args:
        config: with the reward functions and the data.
        rows: number of rows for probes.
        form: of a right completion; see `make_probes`.
        cases: file with cases of the user.

    Raises:
        FileNotFoundError: if data or cases are missing.
        ValueError: with the mistakes in them.
    """
    data = read_training_data(config)
    probes = _probes(config, data, rows=rows, form=form)
    found = [] if cases is None else _read_cases(Path(cases), config, data)
    return partial(_check, config, data, probes, found)


def _check(
    config: Config,
    data: LoadedData,
    probes: Sequence[Probe],
    cases: Sequence[Case],
    log: RewardLog,
) -> tuple[Figures, list[str], bool]:
    scored = [*probes, *(case.probe for case in cases)]
    trial = asyncio.run(_try(config, data, scored, log=log))
    per_step = config.rollout.prompts_per_step * config.rollout.group_size
    findings = [*find(trial, rollouts_per_step=per_step), *mismatches(cases, trial)]
    findings += _of_references(config, data)
    findings.sort(key=lambda finding: not finding.fails)
    rows = len({probe.row for probe in probes})
    figures = check_figures(trial, findings, rows=rows, rollouts_per_step=per_step)
    return figures, [*_left_out(config), *check_lines(figures)], figures["passed"]


def prompt_lines(prepared: Prepared) -> Iterator[str]:
    """The first training prompt as the model reads it."""
    first = prepared.data.train.prompts[0]
    yield f"prompt of row {first.id}:"
    text = first.text + prepared.config.prompt.answer_prefix
    yield from (f"    {line}" for line in text.split("\n"))
    if first.answer is not None:
        yield f"its reference answer: {first.answer!r}"
    config = prepared.config
    what = f"the reward {config.metric!r}" if config.uses_rewards else "equality with the reference"
    yield f"measured by {what} (eval.metric); answer: {PLACES[config.extraction]}"


def dry_run(prepared: Prepared) -> int:
    """Prints what fails in a short check of a run's rewards, as warnings.

    Returns:
        The exit status: not 0 if a weighted part has no score for any completion.
    """
    config, data = prepared.config, prepared.data
    for line in data_notices(config, data.train.prompts):
        say(f"note: {line}", file=sys.stderr)
    config = config.model_copy(update={"rewards": config.rewards.single_process()})
    probes = _probes(config, data, rows=_DRY_RUN_ROWS)
    trial = asyncio.run(_try(config, data, probes, log=RewardLog(None), short=True))
    per_step = config.rollout.prompts_per_step * config.rollout.group_size
    findings = [one for one in find(trial, rollouts_per_step=per_step) if one.fails]
    findings += _of_references(config, data)
    shown = f"rewards, tried on {len(probes)} completions"
    say(f"{shown} (python -m launch.reward CONFIG.toml shows more):", file=sys.stderr)
    for line in finding_lines([vars(one) | {"fails": False} for one in findings]):
        say(line, file=sys.stderr)
    failed = [
        name
        for name, weight in trial.weights.items()
        if weight and all(one.outcomes[name].error is not None for one in trial.scored)
    ]
    return EXIT_MISTAKE if failed else 0


async def _try(
    config: Config,
    data: LoadedData,
    probes: Sequence[Probe],
    *,
    log: RewardLog,
    short: bool = False,
) -> Trial:
    """Scores the probes.

    Raises:
        Failure: if a function cannot be used, with a line for each.
    """
    host = RewardHost(config.rewards, log=log)
    try:
        try:
            facts = await host.start()
            check_columns(facts, scored_splits(config, data))
        except ValueError as error:
            raise Failure(error, EXIT_MISTAKE) from None
        return await run_trial(probes, host, rewards=config.rewards, facts=facts, short=short)
    finally:
        await host.close()


def _probes(config: Config, data: LoadedData, *, rows: int, form: str | None = None) -> list[Probe]:
    return make_probes(
        probe_rows(data.train.prompts, config, count=rows),
        form=form,
        plain=config.prompt.turn == "plain",
        characters=_CHARACTERS_PER_TOKEN * config.rollout.max_new_tokens,
    )


def _read_cases(path: Path, config: Config, data: LoadedData) -> list[Case]:
    """Reads the cases.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: with a line for each mistake in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"command line: --cases: no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"command line: --cases: {path} cannot be read: {error}") from None
    return parse_cases(
        text,
        file=path.name,
        row_of=case_rows(data.train.prompts, config),
        parts=[part.name for part in config.rewards.functions],
    )


def _of_references(config: Config, data: LoadedData) -> Iterator[Finding]:
    for notice in reference_notices(config, data):
        yield Finding("references", what=notice.what, advice=notice.advice)


def _left_out(config: Config) -> Iterator[str]:
    if config.rollout.overlong_tokens:
        yield "the part of rollout.overlong_tokens is left out: it counts tokens"
