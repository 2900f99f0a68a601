"""Metrics of a step's rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from configs.schema import Config
from pipeline.rollout.metrics import step_metrics
from pipeline.types import Rollout, RolloutName, RolloutRequest
from rewards.base import RewardError, RewardInput, Tags
from tests.samples import completion, make_config

TAGS = Tags("<r>", "</r>", "<a>", "</a>")
FAILED = RewardError("raised", "raised KeyError: 'x' (mine.py:3)")


def rollout(
    group: int,
    text: str,
    correct: float | None,
    *,
    ended: bool = True,
    errors: Mapping[str, RewardError] | None = None,
    answer: str | None = None,
    form: float = 0.5,
    named: Mapping[str, float] | None = None,
) -> Rollout:
    """A rollout with one more token than the text has characters, if it ended."""
    request = RolloutRequest(RolloutName("train", 6, group, len(text)), np.array([2, 5], np.int32))
    drawn = completion(request, text, ended=ended, version=6)
    excluded = errors["correct"].cause if errors else "not_applicable"
    return Rollout(
        drawn,
        RewardInput("p", text, drawn.stop_reason, answer, {}, TAGS, prompt_id=group),
        {"correct": correct, "format": form, **(named or {})},
        None if correct is None else correct + 0.5,
        0.25 if group == 2 else 0.0,
        errors=errors or {},
        excluded=excluded if correct is None else None,
    )


ROLLOUTS = [
    rollout(1, "abc", 1.0),
    rollout(1, "a", None, errors={"correct": FAILED}),
    rollout(2, "", 0.0),
    rollout(2, "abcdef", 0.5),
]
CUT = rollout(3, "abcdef", None, ended=False)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path)


def test_a_steps_metrics(config: Config):
    rollouts = [*ROLLOUTS, CUT]
    metrics = step_metrics(rollouts, config)
    sampled = [value for one in rollouts for value in one.completion.logprobs.tolist()]
    parts = {name: metrics.pop(name) for name in list(metrics) if name.startswith("reward_parts/")}
    assert metrics.pop("rollout/entropy_half_width") > 0  # see the tests of `Groups`
    assert metrics == {
        "reward/mean": pytest.approx(1.0),
        "reward/std": pytest.approx((0.5 / 3) ** 0.5),
        "reward/group_std": 0.25,
        # Tokens 4, 1, 7 and rewards 1.5, 0.5, 1.
        "reward/corr_length": pytest.approx(0.5),
        "reward/errors": 1.0,
        "reward/excluded_share": pytest.approx(2 / 5),
        "reward/excluded/raised": 0.2,
        "reward/excluded/not_applicable": 0.2,
        "reward/correct": pytest.approx(0.5),
        "reward/format": 0.5,
        "rollout/tokens_mean": pytest.approx((4 + 2 + 1 + 7 + 6) / 5),
        "rollout/tokens_max": 7.0,
        # Tokens 1, 2, 4, 6, 7.
        "rollout/tokens_q05": pytest.approx(1.2),
        "rollout/tokens_q50": 4.0,
        "rollout/tokens_q95": pytest.approx(6.8),
        "rollout/entropy": pytest.approx(-sum(sampled) / 20),
        "rollout/well_formed_share": 0.0,
        "rollout/well_formed_share_half_width": 0.0,
        "rollout/truncated_share": 0.2,
        "rollout/stop/eos": 0.8,
        "rollout/stop/length": 0.2,
        "rollout/repetition": 0.0,
        # Three rollouts have a reward.
        "advantage/std": pytest.approx(0.25 * 2**0.5 / 3),
        "advantage/max": 0.25,
        "groups/mixed": 1.0,
        "groups/all_equal": 0.0,
        "groups/short": 2.0,
    }
    # A part that is constant has no correlation; there is no reference answer to compare with.
    assert parts == {
        "reward_parts/correct/group_std": 0.25,
        "reward_parts/correct/corr_length": pytest.approx(0.5),
        "reward_parts/correct/none_share": 0.2,
        "reward_parts/correct/error_share": 0.2,
        "reward_parts/correct/error_share/raised": 0.2,
        "reward_parts/format/group_std": 0.0,
        "reward_parts/format/none_share": 0.0,
        "reward_parts/format/error_share": 0.0,
    }


def test_correlations_with_correctness_and_between_parts(config: Config):
    right, wrong = "<a>12</a>", "<a>13</a>"
    several = [
        rollout(1, right, 1.0, answer="12", form=0.0),
        rollout(1, wrong, 0.0, answer="12", form=1.0),
        rollout(2, right, 1.0, answer="12.0", form=0.0),
        rollout(2, wrong, 1.0, answer="12", form=0.0),
        rollout(3, right, 0.0, answer=None, form=1.0),
        # One of the group has no reward: nothing differs between those that have one.
        rollout(4, right, None, answer=None, form=0.5),
        rollout(4, wrong, 1.0, answer=None, form=0.0),
    ]
    metrics = step_metrics(several, config)
    assert metrics["rollout/correct_share"] == 0.5
    # 1 0 1 1 with 1 0 1 0: covariance 1/8, variances 3/16 and 1/4.
    assert metrics["reward_parts/correct/corr_correct"] == pytest.approx(3**-0.5)
    assert metrics["reward/corr_correct"] == pytest.approx(3**-0.5)


def test_named_numbers_have_their_mean_only(config: Config):
    several = [
        rollout(1, "a", 1.0, named={"format/group_std": 0.25, "format/steps": 2.0}),
        rollout(1, "b", 1.0, named={"format/group_std": 0.75}),
        rollout(2, "c", 0.0),
    ]
    metrics = step_metrics(several, config)
    assert (metrics["reward/format/group_std"], metrics["reward/format/steps"]) == (0.5, 2.0)
    # A number named like a statistic of its part is not one.
    assert metrics["reward_parts/format/group_std"] == 0.0
    assert not any("steps" in name for name in metrics if name.startswith("reward_parts/"))


def test_groups_and_lengths_by_the_exact_answer(config: Config):
    right, wrong = "<a>12</a>", "<a>134</a>"
    several = [
        *[rollout(1, right, 1.0, answer="12")] * 2,
        *[rollout(2, wrong, 0.0, answer="12")] * 3,
        rollout(3, right, 1.0, answer="12"),
        rollout(3, "", 0.0, answer="12"),
        # Groups without a reference answer are neither.
        rollout(4, right, 1.0),
    ]
    metrics = step_metrics(several, config)
    assert (metrics["groups/all_right"], metrics["groups/all_wrong"]) == (1.0, 1.0)
    # 10 tokens with the stop token; 11, 11, 11 and 1.
    assert metrics["rollout/tokens_right"] == 10.0
    assert metrics["rollout/tokens_wrong"] == 8.5
    assert metrics["rollout/correct_share"] == pytest.approx(3 / 7)
    # Without one that is right there is no length of those; without references nothing.
    metrics = step_metrics(several[2:5], config)
    assert metrics["groups/all_wrong"] == 1.0
    assert "rollout/tokens_right" not in metrics
    assert "groups/all_wrong" not in step_metrics(several[-1:], config)


def test_the_share_of_well_formed_rollouts(config: Config):
    formed = "<r>1 + 2</r><a>3</a>"
    several = [
        *[rollout(1, formed, 1.0)] * 2,
        rollout(2, formed, 0.0),
        rollout(2, "3", 1.0),
        # Neither is one that is cut off, or has another tag.
        rollout(3, formed, 1.0, ended=False),
        rollout(3, "<r>1 + 2</r></a>", 1.0),
    ]
    metrics = step_metrics(several, config)
    assert metrics["rollout/well_formed_share"] == 0.5


def test_the_spread_of_advantages_by_hand(config: Config):
    values = [1.5, -0.5, 0.0, 9.0]
    rewards = [1.0, 0.0, 0.5, None]
    several = [
        replace(rollout(1, "abc", reward), advantage=value)
        for reward, value in zip(rewards, values, strict=True)
    ]
    metrics = step_metrics(several, config)
    # The rollout without a reward does not count: mean 1/3, squares 2.5 / 3.
    assert metrics["advantage/std"] == pytest.approx((2.5 / 3 - 1 / 9) ** 0.5)
    assert metrics["advantage/max"] == 1.5
    counts = [metrics[f"groups/{kind}"] for kind in ("mixed", "all_equal", "short")]
    assert counts == [1, 0, 0]
    equal = [replace(one, advantage=0.0) for one in several]
    assert step_metrics(equal, config)["groups/all_equal"] == 1
    assert step_metrics([], config) == dict.fromkeys(
        ("groups/mixed", "groups/all_equal", "groups/short"), 0.0
    )


def test_stop_reasons_have_shares(tmp_path: Path):
    config = make_config(tmp_path, rollout={"stop_strings": ["</a>"]})
    by_text = [
        replace(one, completion=replace(one.completion, stop_reason="stop_string"))
        for one in ROLLOUTS[:2]
    ]
    metrics = step_metrics([*by_text, ROLLOUTS[2], CUT], config)
    shares = {name: metrics[f"rollout/stop/{name}"] for name in ("eos", "length", "stop_string")}
    assert shares == {"eos": 0.25, "length": 0.25, "stop_string": 0.5}
    assert metrics["rollout/truncated_share"] == 0.25


def test_in_a_mixture_each_source_has_its_own_metrics(config: Config):
    sources = ["train", "more", "more", "train"]
    mixed = [
        replace(one, given=replace(one.given, source=name))
        for one, name in zip(ROLLOUTS, sources, strict=True)
    ]
    metrics = step_metrics(mixed, config)
    own = {name: metrics.pop(name) for name in list(metrics) if name.split("/")[1] in sources}
    assert {name: value for name, value in own.items() if "/more/" in name} == {
        "reward/more/mean": 0.5,
        "reward/more/std": 0.0,
        "reward/more/excluded_share": 0.5,
        "reward/more/correct": 0.0,
        "reward/more/format": 0.5,
        "rollout/more/count": 2.0,
        "rollout/more/tokens_mean": 1.5,
    }
    assert own["reward/train/mean"] == 1.25
    assert metrics == step_metrics(ROLLOUTS, config)


def test_a_step_without_any_reward_has_metrics_too(config: Config):
    metrics = step_metrics([replace(CUT, errors={"correct": FAILED})], config)
    # An error is not a zero: without values there is no mean.
    absent = {"reward/mean", "reward/std", "reward/group_std", "reward/correct"}
    assert not absent & metrics.keys()
    assert metrics["reward/excluded_share"] == metrics["reward_parts/correct/error_share"] == 1.0
