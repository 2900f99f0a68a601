"""Data order: a pure function of seed and step, complete epochs, no duplicates in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.order import (
    consecutive_prompts,
    max_in_window,
    max_per_step,
    normalized_weights,
    prompts_for_step,
)
from pipeline.types import Prompt


def _prompts(sizes: Mapping[str, int]) -> list[Prompt]:
    return [
        Prompt(n, str(n), np.zeros(1, np.int32), "", {}, source=name)
        for name, size in sizes.items()
        for n in range(size)
    ]


def _names(drawn: Sequence[Prompt]) -> list[tuple[str, int]]:
    return [(str(prompt.source), prompt.id) for prompt in drawn]


SIZES = {"train": 40, "more": 9, "rare": 5}
WEIGHTS = normalized_weights({"train": 1.0, "more": 0.5, "rare": 0.2})


@given(st.data(), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_a_step_never_repeats_prompts_of_a_small_source(data, per_step, seed):
    weights = normalized_weights({name: data.draw(st.floats(0.1, 10)) for name in "abc"})
    sizes = {
        name: data.draw(st.integers(max(max_per_step(share, per_step), 1), 12))
        for name, share in weights.items()
    }
    prompts = _prompts(sizes)
    drawn = [
        prompts_for_step(prompts, seed=seed, step=step, prompts_per_step=per_step, weights=weights)
        for step in range(25)
    ]
    assert all(len({(p.source, p.id) for p in step}) == per_step for step in drawn)
    for name, size in sizes.items():
        counts = [sum(prompt.source == name for prompt in step) for step in drawn]
        share = weights[name] * per_step
        assert {int(share), max_per_step(weights[name], per_step)}.issuperset(counts)
        # Equidistributed offsets: the error is a few prompts, not the root of their number.
        assert abs(sum(counts) - 25 * share) < 5
        stream = [prompt.id for step in drawn for prompt in step if prompt.source == name]
        for start in range(0, len(stream) - size + 1, size):
            assert sorted(stream[start : start + size]) == list(range(size))


def test_the_order_is_the_same_on_every_machine():
    prompts = _prompts({"train": 7})
    drawn = [prompts_for_step(prompts, seed=3, step=n, prompts_per_step=3) for n in range(5)]
    ids = [[prompt.id for prompt in step] for step in drawn]
    assert ids == [[6, 1, 5], [2, 4, 3], [0, 3, 5], [6, 4, 0], [2, 1, 4]]
    mixed = prompts_for_step(_prompts(SIZES), seed=3, step=7, prompts_per_step=12, weights=WEIGHTS)
    assert [f"{source[0]}{id_}" for source, id_ in _names(mixed)] == [
        *("t11", "t3", "t15", "t32", "t31", "t33", "t19"),
        *("m4", "m8", "m6", "r1", "r0"),
    ]
    later = consecutive_prompts(prompts, seed=3, start=5, count=4, window=4)
    assert [prompt.id for prompt in later] == [3, 0, 5, 6]


ONE_SOURCE = st.integers(1, 14).map(lambda total: {"train": total})


@given(ONE_SOURCE | st.just(SIZES), st.integers(0, 2**32 - 1), st.data())
def test_steps_of_any_size_keep_shares_and_epochs(sizes: dict[str, int], seed: int, data):
    prompts, weights, window, size = _prompts(sizes), WEIGHTS, 9, 180
    if sizes != SIZES:
        window, size = data.draw(st.integers(1, len(prompts) // 2 + 1)), 5 * len(prompts)
        weights = {"train": 1.0}

    def drawn(start: int, count: int) -> list[tuple[str, int]]:
        return _names(
            consecutive_prompts(
                prompts, seed=seed, start=start, count=count, window=window, weights=weights
            )
        )

    stream = [one for start in range(0, size, window) for one in drawn(start, window)][:size]
    for start in range(size - window + 1):
        assert len(set(stream[start : start + window])) == window
    for name, total in sizes.items():
        own = [id_ for source, id_ in stream if source == name]
        assert abs(len(own) - weights[name] * size) < 3
        for start in range(0, len(own) - total + 1, total):
            assert sorted(own[start : start + total]) == list(range(total))
    # For any split into steps and any start.
    start, count = data.draw(st.integers(0, size - window)), data.draw(st.integers(1, window))
    assert drawn(start, count) == stream[start : start + count]


def test_a_window_that_could_contain_a_prompt_twice_is_refused():
    prompts = _prompts({"train": 9})
    message = r"_step = 6 takes up to 6 prompts of data\.train .* 10 prompts, and there are 9"
    with pytest.raises(ValueError, match=message):
        consecutive_prompts(prompts, seed=0, start=0, count=1, window=6)


@given(st.floats(0.01, 1), st.integers(1, 200), st.integers(0, 10**6))
def test_no_window_of_a_mixture_exceeds_the_bound_of_a_source(
    share: float, window: int, start: int
):
    most = max_in_window(share, window)
    assert 0 <= most - share * window < 4 or most == window
    golden = (5**0.5 - 1) / 2
    places = (golden * np.arange(start, start + window)) % 1
    for origin in (0.0, 0.3, places[0], places[-1]):
        assert np.count_nonzero((places - origin) % 1 < share - 1e-6) <= most
