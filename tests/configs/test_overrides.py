"""Settings from the command line."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.load import load_config
from configs.overrides import apply_overrides
from configs.toml_text import read_value, show_value

from .conftest import SMALL
from .test_load import mistakes

TREE = tomllib.loads(SMALL.replace("validation = 0", ""))
# TOML cannot hold surrogates.
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def applied(key: str, text: str) -> object:
    tree, wrong = apply_overrides(TREE, [(key, text)])
    assert not wrong
    value: object = tree
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]  # type: ignore[index]
    return value


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("learner.lr", "1e-4", 1e-4),
        ("learner.lr", "1", 1),
        ("rewards.shuffle", "false", False),
        ("budget.time", "9h", "9h"),
        ("budget.time", '"9h"', "9h"),
        ("run.name", "123", "123"),
        ("run.name", "1979-05-27", "1979-05-27"),
        ("run.name", "none", "none"),
        ("data.answer_pattern", "#### (.+)", "#### (.+)"),
        ("prompt.system", "a = 1\nb = 2", "a = 1\nb = 2"),
        ("wandb.entity", '"none"', "none"),
        ("rollout.stop_tokens", '["<eos>", "x"]', ["<eos>", "x"]),
        ("rewards.functions.1.weight", "-0.5", -0.5),
        ("rewards.functions.2.name", "third", "third"),
        ("data.validation.split", "train[:9]", "train[:9]"),
    ],
)
def test_a_text_becomes_the_settings_value(key: str, text: str, value: object) -> None:
    result = applied(key, text)
    assert result == value
    assert type(result) is type(value)


VALUES = st.recursive(
    st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=8,
)


@given(VALUES)
def test_shown_values_are_toml_on_one_line(value: object) -> None:
    text = show_value(value)
    assert "\n" not in text
    assert read_value(text) == value


def test_the_last_override_wins_and_none_unsets(small: Path) -> None:
    more = [("budget.steps", "none"), ("budget.time", "90s")]
    config = load_config(small, [("lora.rank", "2"), ("lora.rank", "4"), *more])
    assert config.lora.rank == 4
    assert (config.budget.steps, config.budget.time_s) == (None, 90)


@pytest.mark.parametrize("value", ["3", "[]"])
def test_an_override_inside_another_value_reports_the_files_mistake(
    tmp_path: Path, value: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"learner = {value}\n{SMALL}", encoding="utf-8")
    assert mistakes(path, ("learner.lr", "1")) == (f"{path}: learner = {value}: must be a table",)
