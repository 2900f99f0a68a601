"""Rows of `launch.bench` that are measured on this machine, in a small setting."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from launch.bench import learner, rollout, shapes
from launch.bench.rollout import Case, make_lengths, make_requests

MODEL = {
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 4,
}
SIZES = {"SLOTS": 4, "GROUP": 2, "PROMPT": 6, "NEW": 12, "SEGMENT": 3}


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    """Both samplers with a tiny model and short rollouts; `Case.make` returns the same ones."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in MODEL.items():
            patch.setitem(shapes.SMALL, name, value)
        for name, size in SIZES.items():
            patch.setattr(rollout, name, size)
        patch.setattr(shapes, "GROUP", SIZES["GROUP"])
        case = Case.make()
        patch.setattr(Case, "make", lambda: case)
        yield case


def test_lengths_are_truncated_and_have_the_documented_mean():
    lengths = make_lengths(20_000)
    assert lengths.min() >= 1
    assert lengths.max() == rollout.NEW
    assert lengths.mean() / rollout.NEW == pytest.approx(0.35, abs=0.005)


def test_both_samplers_generate_the_requested_tokens_and_count_work(case):
    step = make_requests([1, 2, 3, 12])
    # Batches of two rows with 2 and 12 steps.
    assert case.theirs(step, batch=2) == 2 * (2 + 12)
    # Four slots for three decode steps, then one slot for nine.
    assert case.ours(step) == 4 * 3 + 9
    found = rollout.speed(share=1, equal=True, repeats=1)
    assert found["tokens"] == 4 * 12
    assert found["their_batch"] in {1, 4}
    assert found["compiled"] == 0
    assert found["ours_useful"] == found["theirs_useful"] == 1.0


def test_greedy_text_equals_tunix_s_and_different_text_is_counted(case, monkeypatch):
    found = rollout.greedy(prompts=4)
    assert found["other"] == 0
    assert found["tokens"] + found["ties"] * 12 >= 4 * 12
    assert found["apart"] < 1e-5
    draw = case.peer.sample

    def wrong(*given, **how):
        tokens, logprobs = map(np.copy, draw(*given, **how))
        tokens[1, 7] = (tokens[1, 7] + 1) % 96
        logprobs[1, 7] -= 0.1
        tokens[2, 3] = (tokens[2, 3] + 1) % 96  # equally likely: a tie
        logprobs[0, 2] += 0.5
        return tokens, logprobs

    monkeypatch.setattr(type(case.peer), "sample", lambda _, *given, **how: wrong(*given, **how))
    other = rollout.greedy(prompts=4)
    assert (other["other"], other["ties"], other["tokens"]) == (1, 1, 4 * 12 - 5 - 9)
    assert other["apart"] == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("share", ["true", "false"])
def test_our_gradient_equals_that_of_tunix(share: str):
    config = learner.make_config(prompt=6, new=10, in_row=2, learner__share_prefix=share)
    model = shapes.random_model(shapes.SMALL | MODEL | {"sliding_window": 8}, config)
    rollouts = learner.random_rollouts([10, 7, 4], prompt=6, prompts=2, vocab=96)
    both = (side(config, model, rollouts).run() for side in (learner.ours, learner.theirs))
    assert learner.apart(*both) < 1e-4
