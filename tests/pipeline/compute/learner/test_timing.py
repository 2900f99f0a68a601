"""The micro-batch that is timed has full rows."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.compute.learner.timing import full_micro_batch
from pipeline.data.batching import batch_shape
from tests import tiny

ROW = 42


@pytest.mark.parametrize(("share", "of_row"), [(False, 5), (True, 7)])
def test_rows_hold_rollouts_of_the_expected_length(share: bool, of_row: int):
    plan = {"micro_batch_tokens": 4 * 2 * ROW, "row_tokens": 2 * ROW}
    config = tiny.make_config(plan=plan, learner={"share_prefix": share})
    batch = full_micro_batch(config, shape=batch_shape(config, pad=0), token=4)
    # Half of 14 prompt tokens and 0.35 of 28 completion tokens: sequences of 6 + 10 in a row of 84,
    # or completions beside one prompt, which then has its own segment.
    assert (batch.segments.max(axis=1) == of_row + share).all()
    assert batch.num_tokens == of_row * 10 * len(batch.tokens) == of_row * 10 * 4
    assert set(np.unique(batch.tokens)) == {0, 4}
