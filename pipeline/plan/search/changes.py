"""Settings laid over what is planned, to see what they would do; only those that a run would take.

Everything that a plan suggests goes through here, so nothing is suggested that is then refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from configs.schema import Config
from configs.toml_text import show_value
from pipeline.contracts.speeds import Lengths
from pipeline.plan.search.search import Case

Settings = Mapping[str, Any]
"""Values by dotted key; None: the setting is left out."""


def differing(config: Config, settings: Settings) -> dict[str, Any]:
    """Those of the settings that the configuration does not have already."""
    tree = config.model_dump()
    found = {key: tree[key.partition(".")[0]][key.partition(".")[2]] for key in settings}
    return {key: value for key, value in settings.items() if value != found[key]}


def changed(case: Case, settings: Settings) -> Case | None:
    """The same planned with these settings; None: a run would refuse them.

    Expected lengths stay the same share of the longest.
    """
    tree = case.config.model_dump()
    for key, value in settings.items():
        table, _, name = key.partition(".")
        tree[table][name] = value
    try:
        config = Config.model_validate(tree)
    except ValidationError:
        return None
    old, new = case.config.rollout, config.rollout
    prompt, completion = case.lengths.prompt, case.lengths.completion
    prompt *= new.max_prompt_tokens / old.max_prompt_tokens
    completion *= new.max_new_tokens / old.max_new_tokens
    return replace(case, config=config, lengths=Lengths(prompt, completion))


def words(settings: Settings) -> str:
    """As they are set."""
    return ", ".join(
        f"no {key}" if value is None else f"{key} = {show_value(value)}"
        for key, value in settings.items()
    )
