"""RNG keys are a function of seed and name, on every machine."""

from __future__ import annotations

import dataclasses

import numpy as np

from pipeline.types import RolloutName

NAME = RolloutName("train", step=3, prompt_id=14, sample=1)


def test_promise_2_a_key_is_a_function_of_seed_and_name():
    # Golden value: another one would change the samples of every resumed run.
    np.testing.assert_array_equal(NAME.key(5), [1103981262, 3364692457])
    assert NAME.key(5).dtype == np.uint32
    np.testing.assert_array_equal(NAME.key(5), dataclasses.replace(NAME).key(5))


def test_keys_differ_for_every_part_of_the_name():
    names = [
        NAME,
        dataclasses.replace(NAME, phase="validation"),
        dataclasses.replace(NAME, step=4),
        dataclasses.replace(NAME, prompt_id=15),
        dataclasses.replace(NAME, sample=0),
        RolloutName("train", step=31, prompt_id=4, sample=1),
        RolloutName("train", step=3, prompt_id=1, sample=41),
    ]
    keys = {name.key(5).tobytes() for name in names} | {NAME.key(6).tobytes()}
    assert len(keys) == len(names) + 1
