"""The common command line of all commands."""

from __future__ import annotations

import argparse
import re

import pytest

from configs.cli import CommandLine, parse, settings_help
from configs.errors import ConfigError
from configs.settings import settings


def parsed(*argv: str) -> CommandLine:
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--dry-run", action="store_true", help="resolve and print")
    flags.add_argument("--json", metavar="FILE", help="write the table")
    return parse(argv, prog="python -m launch.x", description="Does x.", flags=flags)


def refused(*argv: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parsed(*argv)
    return caught.value.mistakes


def test_file_overrides_and_flags_in_any_order() -> None:
    path, overrides, flags = parsed(
        "--learner.lr", "1e-4", "--dry-run", "a.toml", "--json", "t.json", "--run.name=--b=c"
    )
    assert path == "a.toml"
    assert overrides == (("learner.lr", "1e-4"), ("run.name", "--b=c"))
    assert flags == argparse.Namespace(dry_run=True, json="t.json")


def test_an_override_without_a_value_is_refused() -> None:
    told = "needs a value, --{0} VALUE; write --{0}=VALUE for a value with leading --"
    assert refused("a.toml", "--learner.lr", "--dry-run", "--run.seed") == (
        f"command line: --learner.lr: {told.format('learner.lr')}",
        f"command line: --run.seed: {told.format('run.seed')}",
    )


def test_unknown_options_suggest_flags_and_settings_all_at_once() -> None:
    assert refused("a.toml", "--dryrun", "--lr", "3", "b.toml", "--zzz=1") == (
        "command line: --dryrun: unknown; did you mean --dry-run?",
        "command line: --lr: unknown; did you mean --sft.lr or --learner.lr?",
        "command line: b.toml: unexpected; expected one CONFIG.toml and --table.key VALUE",
        (
            "command line: --zzz: unknown; docs/from_trl.md has our names for those of TRL, verl, "
            "OpenRLHF"
        ),
    )


def test_what_is_missing_is_named() -> None:
    (line,) = refused()
    assert re.match(
        r"command line: CONFIG.toml is missing; presets in /.*/configs: demo.toml", line
    )
    assert refused("a.toml", "--json") == ("command line: argument --json: expected one argument",)


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parsed(*argv)
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_shows_the_flags_and_help_settings_the_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown(capsys, "--help")
    assert "python -m launch.x CONFIG.toml [--table.key VALUE ...]" in text
    assert "resolve and print" in text
    assert "--learner.lr" not in text
    assert shown(capsys, "a.toml", "--help", "settings") == f"{settings_help()}\n"
    table = shown(capsys, "--help", "settings", "learner")
    assert table in settings_help()
    assert "--learner.lr" in table
    assert "--lora.rank" not in table
    assert refused("--help", "settings", "learnr") == (
        "command line: --help settings learnr: unknown; did you mean learner?",
    )


def test_the_settings_help_describes_each_setting() -> None:
    text = " ".join(settings_help().split())
    for setting in settings():
        assert f"--{setting.path} {setting.allowed};" in text
        assert setting.description in text
    assert "default: that of the function. name in metrics and rollouts" in text
    assert "--budget.steps an integer, at least 1 and at most 2147483647; optional. number" in text
