"""Rules of the alarms: metrics of steps in, alarms out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema import Config
from pipeline.alarms import Alarm, step_alarms
from pipeline.rollout.part_statistics import Groups
from tests.samples import make_config

VALIDATED: Mapping[str, Any] = {
    "data": {"validation": {"path": "validation.jsonl"}},
    "eval": {"every_steps": 2},
}

Row = Mapping[str, float]


def settings(**alarms: list[str]) -> Config:
    return make_config(Path("runs"), **VALIDATED, alarms=alarms, learner={"kl_coef": 0.1})


def raised(
    config: Config, rows: Sequence[Row], validations: Sequence[Mapping[str, Any]] = ()
) -> list[Alarm]:
    """The alarms of each step."""
    known = [{"step": number, **row} for number, row in enumerate(rows, start=1)]
    steps = range(1, len(rows) + 1)
    return [one for step in steps for one in step_alarms(config, known[:step], validations)]


def validation(step: int, accuracy: float) -> dict[str, Any]:
    """A result whose interval reaches 0.1 below it."""
    return {"step": step, "accuracy": accuracy, "ci95": [accuracy - 0.1, accuracy + 0.1]}


def test_an_alarm_is_raised_in_the_last_of_several_steps_and_again_after_it_cleared():
    equal, mixed = (
        {"groups/all_equal": count, "groups/mixed": 100.0 - count} for count in (96.0, 95.0)
    )
    nothing = {"groups/all_equal": 0.0, "groups/mixed": 0.0}
    rows = [equal, mixed, *[equal] * 9, nothing, equal, equal, mixed, *[equal] * 10]
    alarms = raised(settings(), rows)
    assert [(alarm.step, alarm.value) for alarm in alarms] == [(13, 0.96), (25, 0.96)]
    fact = "the rewards of 96.0% of the groups are all equal, which gives no policy gradient"
    assert alarms[0].facts == {
        "rule": "all_equal",
        "part": "",
        "step": 13,
        "value": 0.96,
        "threshold": 0.95,
        "action": "log",
        "fact": fact,
    }
    assert alarms[0].text == (
        f"alarm all_equal: step 13: {fact}, above 0.95 in 10 steps in a row; read some "
        "rollouts: the prompts are too easy (groups/all_right) or too hard (groups/all_wrong), or "
        "the reward does not tell answers apart"
    )
    assert raised(settings(off=["all_equal"], stop=["all_equal"]), rows) == []
    (first, _) = raised(settings(stop=["all_equal"]), rows)
    assert first.action == "stop"
    assert "10 steps in a row; the run stops with a checkpoint (alarms.stop); read" in first.text


RULES = [
    ("entropy_collapse", "rollout/entropy", 0.04, 0.06, 10),
    ("length_explosion", "rollout/tokens_mean", 3.1, 2.9, 10),
    ("excluded", "reward/excluded_share", 0.51, 0.5, 1),
    ("length_correlation", "reward/corr_length", -0.91, -0.9, 10),
    ("truncation", "rollout/truncated_share", 0.26, 0.25, 10),
    ("kl", "learner/kl", 0.51, 0.5, 10),
    ("disagreement", "learner/mismatch_p999", 1.1e-3, 1e-3, 1),
]
"""Rule, metric, a value beyond the threshold and one that is not, steps. The first two compare with
the run itself, which begins with ten values of 1; the others have an absolute threshold."""


@pytest.mark.parametrize(("rule", "name", "beyond", "within", "steps"), RULES)
def test_rules_with_their_thresholds(
    rule: str, name: str, beyond: float, within: float, steps: int
):
    is_relative = rule in {row[0] for row in RULES[:2]}
    start: list[Row] = [{name: 1.0}] * 10 if is_relative else []
    rows = [*start, *[{name: beyond}] * steps]
    (alarm,) = raised(settings(), rows)
    assert (alarm.rule, alarm.part, alarm.step) == (rule, "", len(rows))
    assert alarm.value == pytest.approx(abs(beyond))
    assert alarm.action == ("stop" if rule == "excluded" else "log")
    assert raised(settings(), rows[:-1]) == []
    assert raised(settings(), [*start, *[{name: within}] * steps]) == []
    if is_relative:
        # Another unit changes nothing; without ten steps there is nothing to compare with.
        assert len(raised(settings(), [{name: 1000 * row[name]} for row in rows])) == 1
        assert raised(settings(), rows[1 + steps :]) == []
        assert raised(settings(), [{name: 0.0} for _ in rows]) == []


def shares(metric: str, values: Sequence[float]) -> list[Row]:
    """Steps with these shares and half the width of their interval, as of 64 coins, 8 a prompt."""
    return [{metric: p, f"{metric}_half_width": 2.365 * (p * (1 - p) / 64) ** 0.5} for p in values]


CORRECT = "rollout/correct_share"
LOST_FORMAT = [0.52, 0.45, 0.58, 0.69, 0.016, 0.13]
"""Well-formed rollouts of a real Gemma 3 270M at too high a rate, 8 prompts with 8 samples."""


def test_the_format_that_a_real_run_lost_raises_an_alarm_in_that_step():
    (alarm,) = raised(settings(), shares("rollout/well_formed_share", LOST_FORMAT))
    assert (alarm.rule, alarm.part, alarm.step) == ("well_formed_falls", "", 5)
    assert alarm.value == pytest.approx(0.016 / 0.55)
    assert alarm.text.startswith(
        "alarm well_formed_falls: step 5: 1.6% of the rollouts are well formed, after 55.0% in the "
        "steps before, below 0.5; read some rollouts"
    )


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ([0.5, 0.15], [2]),  # from the second step on
        ([0.5, 0.26, 0.26], []),  # more than half
        ([0.08, 0.03], []),  # less than half, but a few rollouts of 64
        ([0.0, 0.0, 0.0], []),
        # The highest of the steps before, or one that was high by chance, is no level.
        ([0.3, 0.3, 0.9, 0.3, 0.3], []),
        ([0.9] * 12 + [0.1] * 12, [13]),
        # Steps more than ten before do not count.
        ([0.9] * 6 + [0.5] * 10 + [0.3], []),
    ],
)
def test_a_share_falls_below_half_of_the_steps_before(values: list[float], steps: list[int]):
    alarms = raised(settings(), shares(CORRECT, values))
    assert [(alarm.rule, alarm.step) for alarm in alarms] == [("correct_falls", n) for n in steps]


def test_a_single_prompt_has_no_interval_and_raises_no_alarm():
    assert raised(settings(), [{CORRECT: p} for p in (1.0, 1.0, 0.0)]) == []


@pytest.mark.parametrize(("prompts", "samples"), [(4, 8), (16, 16)])
def test_prompts_that_differ_from_step_to_step_raise_no_alarm(prompts: int, samples: int):
    """A policy that does not change, on prompts from impossible to trivial, in 20 runs."""
    rng, groups = np.random.default_rng(0), Groups([n // samples for n in range(prompts * samples)])
    ones = np.ones(prompts * samples)

    def step() -> Row:
        chances = np.repeat(rng.beta(0.5, 0.5, prompts), samples)
        share, half_width = groups.ratio((rng.random(len(ones)) < chances).astype(float), ones)
        assert share is not None
        assert half_width is not None
        return {CORRECT: share, f"{CORRECT}_half_width": half_width}

    assert sum(bool(raised(settings(), [step() for _ in range(40)])) for _ in range(20)) <= 1


def validated(config: Config, *accuracies: float) -> list[tuple[int, Any]]:
    """Steps and values of the alarms of a run with a validation after every fifth step."""
    entries = [validation(5 * number, value) for number, value in enumerate(accuracies)]
    alarms = raised(config, [{} for _ in range(5 * len(entries))], entries)
    assert {alarm.rule for alarm in alarms} <= {"validation_falls"}
    return [(alarm.step, alarm.value) for alarm in alarms]


def test_a_validation_below_the_interval_of_the_first_raises_an_alarm_in_the_next_step():
    # The interval reaches 0.1 below the first.
    assert validated(settings(), 0.5, 0.38) == [(6, pytest.approx(1.2))]
    assert validated(settings(), 0.5, 0.41) == []
    # The first counts, not the best; again after one that is not below.
    assert validated(settings(), 0.5, 0.8, 0.6) == []
    found = validated(settings(), 0.5, 0.3, 0.2, 0.45, 0.3)
    assert [step for step, _ in found] == [6, 21]
    (alarm,) = raised(settings(), [{}] * 6, [validation(0, 0.5), validation(5, 0.3)])
    assert alarm.text.startswith(
        "alarm validation_falls: step 6: the validation after step 5 is 30.0%, 2.0 half-widths of "
        "the 95% interval below that before training, 50.0% [40.0%, 60.0%], above 1; training "
    )
    # Without one right answer there is nothing to lose.
    none = {"step": 0, "accuracy": 0.0, "ci95": [0.0, 0.1]}
    assert raised(settings(), [{}] * 6, [none, validation(5, 0.0)]) == []


def test_after_sft_a_validation_is_compared_with_that_at_its_end():
    sft = make_config(
        Path("runs"),
        **VALIDATED,
        run={"phases": ["sft", "grpo"]},
        sft={"train": {"path": "sft.jsonl"}, "steps": 5},
        budget={"steps": 10},
    )
    assert validated(sft, 0.1, 0.5, 0.3) == [(11, pytest.approx(2.0))]
    # What SFT itself does is no change of GRPO.
    assert validated(sft, 0.5, 0.1, 0.1) == []


def test_the_threshold_of_a_disagreement_depends_on_the_number_format():
    rows = [{"learner/mismatch_p999": value} for value in (1.4, 1.6)]
    rounded = make_config(Path("runs"), model={"dtype": "bfloat16"})
    (alarm,) = raised(rounded, rows)
    assert (alarm.step, alarm.threshold) == (2, 1.5)
    assert (raised(settings(), rows)[0].threshold) == 1e-3


def rising(parts: Sequence[tuple[float, float]], *accuracies: float) -> list[tuple[str, int, Any]]:
    """Alarms of steps with these means, and a validation after each eleven of them."""
    rows = [{"reward/correct": one, "reward/format": other} for one, other in parts]
    validations = [validation(11 * number, value) for number, value in enumerate(accuracies)]
    alarms = raised(settings(off=["validation_falls"]), rows, validations)
    return [(alarm.part, alarm.step, alarm.value) for alarm in alarms]


def test_a_part_that_rises_while_validation_falls_is_named():
    low, high = [(0.5, 0.2)] * 11, [(0.5, 0.3)] * 11
    fall = pytest.approx(2.0)
    # The best validation is after step 11; the one after step 22 is two half-widths below it.
    assert rising([*low, *high, *high], 0.4, 0.5, 0.3) == [("format", 32, fall)]
    # The last validation is as good as the best; falls, but not far; falls, but nothing rises.
    assert rising([*low, *high, *high], 0.4, 0.5, 0.5) == []
    assert rising([*low, *high, *high], 0.4, 0.5, 0.4) == []
    assert rising([*high, *high, *low], 0.4, 0.5, 0.3) == []
    # The best validation is that before training: compared with the first steps.
    assert rising([*low, *high, *high], 0.5, 0.4, 0.3) == [("format", 32, fall)]
