"""`launch.bench`: requests and mistakes, tables, and small cases of its measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch.bench import __main__ as bench
from launch.bench import (
    hbm_bench,
    learner_bench,
    models,
    packing,
    recipe,
    rollout_bench,
    small_body,
    sweep_bench,
    tunix_peer,
)
from launch.bench.child import in_child
from launch.bench.compiled import figures
from launch.bench.table import Benchmark, Claim, Column, Row, Section
from pipeline.compute.aot.compile import compile_for
from pipeline.compute.model.head import Head
from pipeline.compute.model.sharding import make_mesh

PROJECT = Path(__file__).parents[2]
TINY = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": 8,
}


def row(name: str, **given) -> Row:
    return Row(name, "builtins:dict", given, {})


def section(name: str, *rows: Row, claims=None) -> Section:
    columns = (Column("gib", "GiB", "{:.2f}"), Column("good", "good"))
    return Section(name, f"About {name}", columns, rows, *([claims] if claims else []))


class MadeUp:
    """A benchmark with cheap rows; `sections` can be replaced."""

    def __init__(self) -> None:
        self.sections: tuple[Section, ...] = (
            section("one", row("a", gib=1.234, good=True), row("b", fits=False, needs_gib=18.2)),
            section("two", row("a", gib=2)),
        )

    @property
    def BENCHMARK(self) -> Benchmark:  # noqa: N802  # as in the real modules
        return Benchmark(self.sections)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    """Replaces the benchmark "hbm"."""
    found = MadeUp()
    monkeypatch.setitem(sys.modules, "launch.bench.hbm_bench", found)
    return found


def test_figures_are_shown_and_written(made_up, tmp_path, capsys):
    path = tmp_path / "found.json"
    assert bench.main(["hbm", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "| a | 1.23 | yes |" in out
    assert "| b | does not fit (the compiler: 18.20 GiB) |  |" in out
    assert "| a | 2.00 |  |" in out
    assert f"jax {jax.__version__}" in out
    assert "[3/3] two/a ..." in err
    found = json.loads(path.read_text())
    assert found["benchmark"] == "hbm"
    assert found["sections"]["one"]["a"] == {"gib": 1.234, "good": True}
    assert found["sections"]["two"] == {"a": {"gib": 2}}
    assert "machine" in found
    assert [p.name for p in tmp_path.iterdir()] == ["found.json"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("two", ["two/a"]), ("one/b", ["one/b"]), ("/a", ["one/a", "two/a"]), ("o*b", ["one/b"])],
)
def test_rows_can_be_chosen(made_up, capsys, pattern, expected):
    assert bench.main(["hbm", "--only", pattern, "--list"]) == 0
    assert capsys.readouterr().out.split() == expected


def test_a_failed_row_is_shown_and_the_others_are_measured(made_up, capsys):
    broken = Row("broken", "builtins:int", {"nonsense": 1}, {})
    made_up.sections = (section("one", broken, row("a", gib=1)),)
    assert bench.main(["hbm"]) == 1
    out, err = capsys.readouterr()
    assert "| broken | failed: TypeError: " in out
    assert "| a | 1.00 |" in out
    assert "builtins:int ended with 1:" in err


def test_a_claim_that_does_not_hold_is_an_error(made_up, capsys):
    for holds, status in ((True, 0), (False, 1)):
        made_up.sections = (section("one", row("a"), claims=lambda _, h=holds: [Claim("so", h)]),)
        assert bench.main(["hbm"]) == status
    assert "\nDOES NOT HOLD: so" in capsys.readouterr().out


THERE = "balance, hbm, learner, plan, rollout, sweep"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], f"command line: NAME is missing; there are {THERE}"),
        (
            ["hmb"],
            f"command line: hmb: no such benchmark; there are {THERE}",
        ),
        (
            ["hbm", "--jsn", "x"],
            "command line: --jsn: unknown; there are --only, --list, --json, --plot",
        ),
        (["hbm", "--only", "128x"], "command line: --only 128x: no such row; nearest: "),
        (["hbm", "--json", "/nowhere/x"], "command line: --json: no folder /nowhere\n"),
        (["hbm", "--plot", "/tmp"], "command line: --plot: /tmp is a folder; name a file\n"),
    ],
)
def test_a_mistake_is_one_line(capsys, argv, expected):
    assert bench.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith(expected)
    assert err.count("\n") == 1


def test_rows_measured_before_ctrl_c_are_shown(made_up, capsys, monkeypatch):
    made_up.sections = (section("one", row("a"), row("b")),)
    done: list[str] = []

    def measure(function: str, *_: object, **__: object) -> dict[str, object]:
        if done:
            raise KeyboardInterrupt
        done.append(function)
        return {"figure": 1.0}

    monkeypatch.setattr(bench, "in_child", measure)
    assert bench.main(["hbm"]) == 130
    out = capsys.readouterr().out
    assert "| a |" in out
    assert "| b |" not in out
    assert "interrupted" in out


def test_help_and_lists_load_nothing_heavy():
    code = (
        "import sys\n"
        "from launch.bench.__main__ import main\n"
        "for name in ('hbm', 'learner', 'rollout', 'sweep'): assert main([name, '--list']) == 0\n"
        "heavy = {'jax', 'numpy', 'flax', 'matplotlib', 'tunix', 'pydantic'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)\n"
        "main(['--help'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"
    assert "--only PATTERN" in done.stdout
    assert "gradient/128" in done.stdout


def test_a_child_has_its_own_environment():
    found: object = in_child("os:getenv", {"key": "SOME"}, environment={"SOME": "thing"})
    assert found == "thing"


def test_every_row_names_an_existing_function():
    for benchmark in (
        hbm_bench.BENCHMARK,
        learner_bench.BENCHMARK,
        rollout_bench.BENCHMARK,
        sweep_bench.BENCHMARK,
    ):
        rows = [(s.name, r) for s in benchmark.sections for r in s.rows]
        assert len({(name, r.name) for name, r in rows}) == len(rows)
        for _, each in rows:
            module, name = each.function.split(":")
            path = PROJECT / f"{module.replace('.', '/')}.py"
            assert f"\ndef {name}(" in path.read_text(), each.function


def test_claims_of_the_ladder():
    found = {
        "1": {"fits": True, "us_per_token": 1.2, "total_gib": 2.0, "invariant_3": True},
        "2": {"fits": True, "us_per_token": 1.02, "total_gib": 3.0, "invariant_3": True},
        "64": {"fits": True, "us_per_token": 1.0, "total_gib": 9.0, "invariant_3": False},
        "128": {"fits": False, "needs_gib": 20.0},
    }
    claims = {claim.text: claim.holds for claim in hbm_bench.BENCHMARK.sections[0].claims(found)}
    whole, fits, near = claims
    assert whole.endswith("; 64 do")
    assert [claims[text] for text in (whole, fits, near)] == [False, False, True]
    assert near.endswith("(1.00 µs) is the preset's of 2: 2 sequences, 1.02 µs, 3.00 GiB")
    found["128"] = found["64"] | {"invariant_3": True, "total_gib": 13.75}
    after = list(hbm_bench.BENCHMARK.sections[0].claims(found))
    assert after[1] == Claim("128 sequences in 13.75 GiB: 13.75", holds=True)
    found["8"] = found.pop("2")
    assert [claim.holds for claim in hbm_bench.BENCHMARK.sections[0].claims(found)][-1] is False


def refused(message: str) -> Any:
    """A traced program that the compiler refuses with this message."""

    def refuse(**_: Any) -> None:
        raise jax.errors.JaxRuntimeError(message)

    return SimpleNamespace(lower=lambda **_: SimpleNamespace(compile=refuse))


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.23G of 15.75G hbm.",
        "RESOURCE_EXHAUSTED: the total memory required (18.23G) exceeds available HBM (15.75G).",
    ],
)
def test_a_program_that_does_not_fit_is_reported(message):
    found = figures(lambda: compile_for(refused(message)), tokens=1, vocab=2, model=(3,))
    assert found == {"fits": False, "needs_gib": 18.23}


def test_another_error_of_the_compiler_is_raised():
    with pytest.raises(jax.errors.JaxRuntimeError, match="odd"):
        compile_for(refused("INTERNAL: odd"))


def test_operations_of_packing_by_hand():
    model = {
        "hidden_size": 3,
        "intermediate_size": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "num_hidden_layers": 6,
        "sliding_window_pattern": 6,
        "sliding_window": 10,
        "vocab_size": 7,
    }
    # A layer: queries and output 2 x 3 x 8, key and value 2 x 3 x 2, MLP 3 x 15; the head 21.
    matrices = 6 * (48 + 12 + 45) + 21
    # One layer sees 1,024 keys, five see 512 + 9; 4 x 4 x 2 operations for each.
    attention = 32 * (1 * 1024 + 5 * 521)
    assert packing.operations(1000, model) == 6 * matrices + 4 * attention
    assert packing.keys(300, 10) == packing.keys(300, None) == 300


def test_packing_counts_padding():
    # 65 rows of 1,024 in micro-batches of 64 and 8.
    assert packing._rows(65, 1024).positions == 72 * 1024
    lengths = np.array([1000, 500, 500, 100])
    assert packing._packed(lengths, 1024) == packing._rows(3, 1024)
    halves = packing._bucketed(lengths, (512, 1024))
    assert halves == packing._rows(1, 1024) + packing._rows(3, 512)


@pytest.fixture(scope="module")
def case() -> small_body.Case:
    """The benchmark's case with a small vocabulary and short sequences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.MODELS, "small_body", models.MODELS["small_body"] | TINY)
        patch.setattr(small_body, "VOCAB", 96)
        patch.setattr(small_body, "PROMPT", 6)
        patch.setattr(small_body, "COMPLETION", 10)
        return small_body.Case.make(sequences=3, dtype="float32")


@pytest.fixture(scope="module")
def ours(case: small_body.Case) -> dict[str, jax.Array]:
    return case.ours()()


def test_our_gradient_equals_that_with_whole_logits(case, ours):
    assert small_body.apart(ours, case.materialised()) < 1e-5


def test_our_gradient_equals_tunix_s_with_repaired_remat(case, ours, monkeypatch):
    create = tunix_peer.Peer.create
    monkeypatch.setattr(
        tunix_peer.Peer, "create", lambda *given, **how: create(*given, **how, remat=True)
    )
    assert small_body.apart(ours, case.theirs()()) < 1e-4


def test_the_distance_between_gradients():
    one, other = {"a": jnp.array([3.0, 4.5])}, {"a": jnp.array([3.0, 4.0])}
    assert small_body.apart(one, other) == pytest.approx(0.1)


def test_the_recipe_and_our_head_find_the_same_top_k(monkeypatch):
    monkeypatch.setattr(recipe, "VOCAB", 512)
    monkeypatch.setattr(recipe, "K", 16)
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((2, 5, 24), np.float32))
    embedding = jnp.asarray(rng.standard_normal((512, 24), np.float32))
    head = Head(
        softcap=None, temperature=1.0, tokens=4, vocab=128, mesh=make_mesh(jax.devices()[:1])
    )
    expected = recipe.public_recipe(hidden, embedding)
    found = recipe.ours(hidden, embedding, head=head)
    assert expected.logprobs.shape == (2, 5, 16)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
