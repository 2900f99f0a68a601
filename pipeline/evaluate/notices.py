"""What a user should know about answers: before a run from the data, later from its evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from configs.schema import Config
from pipeline.evaluate.evaluation import Evaluation
from pipeline.evaluate.protocol import PLACES
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
        yield (
            f"{len(missed)} of {len(chosen)} reference answers cannot be given: a completion with "
            f"exactly this answer as {PLACES[tags.answer]} is wrong, e.g. that of row "
            f"{missed[0].id}, {_short(missed[0].answer)}; set data.answer_pattern, or prompt.answer"
        )


def _is_reachable(answer: str, tags: Tags) -> bool:
    """Whether a completion of the expected form with this answer counts as right."""
    text = expected_form(tags).replace(REASONING, "").replace(ANSWER, answer)
    return is_correct(tags.prefix + text, answer=answer, tags=tags)


def evaluation_notice(found: Evaluation, config: Config) -> str | None:
    """Why all answers before training may be wrong, or all right; None if it is neither."""
    known = found.correct
    if not found.is_accuracy or len(known) < _LEAST_PROMPTS or known.any() != known.all():
        return None
    if known.all():
        return (
            f"the accuracy is 100% on {len(known)} prompts: there is nothing to learn on them. "
            "Choose harder ones, or see whether the metric accepts too much: python -m "
            "launch.reward tries rewards on wrong answers"
        )
    answers, place = found.answers, PLACES[config.extraction]
    cut = sum(one.stop_reason == "length" for one in answers)
    given = [one for one in answers if one.found]
    text = (
        f"the accuracy is 0% on {len(known)} prompts: {len(given)} of {len(answers)} completions "
        f"have an answer ({place}), {cut} are truncated (rollout.max_new_tokens). "
    )
    if 2 * len(given) < len(answers):
        return f"{text}The model does not write answers in this form: {_FIX_FORM}"
    return (
        f"{text}They differ from the references, e.g. {_short(given[0].found)} where the reference "
        f"is {_short(given[0].answer)}: if they are right in other words, set prompt.answer, "
        "data.answer_pattern, or a reward such as rewards.numeric:numeric_answer; else the prompts "
        "may be too hard"
    )


def untrained_export(
    config: Config, *, step: int, validations: Sequence[Mapping[str, Any]]
) -> str | None:
    """Says after `step` steps why the model before training is exported; None before the first."""
    if step == 0:
        return None
    trained, start = sum(entry["step"] > 0 for entry in validations), config.version_0
    if not trained:
        what = "validated" if config.validates else "exported"
        return f"no trained version could be {what} in time; the export is the {start} model"
    count = "1 validation" if trained == 1 else f"{trained} validations"
    return (
        f"no validated version was better than the {start} model; the export is the {start} model "
        f"({count} over {step} steps, by {config.metric!r}). Likely causes: too few steps, an "
        "unsuitable learner.lr, rewards that do not lead to what the validation measures, answers "
        "that are not found (prompt.answer), or a validation set too small to show a gain"
    )


def _short(text: str | None) -> str:
    assert text is not None
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "...")
