"""Reward functions by name, and messages for unknown names."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from rewards import correctness
from rewards.correctness import exact_answer
from rewards.resolve import resolve, source_sha256


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    (tmp_path / "needy_rewards.py").write_text("import no_such_package.inner\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "rewards.correctness:exact_anwser",
            "rewards.correctness has no 'exact_anwser'; nearest in rewards.correctness: 'exact_ans",
        ),
        (
            "rewardz.correctness:exact_answer",
            "no module 'rewardz'; name a file of yours by its path: ",
        ),
        ("rewards.nummeric:one", "no module 'rewards.nummeric'; nearest in rewards: 'numeric'"),
        ("rewards.correctness", "is not of the form file.py:function or module:function"),
        ("broken_reward.py:one", "broken_reward.py; nearest in "),
        ("broken_rewards:one", "importing broken_rewards raises ZeroDivisionError: division by"),
        ("needy_rewards:one", "needy_rewards needs 'no_such_package': No module named"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("user_code")
def test_an_unusable_function_is_reported(function: str, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve(function)


def test_a_file_is_loaded_by_path_whatever_its_name(tmp_path: Path):
    (tmp_path / "helper.py").write_text("VALUE = 7\n")
    (tmp_path / "rewards.py").write_text(
        "import helper\ndef own(completion): return helper.VALUE\n"
    )
    own = resolve(f"{tmp_path}/rewards.py:own")
    assert callable(own)
    assert own("x") == 7
    assert resolve("rewards.correctness:exact_answer") is exact_answer
    assert resolve(f"{tmp_path}/rewards.py:own") is own


def test_the_hash_covers_the_file_and_what_it_imports_from_its_folder(tmp_path: Path):
    folder = tmp_path / "of_user"
    folder.mkdir()
    (folder / "hashed_helper.py").write_text("VALUE = 7\n")
    text = "import functools, hashed_helper\nf = functools.partial(max, hashed_helper.VALUE)\n"
    (folder / "file.py").write_text(text)
    (folder / "unused.py").write_text("")
    function = f"{folder}/file.py:f"
    resolve(function)
    expected = hashlib.sha256((text + "VALUE = 7\n").encode()).hexdigest()
    assert source_sha256(function) == expected
    (folder / "hashed_helper.py").write_text("VALUE = 8\n")
    assert source_sha256(function) != expected
    path = Path(correctness.__file__)
    resolve("rewards.correctness:exact_answer")
    own = hashlib.sha256(path.read_bytes()).hexdigest()
    assert source_sha256("rewards.correctness:exact_answer") == own
