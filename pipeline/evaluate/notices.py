"""What a user should know about answers: before a run from the data, later from its evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from configs.schema import Config
from pipeline.evaluate.evaluation import Evaluation
from pipeline.evaluate.protocol import PLACES
from pipeline.evaluate.summary import show_number
from pipeline.run.records import Records
from pipeline.types import Prompt
from rewards.answers import is_correct
from rewards.base import Tags
from rewards.checks.probes import ANSWER, REASONING, expected_form

EVALUATION_NOTICE = "evaluation_notice"
"""Journal event of `evaluation_notice`."""
UNTRAINED_EXPORT = "untrained_export"
"""Key of `summary.json` with the text of `untrained_export`."""
_LEAST_PROMPTS = 8
"""Prompts below which equal results are no surprise."""
_SAMPLED_ROWS = 1000
_SHOWN = 60
_FIX_FORM = (
    "ask for it in prompt.system or prompt.template, show it in prompt.shots, begin it with "
    "prompt.answer_prefix, add an SFT phase, or set prompt.answer to where answers are"
)


def data_notices(config: Config, prompts: Sequence[Prompt]) -> Iterator[str]:
    """What the training prompts show about the form of answers, without a completion."""
    tags = replace(Tags.of_run(config), answer=config.extraction)
    marks = {"tags": tags.answer_open, "boxed": "boxed", "stated": "answer"}
    mark = marks.get(tags.answer)
    starts_trained = config.run.has_sft_phase or config.has_initial_adapter
    asked = (f"{prompt.text}{tags.prefix}".casefold() for prompt in prompts)
    if mark and not starts_trained and not any(mark.casefold() in text for text in asked):
        yield (
            f"answers are {PLACES[tags.answer]}, but no training prompt contains {mark!r}, and "
            "neither an SFT phase nor a trained adapter comes before GRPO: only a model that was "
            f"trained on this form knows it. If model.path was not, {_FIX_FORM}"
        )
    ends = (*config.rollout.stop_tokens, *config.rollout.stop_strings)
    if tags.answer == "first_line" and config.prompt.turn == "plain" and "\n" not in ends:
        yield (
            "answers are the first line, and without turns nothing ends a completion there: what "
            "follows is sampled and trained as well. Set rollout.stop_tokens = "
            '["<eos>", "\\n", "\\n\\n"]'
        )
    chosen = [prompt for prompt in prompts[:_SAMPLED_ROWS] if prompt.answer is not None]
    missed = [prompt for prompt in chosen if not _is_reachable(prompt.answer or "", tags)]
    if missed and not config.uses_rewards:
        first = missed[0]
        yield (
            f"{len(missed)} of {len(chosen)} reference answers cannot be given: a completion with "
            f"exactly this answer as {PLACES[tags.answer]} is wrong, e.g. that of row {first.id}, "
            f"{_short(first.answer)}; set data.answer_pattern, or prompt.answer"
        )


def _is_reachable(answer: str, tags: Tags) -> bool:
    """Whether a completion of the expected form with this answer counts as right."""
    text = expected_form(tags).replace(REASONING, "").replace(ANSWER, answer)
    return is_correct(tags.prefix + text, answer=answer, tags=tags)


def record_truncation(records: Records, config: Config) -> None:
    """Warns and journals if top_k, top_p or min_p truncate the sampling distribution."""
    rollout, cap = config.rollout, config.learner.importance_cap
    if not rollout.truncates:
        return
    cut = {"top_k": rollout.top_k, "top_p": rollout.top_p, "min_p": rollout.min_p}
    shown = ", ".join(f"{name} {value:g}" for name, value in cut.items())
    corrects = (
        f"importance weights up to {cap:g} correct for it, except for excluded tokens"
        if cap
        else "nothing corrects for it (learner.importance_cap is 0)"
    )
    records.event(
        "truncated_rollouts",
        f"rollouts are sampled from a truncated distribution ({shown}): the sampler is not the "
        "policy that is trained; the loss uses log-probs of the full distribution, and "
        f"{corrects}",
        **cut,
        importance_cap=cap,
    )


def evaluation_notice(found: Evaluation, config: Config) -> str | None:
    """Why all answers before training may be wrong, or all right; None if it is neither."""
    values = found.verdicts if found.is_accuracy else found.scores
    prompts, known = len(values), values[~np.isnan(values)]
    if prompts < _LEAST_PROMPTS or not len(known) or known.min() != known.max():
        return None
    if not found.is_accuracy:
        return (
            f"every answer has the score {show_number(float(known[0]))} by eval.metric = "
            f'"{found.metric}": versions cannot be told apart, and a group of equal rewards '
            "teaches nothing; python -m launch.reward tries the rewards"
        )
    if known[0] == 1:
        return (
            f"the accuracy is 100% on {prompts} prompts: there is nothing to learn on them. "
            "Choose harder ones, or see whether the metric accepts too much: python -m "
            "launch.reward tries rewards on wrong answers"
        )
    return f"the accuracy is 0% on {prompts} prompts: {_why_all_wrong(found, config)}"


def record_notice(
    records: Records, name: str, step: int, found: Evaluation, *, config: Config
) -> None:
    """Warns of an evaluation before training by `evaluation_notice`, once in a run."""
    text = evaluation_notice(found, config)
    if text is not None and not any(records.folder.events(EVALUATION_NOTICE)):
        what = f"{name}: {text}"
        shown = f"WARNING: {what}"
        records.event(EVALUATION_NOTICE, shown, evaluation=name, step=step, what=what)


def _why_all_wrong(found: Evaluation, config: Config) -> str:
    answers, place = found.answers, PLACES[config.extraction]
    count, cut = len(answers), sum(one.stop_reason == "length" for one in answers)
    given = [one for one in answers if one.found]
    text = f"{len(given)} of {count} completions have an answer ({place}), {cut} are truncated. "
    if 2 * len(given) < count:
        more = "; raise rollout.max_new_tokens" if 2 * cut > count else ""
        return f"{text}The model does not write answers in this form: {_FIX_FORM}{more}"
    first = given[0]
    reads = "" if config.uses_rewards else ", or a reward such as rewards.numeric:numeric_answer"
    example = f"e.g. {_short(first.found)} where the reference is {_short(first.answer)}"
    return (
        f"{text}They differ from the references, {example}: if they are right in other words, set "
        f"prompt.answer or data.answer_pattern{reads}; else the prompts may be too hard"
    )


def untrained_export(
    config: Config, *, step: int, validations: Sequence[Mapping[str, Any]]
) -> str | None:
    """Says after `step` steps why the model before training is exported; None before the first."""
    if step == 0:
        return None
    trained = sum(entry["step"] > 0 for entry in validations)
    start = config.version_0
    if not trained:
        what = "validated" if config.validates else "exported"
        return f"no trained version could be {what} in time; the export is the {start} model"
    count = "1 validation" if trained == 1 else f"{trained} validations"
    return (
        f"no validated version was better than the {start} model; the export is the {start} model "
        f"({count} over {step} steps, by {config.metric!r}). "
        "Likely causes: too few steps, a learning rate (learner.lr) that is too low or too "
        "high, rewards that do not lead to what the validation measures, answers that are not "
        "found (prompt.answer), or a validation set too small to show a gain"
    )


def _short(text: str | None) -> str:
    assert text is not None
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "...")
