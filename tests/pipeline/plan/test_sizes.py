"""Sizes in a configuration, and the next smaller ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.schema import Config
from pipeline.plan.sizes import Sizes, sized, smaller
from tests.samples import make_config

ROW = 88
"""The longest sequence, and the row length, of the fakes' configuration."""


def config(**plan: object) -> Config:
    return make_config(Path(), plan={"platform": "cpu", "placement": "split", **plan})


def test_sized_changes_the_sizes_and_nothing_else() -> None:
    whole = config(slots=16, slot_buckets=[12, 6, 4], micro_batch_tokens=4 * ROW)
    assert whole.plan.slot_ladder == (16, 12, 6, 4)
    small = sized(whole, Sizes(slots=8, micro_batch_tokens=2 * ROW))
    assert Sizes.of(small) == Sizes(8, 2 * ROW)
    assert small.plan.slot_ladder == (8, 6, 4)
    assert sized(small, Sizes.of(whole)) == whole
    assert config(slots=20, sampler_devices=2).plan.slot_ladder == (20, 10, 2)
    with pytest.raises(ValueError, match="a multiple of 88, a row of 88 tokens"):
        sized(whole, Sizes(slots=8, micro_batch_tokens=ROW + 1))


@pytest.mark.parametrize(
    ("slots", "shards", "ladder"),
    [
        (64, 1, [48, 32, 24, 16, 12, 9, 6, 4, 3, 2, 1]),
        (512, 8, [384, 256, 192, 128, 96, 72, 48, 32, 24, 16, 8]),
        (6, 2, [4, 2]),
    ],
)
def test_sizes_fall_in_multiples_of_the_shards(slots: int, shards: int, ladder: list[int]) -> None:
    given, found = config(slots=slots, sampler_devices=shards), []
    sizes = Sizes.of(given)
    while (fewer := smaller(given, sizes, "generate")) is not None:
        sizes = fewer
        found.append(sizes.slots)
        assert sizes.micro_batch_tokens == given.plan.micro_batch_tokens
    assert found == ladder


def test_phases_of_the_learner_reduce_micro_batches() -> None:
    rows = config(slots=2, learner_devices=2, micro_batch_tokens=8 * ROW)
    for phase in ("score", "update", "publish", "export"):
        assert smaller(rows, Sizes.of(rows), phase) == Sizes(2, 6 * ROW)
        assert smaller(rows, Sizes(2, 2 * ROW), phase) is None


@pytest.mark.parametrize(
    ("share", "slots"), [(0.9, 48), (0.3, 16), (0.02, 1), (0.001, 1), (0.0, None), (-0.1, None)]
)
def test_a_known_share_of_memory_skips_sizes_that_are_too_large(
    share: float, slots: int | None
) -> None:
    given = config(slots=64)
    found = smaller(given, Sizes.of(given), "generate", share=share)
    assert (found and found.slots) == slots
