"""Tries the reward functions of a configuration on probes of its training data."""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.schema import Config
from launch.exits import EXIT_MISTAKE, say
from launch.preparation import Prepared
from launch.reward_columns import check_columns, scored_splits
from launch.reward_rows import case_rows, probe_rows, read_training_data
from pipeline.data.references import reference_notices
from pipeline.data.splits import LoadedData
from pipeline.evaluate.notices import data_notices
from pipeline.evaluate.protocol import PLACES
from pipeline.rollout.scoring import SUM
from pipeline.tables import table
from rewards.base import NAME_SEPARATOR
from rewards.checks.cases import Case, mismatches, parse_cases
from rewards.checks.findings import Finding, find
from rewards.checks.probes import REFERENCE, Probe, make_probes
from rewards.checks.trial import Scored, Trial, run_trial
from rewards.processes.host import RewardHost
from rewards.processes.log import RewardLog

Figures = Mapping[str, Any]
_DRY_RUN_ROWS = 8
_CHARACTERS_PER_TOKEN = 4


def check(
    config: Config, *, log: RewardLog, rows: int, form: str | None, cases: str | None
) -> tuple[Figures, Iterator[str]]:
    """Scores probes and cases; returns the figures as JSON, and the report.

    `rows` is the number of rows for probes, `form` that of a right completion (see `make_probes`),
    `cases` a file with cases of the user.

    Raises:
        FileNotFoundError: if data or cases are missing.
        ValueError: with the mistakes in them, or in the functions.
    """
    data = read_training_data(config)
    probes = _probes(config, data, rows=rows, form=form)
    own = [] if cases is None else _read_cases(Path(cases), config, data)
    trial = asyncio.run(_try(config, data, [*probes, *(probe for _, probe in own)], log=log))
    findings = [
        *find(trial, rollouts_per_step=config.rollout.size),
        *mismatches([case for case, _ in own], trial),
        *_of_references(config, data),
    ]
    findings.sort(key=lambda finding: not finding.fails)
    figures = _figures(trial, findings)
    return figures, _lines(config, figures, findings)


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
    found = find(trial, rollouts_per_step=config.rollout.size)
    failing = [one for one in found if one.fails]
    shown = f"rewards, tried on {len(probes)} completions"
    say(f"{shown} (python -m launch.reward CONFIG.toml shows more):", file=sys.stderr)
    for line in _finding_lines([*failing, *_of_references(config, data)], error="warning"):
        say(line, file=sys.stderr)
    unscored = [
        name
        for name, weight in trial.weights.items()
        if weight and all(one.outcomes[name].error is not None for one in trial.scored)
    ]
    return EXIT_MISTAKE if unscored else 0


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


async def _try(
    config: Config,
    data: LoadedData,
    probes: Sequence[Probe],
    *,
    log: RewardLog,
    short: bool = False,
) -> Trial:
    """Scores the probes; a function that cannot be used is a mistake."""
    async with RewardHost(config.rewards, log=log) as host:
        facts = await host.start()
        check_columns(facts, scored_splits(config, data))
        return await run_trial(probes, host, rewards=config.rewards, facts=facts, short=short)


def _probes(config: Config, data: LoadedData, *, rows: int, form: str | None = None) -> list[Probe]:
    return make_probes(
        probe_rows(data.train.prompts, config, count=rows),
        form=form,
        plain=config.prompt.turn == "plain",
        characters=_CHARACTERS_PER_TOKEN * config.rollout.max_new_tokens,
    )


def _read_cases(path: Path, config: Config, data: LoadedData) -> list[tuple[Case, Probe]]:
    """Reads the cases; the errors name the file and the lines with mistakes."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"command line: --cases: no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"command line: --cases: {path} cannot be read: {error}") from None
    parts = [part.name for part in config.rewards.functions]
    row_of = case_rows(data.train.prompts, config)
    return parse_cases(text, file=path.name, row_of=row_of, parts=parts)


def _of_references(config: Config, data: LoadedData) -> Iterator[Finding]:
    for notice in reference_notices(config, data):
        yield Finding("references", what=notice.what, advice=notice.advice)


# --- the report


def _figures(trial: Trial, findings: Sequence[Finding]) -> dict[str, Any]:
    """All figures of the report, as JSON."""
    by_name = defaultdict[str, list[Scored]](list)
    for one in trial.scored:
        by_name[one.probe.name].append(one)
    return {
        "rows": len({one.probe.row for one in trial.scored if one.probe.kind != "case"}),
        "completions": len(trial.scored),
        "has_references": REFERENCE in by_name,
        "parts": [
            {
                "name": part.name,
                "function": part.function,
                "form": trial.facts[part.name].kind,
                "weight": part.weight,
                "seconds": trial.seconds.get(part.name),
            }
            for part in trial.rewards.functions
        ],
        "probes": [
            {"name": name, "kind": own[0].probe.kind, "n": len(own), "columns": _columns(own)}
            for name, own in by_name.items()
        ],
        "findings": [asdict(finding) for finding in findings],
        "passed": not any(finding.fails for finding in findings),
    }


def _columns(own: Sequence[Scored]) -> dict[str, Any]:
    """The scores of one probe in all rows: parts, the numbers that they return, their sum."""
    values, errors = defaultdict[str, list[float | None]](list), Counter[str]()
    for one in own:
        for name, outcome in one.outcomes.items():
            values[name].append(outcome.value)
            errors[name] += outcome.error is not None
            for key, value in outcome.named.items():
                values[f"{name}{NAME_SEPARATOR}{key}"].append(value)
    values[SUM] = [one.total for one in own]
    columns = dict[str, Any]()
    for name, all_values in values.items():
        known = [value for value in all_values if value is not None]
        columns[name] = {
            "mean": statistics.fmean(known) if known else None,
            "min": min(known, default=None),
            "max": max(known, default=None),
            "errors": errors[name],
        }
    return columns


def _lines(config: Config, figures: Figures, findings: Sequence[Finding]) -> Iterator[str]:
    """The lines of the report."""
    if config.rollout.overlong_tokens:
        yield "the part of rollout.overlong_tokens is left out: it counts tokens"
    yield (
        f"{figures['completions']} completions for {figures['rows']} rows of the training data; "
        "mean (lowest..highest)"
    )
    if not figures["has_references"]:
        yield (
            "the rows have no reference answers: what compares with them is left out; --cases FILE "
            "checks completions of yours"
        )
    yield ""
    columns = dict.fromkeys(name for probe in figures["probes"] for name in probe["columns"])
    rows = [["completion", "n", *columns, ""]]
    for probe in figures["probes"]:
        cells = [_cell(probe["columns"].get(name)) for name in columns]
        rows.append([probe["name"], f"{probe['n']}", *cells, probe["kind"]])
    seconds = {part["name"]: part["seconds"] for part in figures["parts"]}
    cells = [f"{each:.3g} s" if (each := seconds.get(name)) else "" for name in columns]
    rows.append(["time of a completion", "", *cells, ""])
    yield from table(rows)
    yield ""
    yield from _finding_lines(findings, error="ERROR")


def _cell(found: Figures | None) -> str:
    if found is None:
        return ""
    errors = f" {found['errors']} errors" if found["errors"] else ""
    if found["mean"] is None:
        return f"-{errors}"
    spread = f" ({found['min']:.3g}..{found['max']:.3g})" if found["min"] != found["max"] else ""
    return f"{found['mean']:.3g}{spread}{errors}"


def _finding_lines(findings: Sequence[Finding], *, error: str) -> Iterator[str]:
    """The findings with their advice; those that fail are called `error`."""
    if not findings:
        yield "nothing is wrong"
    for finding in findings:
        yield f"{error if finding.fails else 'warning'}: {finding.what}"
        yield from (f"    {example}" for example in finding.examples)
        yield f"  {finding.advice}"
