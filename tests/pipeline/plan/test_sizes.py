from __future__ import annotations

from pathlib import Path

import pytest

from configs.schema import Config
from pipeline.plan.sizes import Sizes, sized, smaller
from tests.samples import make_config

ROW = 88
"""The longest sequence, and the row length, of the fakes' configuration."""


def config(folder: Path = Path(), **plan: object) -> Config:
    return make_config(folder, plan={"platform": "cpu", "placement": "split", **plan})


def test_sized_changes_the_sizes_and_nothing_else() -> None:
    whole = config(slots=16, slot_buckets=[8, 4], micro_batch_tokens=4 * ROW)
    small = sized(whole, Sizes(slots=8, micro_batch_tokens=2 * ROW))
    assert Sizes.of(small) == Sizes(8, 2 * ROW)
    assert small.plan.slot_ladder == (8, 4)
    assert small.micro_batch_rows == 2
    kept = {"slots": 16, "micro_batch_tokens": 4 * ROW, "slot_buckets": (8, 4)}
    assert small.model_copy(update={"plan": small.plan.model_copy(update=kept)}) == whole
    assert sized(whole, Sizes.of(whole)) == whole


def test_sizes_that_do_not_suit_the_configuration_are_refused() -> None:
    with pytest.raises(ValueError, match="a multiple of 88, a row of 88 tokens"):
        sized(config(slots=16), Sizes(slots=8, micro_batch_tokens=ROW + 1))


@pytest.mark.parametrize(
    ("slots", "shards", "ladder"),
    [
        (64, 1, [48, 32, 24, 16, 12, 9, 6, 4, 3, 2, 1]),
        (512, 8, [384, 256, 192, 128, 96, 72, 48, 32, 24, 16, 8]),
        (6, 2, [4, 2]),
    ],
)
def test_sizes_fall_in_multiples_of_the_shards(slots: int, shards: int, ladder: list[int]) -> None:
    given_, found = config(slots=slots, sampler_devices=shards), []
    sizes = Sizes.of(given_)
    while (fewer := smaller(given_, sizes, "generate")) is not None:
        sizes = fewer
        found.append(sizes.slots)
        assert sizes.micro_batch_tokens == given_.plan.micro_batch_tokens
    assert found == ladder
    rows = config(slots=2, learner_devices=2, micro_batch_tokens=8 * ROW)
    for phase in ("score", "update", "publish", "export"):
        assert smaller(rows, Sizes.of(rows), phase) == Sizes(2, 6 * ROW)
        assert smaller(rows, Sizes(2, 2 * ROW), phase) is None


def test_a_known_share_of_memory_skips_sizes_that_are_too_large():
    given_ = config(slots=64)
    sizes = Sizes.of(given_)
    for share, slots in {0.9: 48, 0.3: 16, 0.02: 1, 0.001: 1}.items():
        found = smaller(given_, sizes, "generate", share=share)
        assert found is not None
        assert found.slots == slots, share
    assert smaller(given_, sizes, "generate", share=0.0) is None
    assert smaller(given_, sizes, "update", share=-0.1) is None
