"""`launch.bench race`: its claims and picture, and a race of two minutes."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pytest

from launch.bench import __main__ as bench
from launch.bench import race
from launch.bench.harness import Figures


def run(*points: tuple[float, float, int, float], test: float) -> Figures:
    return {"points": points, "test_after": test}


def held(found: Mapping[str, Figures]) -> list[bool]:
    (section,) = bench.prepare(["race", "--seeds", "0"])[1]
    return [claim.holds for claims in section.claims for claim in claims(found)]


SLOW = run((0, 0, 0, 0.4), (60, 50, 10, 0.6), (90, 100, 20, 0.7), test=0.65)
FAST = run((0, 0, 0, 0.4), (30, 50, 10, 0.72), (90, 200, 40, 0.8), test=0.75)


def test_a_race_is_won_by_seconds_by_the_end_and_by_samples():
    assert held({"ours, lr 0.1, seed 0": FAST, "Tunix, lr 0.1, seed 0": SLOW}) == [True] * 3
    assert held({"ours, lr 0.1, seed 0": SLOW, "Tunix, lr 0.1, seed 0": FAST}) == [False] * 3


def test_the_best_learning_rate_of_each_side_counts():
    worse = run((0, 0, 0, 0.4), (90, 50, 10, 0.5), test=0.45)
    found = {f"{side}, lr 0.2, seed 0": worse for side in ("ours", "Tunix")}
    found |= {"ours, lr 0.1, seed 0": FAST, "Tunix, lr 0.3, seed 0": SLOW}
    assert held(found) == [True] * 3


def test_each_side_can_have_rates_of_its_own():
    request = ["race", "--seeds", "0", "--lr", "0.1", "--tunix-lr", "0.2", "0.3"]
    (section,) = bench.prepare(request)[1]
    names = [f"{one}, seed 0" for one in ("ours, lr 0.1", "Tunix, lr 0.2", "Tunix, lr 0.3")]
    assert [row.name for row in section.rows] == names


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        (["--tunix-lr", "-1"], "learner.lr"),
        (["--every", "0"], "--every 0"),
        (["--minutes", "0"], "budget.time"),
        (["--seeds", "-1"], "run.seed"),
    ],
)
def test_numbers_that_a_run_refuses_are_refused_at_once(asked, key):
    with pytest.raises(ValueError, match=key):
        bench.prepare(["race", *asked])


def test_mean_and_range_of_the_seeds_are_drawn():
    seeds = {"ours, lr 0.1, seed 0": SLOW, "ours, lr 0.1, seed 1": FAST}
    figure = race.draw({**seeds, "Tunix, lr 0.1, seed 0": SLOW})
    assert [len(axes.lines) for axes in figure.axes] == [2, 2, 2]
    pane = figure.axes[0]
    for line, end in zip(pane.lines, (0.75, 0.7), strict=True):
        drawn = np.asarray(line.get_xydata(), float)
        assert drawn[[0, -1]] == pytest.approx(np.array([[0, 0.4], [90, end]]))
    range_ = np.asarray(pane.collections[0].get_paths()[0].vertices, float)[:, 1]
    assert (range_.min(), range_.max()) == pytest.approx((0.4, 0.8))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1_200)
def test_both_sides_learn_the_demo(tmp_path):
    file = tmp_path / "race.json"
    bench.main(["race", "--quick", "--json", str(file)])
    found = json.loads(file.read_text())["sections"]["race"]
    assert len(found) == 2
    for figures in found.values():
        assert figures["test_before"] == pytest.approx(0.476, abs=0.02)
        assert figures["points"][0][2] == 0
        assert figures["test_after"] > figures["test_before"]
    assert (tmp_path / "race.race.png").stat().st_size > 10_000
