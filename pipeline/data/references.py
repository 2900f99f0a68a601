"""Reference answers that no right answer of a model equals, and what to do about them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from configs.schema import Config
from pipeline.data.load import setting_name
from pipeline.data.splits import LoadedData
from pipeline.data.text.chat import template_columns

_SHOWN = 60
_SOLUTIONS = {
    "#### (.+)": r"(?:^|\n)\s*#### +\S[^\n]*$",
    r"####\s*(.+)": r"(?:^|\n)\s*####[^\s#][^\n]*$",
    r"\\boxed\{(.+)\}": r"(?<=[^\s$])[\s$]*\\boxed\{.+\}",
    "answer is:? (.+)": r"[Tt]he (?:final )?answer is:? \S[^\n]*$",
}
"""How a text ends that ends in its answer, by the pattern that finds the answer."""


@dataclass(frozen=True)
class Notice:
    """What was found about reference answers, with the setting and an example; what to do."""

    what: str
    advice: str


def reference_notices(config: Config, data: LoadedData) -> Iterator[Notice]:
    """A notice for each split whose references are solutions, and for answers in prompts."""
    column = config.data.answer_column
    if column in template_columns(config.prompt.template):
        what = f"prompt.template shows the model the reference answer, {{{column}}}"
        yield Notice(what, f"remove it; for braces in the text write {{{{{column}}}}}")
    for name, split in data.splits():
        answers = [prompt.answer for prompt in split.prompts if prompt.answer is not None]
        for pattern, ends in _SOLUTIONS.items():
            compiled = re.compile(ends, re.DOTALL)
            found = [answer for answer in answers if compiled.search(answer.strip())]
            if found:
                yield Notice(
                    f"{setting_name(name)}: {len(found)} of {len(answers)} reference answers are "
                    "solutions that end in the answer, which the answer alone does not equal, as "
                    f"{_short(found[0])}",
                    f"set answer_pattern = '{pattern}' in [data], or for a source of its own in "
                    "its table",
                )


def _short(text: str) -> str:
    half = _SHOWN // 2
    return repr(text if len(text) <= _SHOWN else f"{text[:half]} ... {text[-half:]}")
