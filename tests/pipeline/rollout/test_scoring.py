"""From completions to rollouts: texts and prompts match, rewards, advantages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema import Prompt
from pipeline.contracts.rollouts import Completion, Rollout, RolloutName, RolloutRequest
from pipeline.inputs.text.prompts import PromptMaker
from pipeline.rollout.advantages import GroupStats
from pipeline.rollout.scoring import (
    SUM,
    failed_parts,
    reward_errors,
    reward_inputs,
    score_rollouts,
    stopping_error,
)
from rewards.base import Outcome, RewardError, RewardInput, Tags
from rewards.weighting import shuffle_rewards
from tests.fakes import CharTokenizer, completion, make_config, make_prompts

TAGS = Tags("<r>", "</r>", "<a>", "</a>")
PROMPTS = {prompt.id: prompt for prompt in make_prompts(3)}
WEIGHTS = {"correct": 1.0, "format": 0.1}


def drawn(prompt_id: int, sample: int, text: str, *, ended: bool = True) -> Completion:
    name = RolloutName("train", 0, prompt_id, sample)
    return completion(RolloutRequest(name, PROMPTS[prompt_id].tokens), text, ended=ended)


def inputs_of(completions: list[Completion], **prompt: Any) -> list[RewardInput]:
    maker = PromptMaker(Prompt(**prompt), CharTokenizer())
    return reward_inputs(completions, PROMPTS, maker=maker, tags=TAGS)


def test_a_reward_function_sees_the_text_and_its_own_prompt():
    first, second = inputs_of([drawn(3, 0, "six"), drawn(1, 0, "tw", ended=False)])
    assert first == RewardInput("twice 3?", "six", "eos", "6", {}, TAGS, prompt_id=3)
    assert second == RewardInput("twice 1?", "tw", "length", "2", {}, TAGS, prompt_id=1)


def test_a_reward_function_sees_the_prefix_and_the_completion():
    (one,) = inputs_of([drawn(3, 0, "ix")], answer_prefix="s")
    assert one == RewardInput("twice 3?", "six", "eos", "6", {}, TAGS, prompt_id=3)


GROUPS = [drawn(prompt, sample, f"{prompt}.{sample}") for prompt in (2, 1) for sample in range(2)]


def outcomes(*values: float | None) -> list[dict[str, Outcome]]:
    return [
        {
            "correct": Outcome.failed("died", "died") if value is None else Outcome(value),
            "format": Outcome(1.0),
        }
        for value in values
    ]


def test_rewards_are_weighted_and_grouped_by_prompt(tmp_path: Path):
    config = make_config(tmp_path, learner={"advantage": "dr_grpo"})
    rollouts, stats = score_rollouts(
        GROUPS, inputs_of(GROUPS), outcomes(1.0, 0.0, 0.5, 0.5), config=config, step=0
    )
    assert [rollout.completion for rollout in rollouts] == GROUPS
    assert [rollout.text for rollout in rollouts] == ["2.0", "2.1", "1.0", "1.1"]
    assert [rollout.rewards["correct"] for rollout in rollouts] == [1.0, 0.0, 0.5, 0.5]
    assert [rollout.reward for rollout in rollouts] == pytest.approx([1.1, 0.1, 0.6, 0.6])
    assert [rollout.advantage for rollout in rollouts] == pytest.approx([0.5, -0.5, 0, 0])
    assert stats == GroupStats(mixed=1, all_equal=1, short=0, excluded=0)


def test_groups_are_identified_by_name_even_if_incomplete(tmp_path: Path):
    # The same prompt at two steps; one rollout is left of the second group and of the third.
    left = [*GROUPS[:2], GROUPS[3]]
    later = replace(GROUPS[0], name=replace(GROUPS[0].name, step=1))
    config = make_config(tmp_path, learner={"advantage": "dr_grpo"})
    completions = [later, *left]
    rollouts, stats = score_rollouts(
        completions, inputs_of(completions), outcomes(9.0, 1.0, 0.0, 0.5), config=config, step=0
    )
    advantages = [rollout.advantage for rollout in rollouts]
    assert advantages == pytest.approx([0, 0.5, -0.5, 0])
    assert stats == GroupStats(mixed=1, all_equal=0, short=2, excluded=0)
    nobody = score_rollouts([], [], [], config=config, step=0)
    assert nobody == ([], GroupStats(mixed=0, all_equal=0, short=0, excluded=0))


def test_advantages_use_the_configured_formula(tmp_path: Path):
    rollouts, _ = score_rollouts(
        GROUPS,
        inputs_of(GROUPS),
        outcomes(1.0, 0.0, 0.5, 0.5),
        config=make_config(tmp_path),
        step=0,
    )
    # 0.5 over the sample deviation sqrt(0.5).
    scaled = [rollout.advantage for rollout in rollouts]
    assert scaled == pytest.approx([0.5**0.5, -(0.5**0.5), 0, 0], abs=1e-5)


def test_invariant_6_one_part_without_a_value_excludes_the_rollout(tmp_path: Path):
    rollouts, stats = score_rollouts(
        GROUPS,
        inputs_of(GROUPS),
        outcomes(1.0, None, 0.0, 1.0),
        config=make_config(tmp_path),
        step=0,
    )
    assert rollouts[1].rewards == {"correct": None, "format": 1.0}
    assert rollouts[1].reward is None
    assert rollouts[0].reward == pytest.approx(1.1)
    assert [rollouts[0].advantage, rollouts[1].advantage] == [0.0, 0.0]
    assert stats == GroupStats(mixed=1, all_equal=0, short=1, excluded=1)


def test_invariant_6_a_part_of_weight_0_excludes_no_rollout(tmp_path: Path):
    parts = [
        {"name": "correct", "function": "rewards.correctness:exact_answer", "weight": 0.0},
        {"name": "format", "function": "rewards.format:well_formed", "weight": 0.5},
    ]
    rollouts, stats = score_rollouts(
        GROUPS,
        inputs_of(GROUPS),
        outcomes(1.0, None, 1e308, None),
        config=make_config(tmp_path, rewards={"functions": parts}),
        step=0,
    )
    assert [rollout.reward for rollout in rollouts] == [0.5] * 4
    assert [rollout.rewards["correct"] for rollout in rollouts] == [1.0, None, 1e308, None]
    assert reward_errors(rollouts) == {"correct": [RewardError("died", "died")] * 2}
    assert stats == GroupStats(mixed=0, all_equal=2, short=0, excluded=0)


@pytest.mark.parametrize(
    ("value", "weights", "error"),
    [
        (1.7e308, (1.0, 1.7e308), "is not a finite number: 1 x 1.7e+308 (correct) + 1.7e+308 x 1"),
        (-1e308, (9.0, 0.1), "is not a finite number: 9 x -1e+308 (correct) + 0.1 x 1 (format)"),
    ],
)
def test_a_sum_that_overflows_is_an_error_of_the_sum(
    tmp_path: Path, value: float, weights: tuple[float, float], error: str
):
    parts = [
        {"name": name, "function": "rewards.correctness:exact_answer", "weight": weight}
        for name, weight in zip(("correct", "format"), weights, strict=True)
    ]
    rollouts, stats = score_rollouts(
        GROUPS,
        inputs_of(GROUPS),
        outcomes(value, 0.0, 0.5, None),
        config=make_config(tmp_path, rewards={"functions": parts}),
        step=0,
    )
    assert rollouts[0].rewards == {"correct": value, "format": 1.0}
    assert [rollout.reward is None for rollout in rollouts] == [True, False, False, True]
    assert [rollout.advantage for rollout in rollouts] == [0.0] * 4
    errors = reward_errors(rollouts)
    assert sorted(errors) == ["correct", SUM]
    (found,) = errors[SUM]
    assert (found.cause, found.message[: len(error)]) == ("not_finite", error)
    assert [rollout.excluded for rollout in rollouts] == ["not_finite", None, None, "died"]
    assert stats.excluded == 2


def test_overlong_completions_get_a_separate_penalty_part(tmp_path: Path):
    # 84 tokens, of which the last 40 are penalized: "2.0" and its stop token are 4, 64 are 20 too
    # many, 84 are the maximum.
    config = make_config(
        tmp_path,
        rollout={
            "group_size": 2,
            "prompts_per_step": 2,
            "max_prompt_tokens": 8,
            "max_new_tokens": 84,
            "overlong_tokens": 40,
        },
    )
    long, cut = drawn(1, 0, "x" * 63), drawn(1, 1, "x" * 84, ended=False)
    completions = [*GROUPS[:2], long, cut]
    rollouts, stats = score_rollouts(
        completions, inputs_of(completions), outcomes(1.0, 0.0, 0.5, 0.5), config=config, step=0
    )
    assert [rollout.rewards["overlong"] for rollout in rollouts] == [0.0, 0.0, -0.5, -1.0]
    assert [rollout.reward for rollout in rollouts] == pytest.approx([1.1, 0.1, 0.1, -0.4])
    assert rollouts[2].advantage > 0 > rollouts[3].advantage
    assert stats.mixed == 2
    assert (
        "overlong"
        not in score_rollouts(
            GROUPS, inputs_of(GROUPS), outcomes(1, 0, 1, 0), config=make_config(tmp_path), step=0
        )[0][0].rewards
    )


NONE = Outcome(None)
GOOD, BAD = Outcome(1.0), Outcome.failed("raised", "raised KeyError: 'x'")


def scored_with(folder: Path, on_error: str, *parts: tuple[Outcome, Outcome]) -> list[Rollout]:
    functions = [
        {"name": "correct", "function": "a.py:f", "on_error": on_error},
        {"name": "format", "function": "a.py:g", "weight": 0.1},
    ]
    rows = [{"correct": one, "format": other} for one, other in parts]
    config = make_config(folder, rewards={"functions": functions})
    rollouts, _ = score_rollouts(GROUPS, inputs_of(GROUPS), rows, config=config, step=0)
    return rollouts


def test_invariant_6_none_is_left_out_and_without_any_part_the_rollout_is_excluded(tmp_path: Path):
    rollouts = scored_with(tmp_path, "stop", (NONE, GOOD), (GOOD, NONE), (NONE, NONE), (GOOD, GOOD))
    assert [rollout.reward for rollout in rollouts] == [0.1, 1.0, None, 1.1]
    assert [rollout.excluded for rollout in rollouts] == [None, None, "not_applicable", None]
    config = make_config(tmp_path)
    assert (reward_errors(rollouts), failed_parts(rollouts, config)) == ({}, "")
    assert stopping_error(rollouts, config.rewards) is None


def test_an_error_excludes_the_rollout_or_its_group_or_stops_the_run(tmp_path: Path):
    parts = (BAD, GOOD), (GOOD, GOOD), (GOOD, GOOD), (GOOD, BAD)
    for on_error, expected in (
        ("exclude", ["raised", None, None, "raised"]),
        ("group", ["raised", "group", None, "raised"]),
    ):
        rollouts = scored_with(tmp_path, on_error, *parts)
        assert [rollout.excluded for rollout in rollouts] == expected
    config = make_config(
        tmp_path,
        rewards={"functions": [{"name": "correct", "function": "f:f", "on_error": "stop"}]},
    )
    stops = "reward 'correct' failed for prompt 2: raised KeyError: 'x'"
    assert stopping_error(rollouts, config.rewards) == stops
    failed = [f"{name!r} failed 1 times, first: raised KeyError: 'x'" for name in WEIGHTS]
    assert failed_parts(rollouts, make_config(tmp_path)) == "; ".join(failed)


def test_the_shuffle_control_permutes_rewards_over_the_whole_step(tmp_path: Path):
    config = make_config(tmp_path, rewards={"shuffle": True})
    values = outcomes(0.1, 0.2, 0.3, 0.4)
    rollouts, _ = score_rollouts(GROUPS, inputs_of(GROUPS), values, config=config, step=5)
    plain = [value["correct"].value or 0.0 for value in values]
    expected = shuffle_rewards([value + 0.1 for value in plain], seed=3, step=5)
    assert [rollout.reward for rollout in rollouts] == pytest.approx(expected)
    assert expected != [value + 0.1 for value in plain]
    # The score of each part stays with its rollout.
    assert [rollout.rewards["correct"] for rollout in rollouts] == plain
    for start in (0, 2):
        high = int(np.argmax([rollouts[start].reward or 0, rollouts[start + 1].reward or 0]))
        assert rollouts[start + high].advantage > 0
