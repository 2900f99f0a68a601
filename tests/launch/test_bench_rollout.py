"""`launch.bench rollout` in a small setting: counted work, equal greedy text, claims."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from launch.bench import models, rollout_bench, rollout_case, rollout_speed
from launch.bench.rollout_case import Case, make_lengths, make_requests
from launch.bench.table import Section
from tests.launch.tiny_rollouts import SIZES, TINY

LENGTHS, GREEDY, MEMORY = rollout_bench.BENCHMARK.sections


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    """The benchmark's case with few and short rollouts; `Case.make` returns this one, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.MODELS, "small_policy", models.MODELS["small_policy"] | TINY)
        for name, size in SIZES.items():
            for module in (rollout_case, rollout_speed):
                if hasattr(module, name):
                    patch.setattr(module, name, size)
        case = Case.make()
        patch.setattr(Case, "make", lambda: case)
        yield case


def claims(section: Section, name: str, **figures) -> dict[str, bool]:
    return {claim.text: claim.holds for claim in section.claims({name: figures})}


def test_lengths_are_truncated_and_have_the_documented_mean():
    lengths = make_lengths(20_000)
    assert lengths.min() >= 1
    assert lengths.max() == rollout_case.NEW
    assert lengths.mean() / rollout_case.NEW == pytest.approx(0.35, abs=0.005)


def test_groups_share_a_prompt_and_rollouts_have_distinct_names(case):
    requests = make_requests([5, 6, 7, 8, 9, 10])
    assert len({request.name for request in requests}) == 6
    assert [request.max_new_tokens for request in requests] == [5, 6, 7, 8, 9, 10]
    prompts = [request.prompt_tokens for request in requests]
    assert all(3 <= len(prompt) <= 6 for prompt in prompts)
    assert prompts[0] is prompts[1]
    assert not np.array_equal(prompts[1], prompts[2])


def test_both_samplers_generate_the_requested_tokens_and_count_work(case):
    steps = [make_requests([1, 2, 3, 12]), make_requests([4, 4, 5, 5])]
    mine = rollout_speed.ours(case, steps)
    peer = rollout_speed.theirs(case, steps, batch=2)
    assert mine.tokens == peer.tokens == 18 + 18
    # Batches of two rows with 2, 12, 4 and 5 steps; every row prefills its prompt.
    assert peer.computed == 2 * (2 + 12 + 4 + 5)
    assert peer.prompt_tokens == 8 * 6
    # Two prompts a step. Four slots for three decode steps, then one slot for nine.
    assert mine.prompt_tokens == 4 * 6
    assert mine.computed == (4 * 3 + 9) + (4 * 3 + 4 * 3)


def test_a_row_has_both_speeds_and_no_compilations(case):
    found = rollout_speed.speed(share=2, equal=False, repeats=1)
    assert found["rollouts"] == 16
    assert found["steps"] == 2
    assert found["batch"] in {2, 4, 8}
    assert found["compiled"] == 0
    assert found["ratio"] == pytest.approx(found["ours"] / found["theirs"])
    assert 0 < found["theirs_useful"] < 1
    equal = rollout_speed.speed(share=1, equal=True, repeats=1)
    assert equal["tokens"] == 16 * 12
    assert equal["ours_useful"] == equal["theirs_useful"] == 1.0


def test_greedy_text_equals_tunix_s(case):
    found = rollout_speed.greedy(prompts=4)
    assert found["other"] == 0
    assert found["tokens"] + found["ties"] * 12 >= 4 * 12
    assert found["apart"] < 1e-5


def test_different_text_is_counted(case, monkeypatch):
    draw = case.peer.sample

    def wrong(*given, **how):
        tokens, logprobs = map(np.copy, draw(*given, **how))
        tokens[1, 7] = (tokens[1, 7] + 1) % 96
        logprobs[0, 2] += 0.5
        return tokens, logprobs

    monkeypatch.setattr(type(case.peer), "sample", lambda _, *given, **how: wrong(*given, **how))
    found = rollout_speed.greedy(prompts=4)
    assert (found["other"], found["ties"], found["tokens"]) == (1, 0, 4 * 12 - 5)
    assert found["apart"] == pytest.approx(0.5, abs=1e-4)
    monkeypatch.setattr(rollout_speed, "TIE", 1e9)
    assert rollout_speed.greedy(prompts=4)["ties"] == 1


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("N/S = 16", {"ratio": 4.5, "ours_useful": 0.9}, {"ratio": 4.49, "ours_useful": 0.89}),
        ("N/S = 4", {"ours_useful": 0.75}, {"ours_useful": 0.74}),
        ("N/S = 1", {"ours_useful": 0.6}, {"ours_useful": 0.59}),
        ("all lengths equal", {"ratio": 1.8}, {"ratio": 1.79}),
    ],
)
def test_claims_about_lengths(name, good, bad):
    assert name in {row.name for row in LENGTHS.rows}
    shown = claims(LENGTHS, name, **good, compiled=0)
    assert len(shown) == len(good) + 1
    assert all(shown.values())
    assert not any(claims(LENGTHS, name, **bad, compiled=1).values())
    assert not any(claims(LENGTHS, name, failed="so").values())


def test_claims_about_greedy_text():
    (row,) = GREEDY.rows
    assert all(claims(GREEDY, row.name, other=0, apart=1e-4).values())
    assert not any(claims(GREEDY, row.name, other=1, apart=1.1e-4).values())
    assert not any(claims(GREEDY, row.name, failed="so").values())


def test_memory_claims_hold_where_the_figures_do():
    many = {"spare_gib": 4.0, "kv_share": 0.5, "invariant_3": True}
    assert [claim.holds for claim in MEMORY.claims({"ours, 512 slots": many})] == [True] * 3
    tight = {"spare_gib": 3.9, "kv_share": 0.51, "invariant_3": False}
    assert [claim.holds for claim in MEMORY.claims({"ours, 512 slots": tight})] == [False] * 3
    refused = {"fits": False, "needs_gib": 26.4}
    assert [claim.holds for claim in MEMORY.claims({"ours, 512 slots": refused})] == [False]
    # Other rows, Tunix's included, show their free memory without a claim.
    others = {"ours, 768 slots": many | {"spare_gib": 0.1}, "Tunix, 384": {"spare_gib": 0.7}}
    assert all(claim.holds for claim in MEMORY.claims(others))
