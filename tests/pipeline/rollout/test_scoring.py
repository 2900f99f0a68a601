"""From completions to rollouts: texts and prompts match, rewards, advantages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from configs.schema import Prompt
from pipeline.data.text.prompts import PromptMaker
from pipeline.protocols import Scorer
from pipeline.rollout.scoring import (
    SUM,
    EarlyScoring,
    reward_errors,
    reward_inputs,
    score_rollouts,
    stopping_error,
)
from pipeline.types import Completion, Rollout, RolloutName, RolloutRequest
from rewards.base import Outcome, RewardInput, Tags
from rewards.weighting import shuffle_rewards
from tests.samples import CharTokenizer, completion, make_config, make_prompts

TAGS = Tags("<r>", "</r>", "<a>", "</a>")
PROMPTS = {prompt.id: prompt for prompt in make_prompts(3)}


def drawn(prompt_id: int, sample: int, text: str, *, ended: bool = True) -> Completion:
    name = RolloutName("train", 0, prompt_id, sample)
    return completion(RolloutRequest(name, PROMPTS[prompt_id].tokens), text, ended=ended)


def inputs_of(completions: Sequence[Completion], **prompt: Any) -> list[RewardInput]:
    maker = PromptMaker(Prompt(**prompt), CharTokenizer())
    return reward_inputs(completions, PROMPTS, maker=maker, tags=TAGS)


def test_a_reward_function_sees_prefix_and_completion_and_its_own_prompt():
    first, second = inputs_of([drawn(3, 0, "ix"), drawn(1, 0, "w", ended=False)], answer_prefix="s")
    assert first == RewardInput("twice 3?", "six", "eos", "6", {}, TAGS, prompt_id=3)
    assert second == RewardInput("twice 1?", "sw", "length", "2", {}, TAGS, prompt_id=1)


DIED = Outcome.failed("died", "its process ended")
GROUPS = [drawn(prompt, sample, f"{prompt}.{sample}") for prompt in (2, 1) for sample in range(2)]


def outcomes(*values: float | None) -> list[dict[str, Outcome]]:
    return [
        {
            "correct": Outcome(value) if value is not None else DIED,
            "format": Outcome(1.0, None),
        }
        for value in values
    ]


def parts(**changes: Any) -> dict[str, Any]:
    """Settings of the parts `correct` and `format`, with changes of the first."""
    function = "rewards.correctness:exact_answer"
    correct = {"name": "correct", "function": function, **changes}
    return {"functions": [correct, {"name": "format", "function": function, "weight": 0.1}]}


def scored(
    values: list[dict[str, Outcome]],
    completions: Sequence[Completion] = GROUPS,
    *,
    step: int = 0,
    **tables: Any,
) -> list[Rollout]:
    config = make_config(Path(), **tables)
    return score_rollouts(completions, inputs_of(completions), values, config=config, step=step)


def test_rewards_are_weighted_and_grouped_by_prompt():
    rollouts = scored(outcomes(1.0, 0.0, 0.5, 0.5), learner={"advantage": "dr_grpo"})
    assert [rollout.completion for rollout in rollouts] == GROUPS
    assert [rollout.text for rollout in rollouts] == ["2.0", "2.1", "1.0", "1.1"]
    assert [rollout.rewards["correct"] for rollout in rollouts] == [1.0, 0.0, 0.5, 0.5]
    assert [rollout.reward for rollout in rollouts] == pytest.approx([1.1, 0.1, 0.6, 0.6])
    advantages = [rollout.advantage for rollout in rollouts]
    assert advantages == pytest.approx([0.5, -0.5, 0, 0])
    # A group has one name, also where one rollout is left of it, or another step has its prompt.
    later = replace(GROUPS[0], name=replace(GROUPS[0].name, step=1))
    completions = [later, *GROUPS[:2], GROUPS[3]]
    rollouts = scored(outcomes(9.0, 1.0, 0.0, 0.5), completions, learner={"advantage": "dr_grpo"})
    assert [one.advantage for one in rollouts] == pytest.approx([0, 0.5, -0.5, 0])


DIED_ONCE = [None, 0.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("change", "values", "rewards", "excluded"),
    [
        ({"weight": 0.0}, [1.0, None, 1e308, None], [0.1] * 4, [None] * 4),
        ({"on_error": "exclude"}, DIED_ONCE, [None, 0.1, 0.6, 0.6], ["died", None, None, None]),
        ({"on_error": "group"}, DIED_ONCE, [None, None, 0.6, 0.6], ["died", "group", None, None]),
        # A sum that overflows is an error of the sum.
        (
            {"weight": 9.0},
            [-1e308, 0.0, 0.0, None],
            [None, 0.1, 0.1, None],
            ["not_finite", None, None, "died"],
        ),
    ],
)
def test_promise_5_an_error_excludes_the_rollout_or_its_group(
    change: dict[str, Any],
    values: list[float | None],
    rewards: list[float | None],
    excluded: list[str | None],
):
    rollouts = scored(outcomes(*values), rewards=parts(**change))
    assert [rollout.reward for rollout in rollouts] == pytest.approx(rewards)
    assert [rollout.excluded for rollout in rollouts] == excluded
    assert [rollout.rewards["correct"] for rollout in rollouts] == values
    assert [rollout.advantage for rollout in rollouts] == [0.0] * 4
    errors = reward_errors(rollouts)
    assert errors["correct"] == [DIED.error] * values.count(None)
    if "not_finite" in excluded:
        (found,) = errors[SUM]
        assert found.cause == "not_finite"


def test_promise_5_none_is_left_out_and_all_none_is_excluded():
    values = outcomes(1.0, 0.5, 0.0, 1.0)
    values[0]["format"] = Outcome(1.0, named={"tags": 1.0})
    values[1]["format"] = Outcome(None)
    values[2] = {"correct": Outcome(None), "format": Outcome(None)}
    rollouts = scored(values)
    assert [rollout.reward for rollout in rollouts] == pytest.approx([1.1, 0.5, None, 1.1])
    assert [rollout.excluded for rollout in rollouts] == [None, None, "not_applicable", None]
    assert reward_errors(rollouts) == {}
    # A number that a part returns by name is recorded, and not in the sum.
    assert rollouts[0].rewards == {"correct": 1.0, "format": 1.0, "format/tags": 1.0}


def test_overlong_completions_get_a_separate_penalty_part():
    # 84 tokens, of which the last 40 are penalized: "2.0" and its stop token are 4, 64 are 20 too
    # many, 84 are the maximum.
    rollout = {"group_size": 2, "prompts_per_step": 2, "max_prompt_tokens": 8}
    rollout |= {"max_new_tokens": 84, "overlong_tokens": 40}
    long, cut = drawn(1, 0, "x" * 63), drawn(1, 1, "x" * 84, ended=False)
    rollouts = scored(outcomes(1.0, 0.0, 0.5, 0.5), [*GROUPS[:2], long, cut], rollout=rollout)
    assert [one.rewards["overlong"] for one in rollouts] == [0.0, 0.0, -0.5, -1.0]
    assert [one.reward for one in rollouts] == pytest.approx([1.1, 0.1, 0.1, -0.4])
    assert rollouts[2].advantage > 0 > rollouts[3].advantage
    assert "overlong" not in scored(outcomes(1, 0, 1, 0))[0].rewards


def test_an_error_that_stops_names_part_and_prompt():
    rewards, values = parts(on_error="stop"), outcomes(1.0, 0.0, 0.5, 0.5)
    config = make_config(Path(), rewards=rewards)
    values[0]["format"] = DIED
    assert stopping_error(scored(values, rewards=rewards), config.rewards) is None
    values[3]["correct"] = DIED
    told = stopping_error(scored(values, rewards=rewards), config.rewards)
    assert told == "reward 'correct' failed for prompt 1: its process ended"


class CountingScorer:
    """Scores a text by its length; counts how often it sees each."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def score(self, inputs: Sequence[RewardInput]) -> list[dict[str, Outcome]]:
        self.seen += [one.completion for one in inputs]
        await asyncio.sleep(0)
        return [{"length": Outcome(float(len(one.completion)))} for one in inputs]


def test_rollouts_are_scored_when_they_end_and_only_once():
    async def run() -> tuple[list[dict[str, Outcome]], list[str]]:
        scorer = CountingScorer()
        early = EarlyScoring(cast("Scorer", scorer), inputs_of)
        early.add([drawn(2, 0, "abc"), drawn(1, 0, "a")])
        early.add([])
        early.add([drawn(2, 1, "abcd")])
        await asyncio.sleep(0)
        assert scorer.seen == ["abc", "a", "abcd"]
        # One that ended last was not reported.
        final = [drawn(1, 0, "a"), drawn(1, 1, "ab"), drawn(2, 0, "abc"), drawn(2, 1, "abcd")]
        return await early.outcomes(inputs_of(final)), scorer.seen

    scored, seen = asyncio.run(run())
    assert [row["length"].value for row in scored] == [1, 2, 3, 4]
    assert seen == ["abc", "a", "abcd", "ab"]


def test_the_shuffle_control_permutes_rewards_over_the_whole_step():
    values = outcomes(0.1, 0.2, 0.3, 0.4)
    rollouts = scored(values, step=5, rewards={"shuffle": True})
    plain = [value["correct"].value or 0.0 for value in values]
    expected = shuffle_rewards([value + 0.1 for value in plain], seed=3, step=5)
    assert [rollout.reward for rollout in rollouts] == pytest.approx(expected)
    assert expected != [value + 0.1 for value in plain]
    # The score of each part stays with its rollout.
    assert [rollout.rewards["correct"] for rollout in rollouts] == plain
