"""The reward for a correct answer."""

from __future__ import annotations

from configs.schema import Prompt
from rewards.base import Tags
from rewards.correctness import exact_answer


def test_right_and_wrong_answers():
    tags = Tags.of(Prompt())
    completions = ("<answer>33</answer>", "<answer>34</answer>", "33", "<answer>33.0</answer>")
    found = [exact_answer(text, answer="33", tags=tags) for text in completions]
    assert found == [1.0, 0.0, 0.0, 1.0]
