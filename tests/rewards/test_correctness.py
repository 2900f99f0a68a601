"""The reward for a correct answer."""

from __future__ import annotations

from configs.schema import Prompt
from rewards.base import RewardInput, Tags
from rewards.correctness import exact_answer


def test_right_and_wrong_answers():
    tags = Tags.of(Prompt())
    completions = ("<answer>33</answer>", "<answer>34</answer>", "33", "<answer>33.0</answer>")
    inputs = [RewardInput("", text, "length", "33", {}, tags) for text in completions]
    assert exact_answer(inputs) == [1.0, 0.0, 0.0, 1.0]
