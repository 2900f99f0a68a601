"""The message for each kind of mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from configs.errors import unknown_key

from .conftest import SMALL, Write
from .test_load import mistakes

URL = "supported are file system paths{}; mount or download data that is stored elsewhere"
KEYS = "contains a user's key or password; set it in the environment, as the library of s3://"

WRONG = [
    # key, value, a part of the message
    (
        "learner.adam_b2",
        "1.5",
        "= 1.5: must be a number, at least 0 and below 1; nearest valid: just",
    ),
    ("rollout.top_p", "7", "= 7: must be a number, above 0 and at most 1; nearest valid: 1.0"),
    ("run.seed", "-4", "an integer, at least 0 and at most 4294967295; nearest valid: 0"),
    ("run.seed", '"8"', '= "8": must be an integer, .* nearest valid: 8'),
    ("lora.rank", "1e5", "= 100000.0: must be an integer, .* nearest valid: 16384"),
    ("lora.rank", "none", '= "none": must be an integer, .* default: 32'),  # not optional
    ("learner.lr", "nan", "= nan: must be a finite number, above 0 and at most 10; default: 5e-05"),
    ("rewards.shuffle", "yes", '= "yes": must be true or false; default: '),
    ("learner.schedule", "cosinus", '= "cosinus": must be one of "constant", .* valid: "cosine"'),
    ("learner.loss", "ppo", 'must be one of "grpo", .*; nearest valid: "grpo"'),
    ("budget.steps", "10000000000", "at most 2147483647; nearest valid: 2147483647"),
    ("run.name", "my run", "a string of letters, digits, '.', .* at most 200 characters"),
    ("run.name", "x " * 100, f'= "{"x " * 28}...: must be a string'),
    (
        "rewards.functions.0.function",
        "f",
        "a string of the form file.py:function or module:function",
    ),
    (
        "rollout.stop_tokens",
        "<eos>",
        "must be a list; each element: a string, not empty; default: [",
    ),
    ("learner", "3", "= 3: must be a table"),
    ("rewards.functions", "[]", "a list, not empty; each element: a table, or its function"),
    ("plan.prompt_buckets", "[0]", ".0 = 0: must be an integer, at least 1; nearest valid: 1"),
    ("rewards.functions.5.weight", "1", ": rewards.functions has 2 elements; the next is 2"),
    ("rollout.stop_tokens.0", "x", ": set the whole list: --rollout.stop_tokens '[...]'"),
    ("run.dir", "~nosuchuser/runs", "there is no such user; write the whole path"),
    ("run.dir", "gs://bucket/runs", f"gs:// is not supported; {URL.format('')}"),
    ("model.path", "gs:/b", f"gs:/ is not supported; {URL.format(', hf:// and kaggle://')}"),
    ("run.mirror", "s3://AKIA:s/cr/t@bucket/runs", f'= "s3://***@bucket/runs": {KEYS}'),
    ("run.mirror", "hf://datasets/me/runs", "hf:// needs a bucket, hf://buckets/USER/NAME: in a"),
]


@pytest.mark.parametrize(("key", "text", "part"), WRONG)
def test_the_message_for_a_wrong_value(small: Path, key: str, text: str, part: str) -> None:
    (line,) = mistakes(small, (key, text))
    assert line.startswith(f"command line: --{key}")
    assert re.search(re.escape(part).replace(r"\.\*", ".*"), line)


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
        ("learnr.lr", ["learner.lr"]),
        ("learner.warmup", ["learner.warmup_steps"]),
        ("learner.max-grad-norm", ["learner.max_grad_norm"]),
        ("learner.adam.b2", ["learner.adam_b2"]),
        ("learner.temperature", ["eval.temperature", "rollout.temperature"]),
        ("rewards.functions.3.wieght", ["rewards.functions.3.weight"]),
        ("rewards.functions.N.weight", ["rewards.functions.0.weight"]),
        ("budgt", ["budget"]),
        ("lora_rank", ["lora.rank"]),
        ("alarms.kl", ["alarms.stop", "alarms.off"]),
    ],
)
def test_an_unknown_key_suggests_the_nearest_keys(path: str, meant: list[str]) -> None:
    suggestion = str(unknown_key(tuple(path.split("."))))
    assert suggestion == f"{path}: unknown; did you mean {' or '.join(meant)}?"


@pytest.mark.parametrize("key", ["budget.zzz", "zzz", "zzz.yyy", "num_generations", "run.pause"])
def test_an_unknown_key_without_near_keys_names_the_page_with_those_of_others(key: str) -> None:
    told = str(unknown_key(tuple(key.split("."))))
    assert (
        told == f"{key}: unknown; docs/from_trl.md has our names for those of TRL, verl, OpenRLHF"
    )
