"""Loading configurations: files, paths, presets, imports."""

from __future__ import annotations

import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

from configs.base import MissingSetting
from configs.errors import ConfigError
from configs.load import config_to_json, load_config, presets, read_config
from configs.machine import Machine
from configs.task import HeldOut

from .conftest import SMALL, Write

ROOT = Path(__file__).parents[2]
HEAVY = {"jax", "ray", "numpy", "wandb", "datasets", "flax", "orbax", "tunix", "qwix"}


def mistakes(path: Path, *overrides: tuple[str, str]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.mistakes


def test_paths_of_a_file_are_relative_to_its_folder_and_the_rest_to_the_current(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    path = small.rename(folder / "run.toml")
    text = path.read_text().replace("rewards.format:well_formed", "mine.py:near")
    text = text.replace("validation = 0", 'validation = "../v.parquet"')
    path.write_text(f'{text}\n[lora]\nstart = "adapter"\n')
    config = load_config("runs/run.toml")
    paths = [config.model.path, config.lora.start, config.data.train.path]
    assert paths == [str(folder / name) for name in ("tiny", "adapter", "train.jsonl")]
    assert config.data.validation == HeldOut(path=str(tmp_path / "v.parquet"))
    assert config.data.test.path == "openai/gsm8k"
    functions = [part.function for part in config.rewards.functions]
    assert functions == ["rewards.correctness:exact_answer", f"{folder}/mine.py:near"]
    assert config.run.dir == str(tmp_path / "runs")
    # The command line is relative to the current folder, or to that of the submission.
    # The folder of Ray's own job is a copy that is deleted: its runs are in the user's home.
    given = [("rewards.functions.0.function", "my.py:f"), ("data.train.path", "../x.csv")]
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    for variable, folder, output in (
        ("RAY_JOB_CONFIG_JSON_ENV_VAR", tmp_path, tmp_path),
        ("GEMMA_GRPO_HOME", tmp_path, tmp_path / "user"),
        ("", tmp_path / "home", tmp_path / "home"),
    ):
        config = load_config("runs/run.toml", given)
        assert config.rewards.functions[0].function == f"{folder}/my.py:f"
        assert config.data.train.path == str(folder.parent / "x.csv")
        assert config.run.dir == str(output / "runs")
        assert config.model.path == str(tmp_path / "runs/tiny")
        monkeypatch.setenv(variable or "NOTHING", str(tmp_path / "home"))


def test_a_missing_file_is_reported_with_the_presets(small: Path) -> None:
    wrong = small.with_name("runn.toml")
    (line,) = mistakes(wrong)
    assert line.startswith(
        f"{wrong}: no such file; nearest: {small}; presets in {ROOT}/configs: demo."
    )


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"[run]\nname == 3\n", "(at line 2, column 7)"),
        ("a = 'ü'".encode("latin-1"), "'utf-8' codec can't decode byte 0xfc in position 5"),
        (b"a = " + b"[" * 5000, ": maximum recursion depth exceeded"),
    ],
)
def test_a_file_that_is_not_toml_is_refused_with_the_place(
    tmp_path: Path, content: bytes, place: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    (line,) = mistakes(path)
    assert line.startswith(f"{path}: ")
    assert place in line
    assert "\n" not in line


def test_promise_8_six_mistakes_at_once(write: Write) -> None:
    path = write(
        SMALL.replace('platform = "cpu"', 'platform = "cpus"')
        .replace("max_new_tokens = 32", "")
        .replace("[budget]", "[learner]\nlr = -1\nseed = 3\n[budget]")
    )
    told = mistakes(path, ("rollout.group_size", "1"), ("lora.rnak", "8"))
    expected = (
        "command line: --lora.rnak: unknown; did you mean --lora.rank?",
        "command line: --rollout.group_size = 1: must be an integer, at least 2 and at most 1024; ",
        f"{path}: rollout.max_new_tokens: missing; must be an integer, at least 1 (maximum length ",
        f"{path}: learner.lr = -1: must be a number, above 0 and at most 10; nearest valid: just ",
        f"{path}: learner.seed: unknown; did you mean run.seed?",
        f'{path}: plan.platform = "cpus": must be one of "auto", "cpu", "tpu", "gpu"; nearest ',
    )
    for line, start in zip(told, expected, strict=True):
        assert line.startswith(start)


@pytest.mark.parametrize("preset", presets())
def test_every_preset_loads_and_opens_with_its_command(preset: str) -> None:
    path = ROOT / preset
    load_config(path)
    first_line = path.read_text(encoding="utf-8").splitlines()[0]
    assert first_line.startswith("#")
    assert f"python -m launch.train {preset}" in first_line


def test_configuration_loads_nothing_heavy() -> None:
    modules = sorted(f"configs.{path.stem}" for path in (ROOT / "configs").glob("[a-z]*.py"))
    program = (
        f"import {', '.join(modules)}, sys\n"
        "configs.load.load_config('configs/demo.toml')\n"
        "configs.cli.settings_help()\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "configs.load" in modules
    assert result.stdout == "[]\n"


def test_a_run_folder_is_a_configuration(tmp_path: Path):
    config = load_config("configs/demo.toml")
    (tmp_path / "config.json").write_text(config_to_json(config), encoding="utf-8")
    assert load_config(tmp_path) == config
    changed = load_config(tmp_path, [("run.seed", "7")])
    assert changed.run.seed == 7
    assert changed.data == config.data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "not a run folder: it has no config.json"),
        ("{", "config.json is damaged: not JSON"),
        ("[]", "config.json is damaged: not a JSON object"),
        ('{"plan": {"rows": 1}}', r"plan\.rows: unknown"),
    ],
)
def test_a_folder_without_a_run_is_refused(tmp_path: Path, text: str | None, message: str):
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path)


def test_promise_8_an_unknown_key_does_not_hide_other_mistakes_in_its_table(small: Path) -> None:
    path = small.with_name("more.toml")
    text = small.read_text(encoding="utf-8").replace("[plan]", "[plan]\nsampler = 1\nfsdpp = 2")
    path.write_text(text.replace("[budget]", "[sft]\nsteps = 5\n[budget]"), encoding="utf-8")
    told = mistakes(path, ("plan.row_tokens", "7"))
    assert [line.split(": ")[1].partition(" =")[0].removeprefix("--") for line in told] == [
        *("plan.sampler", "plan.fsdpp", "plan.row_tokens", "sft.steps"),
    ]


def test_promise_8_a_wrong_value_hides_only_the_checks_that_read_it(small: Path) -> None:
    given = [("rollout.group_size", "1"), ("plan.row_tokens", "47")]
    assert len(mistakes(small, *given)) == 2
    assert len(mistakes(small, *given, ("rollout.max_new_tokens", "0"))) == 2
    within = [("learner.lr", "fast"), ("learner.kl", "topk"), ("prompt.answer_open", "<reasoning>")]
    assert [line.split()[2] for line in mistakes(small, *within, ("prompt.template", "x"))] == [
        *("--prompt.template", "--learner.lr", "--prompt.answer_open", "--learner.kl"),
    ]


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ([("learner", "3")], "learner"),
        ([("data.train.path", "gs://x"), ("run.nam", "x")], "data.train.path"),
        ([("eval.every_steps", "5")], "eval.every_steps"),
        ([("sft.train", "{path = 3, limit = 0}")], "sft.train.limit"),
        ([("rewards.functions", "[3, {foo = 1}]")], "rewards.functions"),
    ],
)
def test_a_setting_with_a_mistake_has_no_value(
    small: Path, given: list[tuple[str, str]], missing: str
) -> None:
    read = read_config(small, given)
    assert read.mistakes
    assert read.config.rollout.size == 32
    with pytest.raises(MissingSetting):
        attrgetter(missing)(read.config)
    with pytest.raises(MissingSetting):
        config_to_json(read.config)


SHORT = """
model = { path = "google/gemma-3-1b-it" }
data = { train = "mine/train.csv", test = "openai/gsm8k" }
rewards = { functions = ["mine/rewards.py:short", { function = "a.b:reward", weight = 2 }] }
rollout = { max_prompt_tokens = 10, max_new_tokens = 20 }
budget = { time = "1h" }
"""


def test_a_short_configuration_has_long_forms_and_what_file_and_machine_imply(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, tpu = Machine("cpu", 1, "no device"), Machine("tpu", 4, "4 TPU chips")
    monkeypatch.setattr("configs.short_forms.this_machine", lambda: cpu)
    path = write(SHORT).rename(tmp_path / "my run(2).toml")
    given = [("data.test.split", "test[:9]"), ("data.validation", "0.25")]
    config, _, assumed = vars(read_config(path, given)).values()
    assert (config.run.name, config.model.path) == ("my-run-2", "hf://google/gemma-3-1b-it")
    assert config.data.train.path == str(tmp_path / "mine/train.csv")
    assert (config.data.test.path, config.data.test.split) == ("openai/gsm8k", "test[:9]")
    assert config.data.validation == HeldOut(share=0.25)
    assert [(one.name, one.function, one.weight) for one in config.rewards.functions] == [
        ("short", f"{tmp_path}/mine/rewards.py:short", 1.0),
        ("reward_function", "a.b:reward", 2.0),
    ]
    assert (config.plan.platform, config.plan.learner_devices) == ("cpu", 1)
    assert config.model.dtype == "float32"
    assert (config.validation_steps, config.validation_minutes) == (None, 6.0)
    assert assumed == (
        'plan.platform = "auto" is "cpu" with plan.learner_devices = 1: this machine has no device',
    )
    monkeypatch.setattr("configs.short_forms.this_machine", lambda: tpu)
    assert load_config(path, given).plan.learner_devices == 4
    assert load_config(path, given).model.dtype == "bfloat16"
    off = load_config(path, [*given[:1], ("data.validation", "0")])
    assert off.data.validation is None
    assert (off.validates, off.validation_minutes) == (False, None)
    assert load_config(path, [*given[:1], ("data.validation", "none")]).data.validation is None


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("unsloth/gemma-2-2b@v1", "hf://unsloth/gemma-2-2b@v1"),
        ("./google/gemma", "google/gemma"),
        ("here/gemma", "here/gemma"),
        ("a/b/c", "a/b/c"),
    ],
)
def test_a_models_name_is_one_of_the_hub_where_no_such_folder_is(
    small: Path, tmp_path: Path, path: str, meant: str
) -> None:
    (tmp_path / "here").mkdir()
    config = load_config(small, [("model.path", path)])
    assert config.model.path == (meant if "://" in meant else str(tmp_path / meant))


def test_sizes_are_rounded_up_to_whole_ones_on_each_device(small: Path) -> None:
    given = [("plan.placement", "colocated"), ("plan.learner_devices", "8"), ("plan.slots", "30")]
    read = read_config(small, [*given, ("plan.micro_batch_tokens", "385")])
    assert (read.config.plan.slots, read.config.plan.micro_batch_tokens) == (32, 768)
    assert read.assumed == (
        "plan.slots = 30 is rounded up to 32: a multiple of 8, the parts of a sampler",
        (
            "plan.micro_batch_tokens = 385 is rounded up to 768: a multiple of 384, a row of 48 "
            "tokens for 8 parts of the learner"
        ),
    )
