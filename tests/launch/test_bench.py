"""`launch.bench`: requests and mistakes, tables and claims, rows of all benchmarks."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from typing import Any, cast

import jax
import pytest

from configs.load import load_config
from launch.bench import __main__ as bench
from launch.bench import balance, chaos, launched, learner
from launch.bench.harness import Bound, Row, Section, progress
from launch.bench.torch import APART, SIZES, make_config


def row(name: str, **figures) -> Row:
    return Row(name, dict, figures)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch):
    """Replaces the sections of a benchmark by cheap ones."""

    def replace(*sections: Section) -> None:
        monkeypatch.setattr(learner, "sections", lambda _: sections)

    replace(
        Section(
            "one",
            "About one",
            [
                Row("a", dict, {"gib": 1.2345678, "fits": True}, seconds=120),
                row("b", fits=False),
            ],
        ),
        Section("two", "About two", [row("a", tokens=22429, seconds=0.5)]),
    )
    return replace


def test_figures_are_shown_and_written(made_up, tmp_path, capsys):
    path = tmp_path / "found.json"
    assert bench.main(["learner", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "About one\n\n|  | how | gib | fits |\n| --- | --- | --- | --- |\n" in out
    assert "| a | measured on cpu | 1.235 | yes |\n| b | measured on cpu |  | NO |" in out
    assert "| a | measured on cpu | 22,429 | 0.5 |" in out
    assert f"jax {jax.__version__}" in out
    assert err.startswith("3 rows: about 2 minutes on two idle cores\n[1/3] one/a")
    found = json.loads(path.read_text())
    assert found["benchmark"] == "learner"
    figures = {"how": "measured on cpu", "gib": 1.2345678, "fits": True}
    assert found["sections"]["one"]["a"] == figures
    assert [p.name for p in tmp_path.iterdir()] == ["found.json"]
    assert bench.main(["learner", "--only", "o*b"]) == 0
    assert "[1/1] one/b ..." in capsys.readouterr().err


def test_a_row_that_was_killed_says_so(made_up, tmp_path):
    path = tmp_path / "found.json"
    made_up(Section("one", "About one", [Row("a", os.abort)]))
    assert bench.main(["learner", "--json", str(path)]) == 1
    failed = json.loads(path.read_text())["sections"]["one"]["a"]["failed"]
    assert failed.startswith("killed by SIGABRT")


def test_a_run_that_was_broken_off_continues(made_up, tmp_path, capsys):
    path = tmp_path / "found.json"
    assert bench.main(["learner", "--only", "one", "--json", str(path)]) == 0
    capsys.readouterr()
    assert bench.main(["learner", "--json", str(path)]) == 0
    err = capsys.readouterr().err
    assert err.startswith("1 rows: about 0 minutes on two idle cores; 2 rows are kept from ")
    assert "[1/1] two/a ..." in err
    made_up(Section("one", "About one", [row("a", gib=2.0)]))
    assert bench.main(["learner", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["sections"]["one"]["a"]["gib"] == 2.0


def test_a_failed_row_is_shown_and_the_others_are_measured(made_up, capsys):
    broken = Row("broken", learner.wide_gradient, {"nonsense": 1})
    made_up(Section("one", "One", [broken, row("a", gib=1)]))
    assert bench.main(["learner"]) == 1
    out, err = capsys.readouterr()
    assert "| broken | TypeError: " in out
    assert "| a |  | measured on cpu | 1 |" in out
    assert "wide_gradient ended with 1:" in err
    made_up(Section("one", "One", [row("a", x=1)], [Bound("x", most=0)]))
    assert bench.main(["learner"]) == 1
    assert "\nDOES NOT HOLD: a: x 1 (at most 0)" in capsys.readouterr().out


def test_progress_inside_a_row_is_shown(made_up, capsys):
    made_up(Section("one", "One", [Row("a", cast("Any", progress), {"text": "half of it"})]))
    assert bench.main(["learner"]) == 1  # it has no figures
    assert "[1/1] one/a ...\n> half of it\n" in capsys.readouterr().err


def test_without_the_tpu_compiler_nothing_is_measured(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert bench.main(["hbm"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("the TPU compiler is missing: install the package libtpu")


def test_bounds_are_claimed_for_their_rows():
    found = {"a 1": {"x": 2.0}, "a 2": {"x": 0.5}, "a 3": {}, "b": {"x": 0.0}}
    claims = list(Bound("x", least=1, rows="a*")(found))
    assert claims == [
        ("a 1: x 2 (at least 1)", True),
        ("a 2: x 0.5 (at least 1)", False),
        ("a 3: x missing (at least 1)", False),
    ]
    assert next(Bound("x", most=0)(found)).text == "a 1: x 2 (at most 0)"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "command line: the following arguments are required: NAME; --help describes"),
        (["lerner"], "command line: argument NAME: invalid choice: 'lerner' (choose from "),
        (
            ["learner", "--jsn", "x"],
            "command line: unrecognized arguments: --jsn x; --help describes the command\n",
        ),
        (["learner", "--only", "128x"], "command line: --only 128x: no such row; nearest: "),
        (["sizing", "--quick", "--device", "compiler"], "command line: --quick measures a small"),
    ],
)
def test_a_mistake_is_one_line(capsys, argv, expected):
    assert bench.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith(expected)
    assert err.count("\n") == 1


REQUESTS = [
    *([name] for name in bench.BENCHMARKS),
    *([name, "--quick"] for name in bench.BENCHMARKS if name != "hbm"),
    *([name, "--device", "compiler"] for name in ("sizing", "latency", "mesh", "serve")),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=" ".join)
def test_rows_have_own_names_and_arguments_that_a_child_can_read(request_: list[str]):
    request, sections = bench.prepare(request_)
    rows = [(section.name, row) for section in sections for row in section.rows]
    assert rows
    assert len({(section, row.name) for section, row in rows}) == len(rows)
    for _, each in rows:
        json.dumps(each.arguments)
        module = importlib.import_module(each.measure.__module__)
        assert getattr(module, each.measure.__qualname__) is each.measure
    if request.device == "compiler":
        assert 0 < sum(each.programs for _, each in rows) <= 60


def test_transformers_agrees_with_what_ours_sampled(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "found.json"
    assert bench.main(["torch", "--quick", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["sections"]["decode"]["small"]["apart"] < APART


@pytest.mark.parametrize(
    "settings",
    [
        balance.SETTINGS | {"plan.slots": "none"},
        balance.SETTINGS | {"plan.slots": 24},
        chaos.SETTINGS,
        chaos.SETTINGS | chaos.COLOCATED,
    ],
)
def test_a_run_accepts_the_settings_of_a_benchmark(settings):
    given = [(key, str(value)) for key, value in settings.items()]
    assert load_config("configs/demo.toml", given).eval.every_steps == settings["eval.every_steps"]


def test_a_signal_waits_for_the_end_of_a_run(tmp_path, monkeypatch):
    ended = tmp_path / "ended"
    script = f"""
import pathlib, signal, sys, time
def stop(*_):
    time.sleep(1)
    pathlib.Path({str(ended)!r}).touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
time.sleep(60)
"""
    monkeypatch.setattr(launched, "train_command", lambda *_, **__: [sys.executable, "-c", script])
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(KeyboardInterrupt), launched.trained("", {}, environment={}):
            pass
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended.exists()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_settings_of_ours_beside_torch_are_valid(sizes: dict[str, int]):
    config = make_config(sizes)
    assert config.slots == sizes["rows"]
    assert config.row_tokens * 2 == config.plan.micro_batch_tokens
