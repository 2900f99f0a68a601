"""Rows of `launch.bench` that are measured on this machine, in a small setting."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch.bench import balance, learner, packing, rollout, small_gemma, sweep, top_k
from launch.bench.rollout import Case
from launch.bench.small_gemma import make_lengths, make_requests
from launch.bench.sweep_plot import figure, write_plot
from pipeline.compute.model.head import Head
from pipeline.compute.model.sharding import make_mesh
from pipeline.data.models.model_shape import ModelShape
from pipeline.plan.topology import HBM_GIB

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
def small() -> Iterator[pytest.MonkeyPatch]:
    """A tiny model, and few and short rollouts."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in MODEL.items():
            patch.setitem(small_gemma.SMALL, name, value)
        for name, size in SIZES.items():
            for module in (small_gemma, rollout, sweep, balance):
                if hasattr(module, name):
                    patch.setattr(module, name, size)
        yield patch


@pytest.fixture(scope="module")
def case(small: pytest.MonkeyPatch) -> Case:
    """Both samplers; `Case.make` returns the same ones."""
    case = Case.make()
    small.setattr(Case, "make", lambda: case)
    return case


def test_lengths_are_truncated_and_have_the_documented_mean():
    lengths = make_lengths(20_000)
    assert lengths.min() >= 1
    assert lengths.max() == small_gemma.NEW
    assert lengths.mean() / small_gemma.NEW == pytest.approx(0.35, abs=0.005)


def test_groups_share_a_prompt_and_rollouts_have_distinct_names(small):
    requests = make_requests([5, 6, 7, 8, 9, 10])
    assert len({request.name for request in requests}) == 6
    assert [request.max_new_tokens for request in requests] == [5, 6, 7, 8, 9, 10]
    prompts = [request.prompt_tokens for request in requests]
    assert all(3 <= len(prompt) <= 6 for prompt in prompts)
    assert prompts[0] is prompts[1]
    assert not np.array_equal(prompts[1], prompts[2])


def test_both_samplers_generate_the_requested_tokens_and_count_work(case):
    steps = [make_requests([1, 2, 3, 12]), make_requests([4, 4, 5, 5])]
    # Batches of two rows with 2, 12, 4 and 5 steps.
    assert rollout.theirs(case, steps, batch=2) == 2 * (2 + 12 + 4 + 5)
    # Four slots for three decode steps, then one slot for nine.
    assert rollout.ours(case, steps) == (4 * 3 + 9) + (4 * 3 + 4 * 3)


def test_a_row_has_both_speeds_and_no_compilations(case):
    found = rollout.speed(share=1, equal=True, repeats=1)
    assert found["tokens"] == 16 * 12
    assert found["batch"] in {1, 2, 4}
    assert found["compiled"] == 0
    assert found["ratio"] == pytest.approx(found["ours"] / found["theirs"])
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


@pytest.mark.parametrize(
    "settings",
    [{"rollout__top_k": 5}, {"plan__rollout_weights": "merged", "plan__kv_cache": "int8"}],
    ids=["top-k", "merged, int8 KV"],
)
def test_a_segment_is_measured_with_every_slot_busy(small, settings):
    found = sweep.measured(slots=2, length=18, **settings)
    assert found["device"] == "cpu"
    assert found["mib"] > 0
    assert found["tokens_per_s"] == pytest.approx(2 / (1e-3 * found["step_ms"]))


def test_a_cpu_is_not_an_accelerator():
    assert sweep.measured(slots=2, accelerator=True) == {"absent": "JAX finds a CPU only"}


def test_all_variants_train_on_the_same_tokens(small, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(balance, "FIXED", (2,))
    monkeypatch.setattr(balance, "_RECIPE_STEPS", 2)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    kept = jax.config.values["jax_compilation_cache_dir"]
    trained: dict[str, int] = {}
    in_turns = balance.alternate

    def watched(runs, *, repeats):
        found = in_turns(runs, repeats=repeats)
        trained.update({name: sum(step() for step in steps) for name, steps in runs.items()})
        return found

    monkeypatch.setattr(balance, "alternate", watched)
    try:
        found = balance.tokens_a_second(prompts_per_step=1, steps=2, repeats=1)
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)
    assert trained.keys() == {"2", "recipe"} | (set() if found["slots"] == 2 else {"found"})
    assert set(trained.values()) == {make_lengths(2 * 2).sum()}
    assert found["slots"] in {1, 2}
    assert found["rows"] >= 1
    assert found["compiled"] == 0
    assert found["of_best"] == found["tokens_found"] / found["tokens_2"]
    assert found["of_recipe"] == found["tokens_found"] / found["tokens_recipe"]


@pytest.fixture(scope="module")
def gradients() -> learner.Case:
    """The learner's case with a small vocabulary and short sequences."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (MODEL | {"sliding_window": 8}).items():
            patch.setitem(learner.BODY, name, value)
        patch.setattr(learner, "PROMPT", 6)
        patch.setattr(learner, "COMPLETION", 10)
        return learner.Case.make(sequences=3, dtype="float32")


def test_our_gradient_equals_those_of_whole_logits_and_of_tunix(gradients):
    ours = gradients.ours()()
    assert learner.apart(ours, gradients.materialised()) < 1e-5
    assert learner.apart(ours, gradients.theirs(remat=True)()) < 1e-4


def test_the_distance_between_gradients():
    one, other = {"a": jnp.array([3.0, 4.5])}, {"a": jnp.array([3.0, 4.0])}
    assert learner.apart(one, other) == pytest.approx(0.1)


def test_the_recipe_and_our_head_find_the_same_top_k(monkeypatch):
    monkeypatch.setattr(top_k, "K", 16)
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((2, 5, 24), np.float32))
    embedding = jnp.asarray(rng.standard_normal((512, 24), np.float32))
    mesh = make_mesh(jax.devices()[:1])
    head = Head(softcap=None, temperature=1.0, tokens=4, vocab=128, mesh=mesh)
    expected = top_k.public_recipe(hidden, embedding)
    found = top_k.ours(hidden, embedding, head=head)
    assert expected.logprobs.shape == (2, 5, 16)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    np.testing.assert_array_equal(found.tokens, expected.tokens)


def test_operations_of_packing_by_hand():
    shape = ModelShape(
        local=(True,) * 5 + (False,),
        window=10,
        embed=3,
        hidden=5,
        heads=4,
        kv_heads=1,
        head_dim=2,
        vocab=7,
        query_key_norm=True,
        attention_softcap=None,
        final_softcap=None,
    )
    # A layer: queries and output 2 x 3 x 8, key and value 2 x 3 x 2, MLP 3 x 15.
    matrices = 6 * (48 + 12 + 45)
    # One layer sees the row, five two bands of 64 keys; 4 x 4 x 2 operations for each.
    attention = 32 * (1 * 1000 + 5 * 2 * 64)
    assert packing.operations(1000, shape) == 6 * matrices + 4 * attention
    # Besides these, five layers see a shared prompt of at most 320.
    shared = attention + 32 * 5 * 320
    assert packing.operations(1000, shape, shared=True) == 6 * matrices + 4 * shared
    assert packing.seen_keys(300, 10) == 2 * 64
    assert packing.seen_keys(100, 10) == 100


def test_packing_counts_padding():
    # 65 rows of 1,024 in micro-batches of 64 and 8.
    assert packing.computed_positions(65, 1024) == 72 * 1024
    prompt = np.zeros(101, np.int32)
    group = [packing.DrawnRollout(prompt, np.zeros(n, np.int32)) for n in (900, 400, 400, 10)]
    # The last token of a completion is no input: 1,000, 500, 500 and 110 positions.
    assert packing.used_rows([group], row=1024) == ({1024: 3}, 2110)
    # 900 and 10; 400 and 400; each row has the 100 positions of the prompt.
    assert packing.used_rows([group], row=1024, share=True) == ({1024: 2}, 1910)
    assert packing.used_rows([group], buckets=(512, 1024)) == ({1024: 1, 512: 3}, 2114)


def test_shared_prompts_save_positions():
    separate, shared = (packing.scheme(row=4096, share=share) for share in (False, True))
    for mean in packing.COMPLETION_MEANS:
        assert shared[f"positions_{mean}"] < 0.85 * separate[f"positions_{mean}"]
    assert shared["positions_296"] < 0.75 * separate["positions_296"]


def points(line: Any) -> list[tuple[float, float]]:
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_the_plot_shows_the_figures(tmp_path):
    v5e = {
        "LoRA, 64 slots": {"slots": 64, "tokens_per_s": 6000.0, "gib": 4.0},
        "LoRA, 1 slot": {"slots": 1, "tokens_per_s": 200.0, "gib": 2.0},
        "LoRA, 4096 slots": {"slots": 4096, "fits": False, "gib": 20.0},
    }
    merged = {"merged, 64 slots": {"slots": 64, "tokens_per_s": 7000.0, "gib": 5.0}}
    cpu = {"LoRA, 1 slot": {"slots": 1, "device": "1 x cpu", "tokens_per_s": 500.0, "mib": 8.0}}
    sections = {"v5e slots": v5e, "v5e weights": merged, "cpu": cpu, "accelerator": {}}
    content = {"machine": "Some CPU, 2 cores", "sections": sections}
    drawn = figure(content)
    assert drawn is not None
    speed, memory, here, here_memory = drawn.axes
    assert speed.get_title().endswith("one TPU v5e chip: estimates, not measurements")
    assert here.get_title().endswith("measured on Some CPU, 2 cores")
    lines = {line.get_label(): line for line in speed.lines}
    assert points(lines["LoRA"]) == [(1, 200), (64, 6000)]
    assert points(lines["merged"]) == [(64, 7000)]
    assert points(memory.lines[0]) == [(1, 2), (64, 4)]
    assert {height for _, height in points(memory.lines[-1])} == {HBM_GIB}
    assert points(here_memory.lines[0]) == [(1, 8)]
    path = tmp_path / "drawn"
    write_plot(path, {**content, "sections": {"cpu": {}}})
    assert not path.exists()
    write_plot(path, content)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert [each.name for each in tmp_path.iterdir()] == ["drawn"]
