"""The message for each kind of mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.errors import unknown_key
from configs.load import load_config
from configs.nearest import FROM_TRL, NO_KEY
from configs.settings import settings_by_path

from .conftest import SMALL, Write
from .test_load import mistakes

FROM_TRL_PAGE = Path(__file__).parents[2] / "docs" / "from_trl.md"
PATHS = "supported are file system paths"
MOUNT = "mount or download data that is stored elsewhere"
KEYS = (
    "contains a user's key or password; set it in the environment, as the library of %s:// "
    "documents, and remove it from the URL"
)


@pytest.mark.parametrize(
    ("key", "text", "line"),
    [
        (
            "learner.adam_b2",
            "1.5",
            "= 1.5: must be a number, at least 0 and below 1; nearest valid: just below 1",
        ),
        ("rollout.top_p", "7", "= 7: must be a number, above 0 and at most 1; nearest valid: 1.0"),
        ("run.seed", "-4", ("= -4: must be an integer, at least 0 and at most 4294967295; "
                           "nearest valid: 0")),
        ("lora.rank", "1e5", ("= 100000.0: must be an integer, at least 1 and at most 16384; "
                              "nearest valid: 16384")),
        (
            "learner.lr",
            "fast",
            '= "fast": must be a number, above 0 and at most 10; default: 5e-05',
        ),
        (
            "learner.lr",
            "nan",
            "= nan: must be a finite number, above 0 and at most 10; default: 5e-05",
        ),
        ("rewards.shuffle", "yes", '= "yes": must be true or false; nearest valid: true'),
        ("run.seed", '"8"', ('= "8": must be an integer, at least 0 and at most 4294967295; '
                             "nearest valid: 8")),
        (
            "learner.schedule",
            "cosinus",
            '= "cosinus": must be one of "constant", "linear", "cosine"; nearest valid: "cosine"',
        ),
        (
            "model.dtype",
            "x",
            '= "x": must be one of "float32", "bfloat16"; default: "bfloat16"',
        ),
        (
            "run.name",
            "my run",
            ('= "my run": must be a string of letters, digits, \'.\', \'_\' and \'-\' that begins '
            "with a letter or digit, at most 200 characters"),
        ),
        (
            "rewards.functions.0.function",
            "exact_answer",
            '= "exact_answer": must be a string of the form file.py:function or module:function',
        ),
        (
            "rollout.stop_tokens",
            "<eos>",
            ('= "<eos>": must be a list; each element: a string; default: ["<end_of_turn>", '
             '"<eos>"]'),
        ),
        ("learner", "3", "= 3: must be a table"),
        ("rewards.functions", "[]", ("= []: must be a list, not empty; each element: a table, or "
                                     "its function")),
        ("plan.prompt_buckets", "[0]", ".0 = 0: must be an integer, at least 1; nearest valid: 1"),
        ("budget.steps", "9" * 20, f"= {'9' * 20}: an integer of more than 64 bits"),
        # A long value is truncated.
        (
            "run.name",
            "x " * 100,
            (f'= "{"x " * 28}...: must be a string of letters, digits, \'.\', \'_\' and \'-\' that '
             "begins with a letter or digit, at most 200 characters"),
        ),
        # `none` unsets optional settings only.
        (
            "lora.rank",
            "none",
            '= "none": must be an integer, at least 1 and at most 16384; default: 32',
        ),
        (
            "rewards.functions.5.weight",
            "1",
            ": rewards.functions has 2 elements; the next is 2",
        ),
        ("rollout.stop_tokens.0", "x", ": set the whole list: --rollout.stop_tokens '[...]'"),
        (
            "run.dir",
            "~nosuchuser/runs",
            '= "~nosuchuser/runs": there is no such user; write the whole path',
        ),
        (
            "run.dir",
            "gs://bucket/runs",
            f'= "gs://bucket/runs": gs:// is not supported; {PATHS}; {MOUNT}',
        ),
        (
            "model.path",
            "gs://b/m",
            f'= "gs://b/m": gs:// is not supported; {PATHS}, hf:// and kaggle://; {MOUNT}',
        ),
        (
            "data.train.path",
            "gs:/a.jsonl",
            f'= "gs:/a.jsonl": gs:/ is not supported; {PATHS}; {MOUNT}',
        ),
        ("run.mirror", "s3://AKIA:s/cr/t@bucket/runs", f'= "s3://***@bucket/runs": {KEYS % "s3"}'),
        ("run.mirror", "sftp://me:s/cr/t@host/runs", f'= "sftp://***@host/runs": {KEYS % "sftp"}'),
        (
            "run.mirror",
            "hf://datasets/me/runs",
            ('= "hf://datasets/me/runs": hf:// needs a bucket, hf://buckets/USER/NAME: in a '
             "repository each file is a commit"),
        ),
    ],
)  # fmt: skip
def test_the_message_for_a_wrong_value(small: Path, key: str, text: str, line: str) -> None:
    between = "" if line[0] in ".:" else " "
    assert mistakes(small, (key, text)) == (f"command line: --{key}{between}{line}",)


def test_a_wrong_element_does_not_make_the_list_too_short(write: Write) -> None:
    path = write(SMALL.replace("rewards.format:well_formed", "well_formed"))
    assert mistakes(path) == (
        (
            f'{path}: rewards.functions.1.function = "well_formed": must be a string of the form '
            "file.py:function or module:function"
        ),
    )


def test_a_missing_table_names_its_keys(write: Write) -> None:
    path = write(SMALL.replace("[budget]\nsteps = 10", "").replace("[rewards]", "[rewardz]"))
    assert mistakes(path) == (
        f"{path}: rewards: missing; this table needs rewards.functions",
        f"{path}: budget: missing; this table has budget.steps, budget.time, budget.until",
        f"{path}: rewardz: unknown; did you mean rewards?",
    )


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("learner.seed", ["run.seed"]),
        ("seed", ["run.seed"]),
        ("learnr.lr", ["learner.lr"]),
        ("learner.warmup", ["learner.warmup_steps"]),
        ("learner.max-grad-norm", ["learner.max_grad_norm"]),
        ("learner.learning_rate", ["learner.lr"]),
        ("learner.adam.b1", ["learner.adam_b1"]),
        ("learner.temperature", ["eval.temperature", "rollout.temperature"]),
        ("rewards.functions.3.wieght", ["rewards.functions.3.weight"]),
        ("rewards.functions.N.weight", ["rewards.functions.0.weight"]),
        ("budgt", ["budget"]),
        ("learner.beta", ["learner.kl_coef"]),
        ("rollout.num-generations", ["rollout.group_size"]),
        ("max_steps", ["budget.steps"]),
    ],
)
def test_an_unknown_key_suggests_the_nearest_keys(path: str, meant: list[str]) -> None:
    suggestion = str(unknown_key(tuple(path.split("."))))
    assert suggestion == f"{path}: unknown; did you mean {' or '.join(meant)}?"


def test_each_name_of_trl_in_the_table_has_a_key_of_ours() -> None:
    page = FROM_TRL_PAGE.read_text(encoding="utf-8")
    for theirs, ours in FROM_TRL.items():
        assert theirs not in settings_by_path()
        assert ours in settings_by_path()
        assert f"`{theirs}`" in page or f"`{theirs} = " in page, theirs
    for theirs, instead in NO_KEY.items():
        assert not any(key.endswith(f".{theirs}") for key in settings_by_path())
        assert str(unknown_key((theirs,), "--")) == f"{theirs}: unknown: {instead}"


def test_an_unknown_key_without_near_keys_gets_the_keys_of_its_table() -> None:
    assert str(unknown_key(("budget", "zzz"))) == (
        "budget.zzz: unknown; budget has steps, time, until"
    )
    assert str(unknown_key(("zzz", "yyy"))) == "zzz.yyy: unknown"


@pytest.mark.parametrize(
    "url",
    ["s3://bucket/runs", "gs://b", "hf://buckets/u/b", "sftp://me@host/runs", "file:///mnt/a"],
)
def test_a_mirror_is_a_url(small: Path, url: str) -> None:
    assert load_config(small, [("run.mirror", f"{url}/")]).run.mirror == url
