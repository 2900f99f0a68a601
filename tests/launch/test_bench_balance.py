"""`launch.bench balance` in a small setting: compared variants, trained tokens, claims."""

from __future__ import annotations

import os
from collections.abc import Iterator

import jax
import pytest

from launch.bench import balance_bench, balance_case, balance_recipe, models, rollout_case
from launch.bench.balance_case import tokens_a_second
from tests.launch.tiny_rollouts import SIZES, TINY

(TRAINED,) = balance_bench.BENCHMARK.sections


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(models.MODELS, "small_policy", models.MODELS["small_policy"] | TINY)
    sizes = {**SIZES, "FIXED": (2, 4), "_RECIPE_STEPS": 2}
    for name, size in sizes.items():
        for module in (rollout_case, balance_case, balance_recipe):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, size)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    kept = jax.config.values["jax_compilation_cache_dir"]
    yield
    jax.config.update("jax_compilation_cache_dir", kept)


def claims(**figures: float) -> list[bool]:
    return [claim.holds for claim in TRAINED.claims({"row": figures})]


def test_all_variants_train_on_the_same_tokens(small: None, monkeypatch: pytest.MonkeyPatch):
    trained: dict[str, set[int]] = {}
    in_turns = balance_case._alternate

    def watched(runs, *, repeats):
        found = in_turns(runs, repeats=repeats)
        trained.update({name: {sum(step() for step in steps)} for name, steps in runs.items()})
        return found

    monkeypatch.setattr(balance_case, "_alternate", watched)
    found = tokens_a_second(prompts_per_step=2, steps=2, repeats=1)
    lengths = rollout_case.make_lengths(2 * found["rollouts"])
    assert trained.pop("recipe") == {int(lengths[:4].sum())}
    own = set() if found["slots"] in {2, 4} else {"found"}
    assert trained.keys() == {"2", "4"} | own
    assert all(tokens == {int(lengths.sum())} for tokens in trained.values())
    assert found["slots"] in {1, 2, 4, 8}
    assert found["rows"] >= 1
    best = max(found["tokens_2"], found["tokens_4"])
    assert found["of_best"] == found["tokens_found"] / best
    assert found["of_recipe"] == found["tokens_found"] / found["tokens_recipe"]


def test_claims():
    assert claims(of_best=0.98, of_recipe=3.0) == [True, True]
    assert claims(of_best=0.97, of_recipe=3.0) == [False, True]
    assert claims(of_best=1.2, of_recipe=2.9) == [True, False]
    assert claims() == [False, False]
