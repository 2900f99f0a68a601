"""From a dataset's row to the tokens that the model reads; the same for prompts and examples.

Knows nothing of splits or files. What cannot be used is named, never mended or cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from configs.schema import Prompt
from pipeline.data.rows import Malformed, Row
from pipeline.text.chat import END_OF_TURN, START_OF_TURN, render, template_columns
from pipeline.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Rendered:
    """What the model reads of a row.

    Attributes:
        text: turn tokens included, without the leading <bos>.
        tokens: int32 `seq`, <bos> first.
    """

    text: str
    tokens: np.ndarray


@dataclass(frozen=True)
class PromptMaker:
    """Makes prompts in one way.

    Attributes:
        prompt: how.
        tokenizer: the model's.
    """

    prompt: Prompt
    tokenizer: Tokenizer

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that a row needs."""
        return template_columns(self.prompt.template)

    @property
    def end_of_completion(self) -> str:
        """The token that a completion ends with: of the turn, or <eos> where there are none."""
        return "<eos>" if self.prompt.turn == "plain" else END_OF_TURN

    def with_template(self, template: str | None) -> PromptMaker:
        """The same way with another template; None: the same one."""
        if template is None:
            return self
        prompt = self.prompt.model_copy(update={"template": template})
        return PromptMaker(prompt, self.tokenizer)

    def make(self, row: Row) -> Rendered | Malformed:
        """The prompt of a row, or why there is none."""
        if self.prompt.turn != "plain":
            for column in self.columns:
                named = turn_token_in(row.values, column)
                if named:
                    return Malformed(row.number, named)
        text = render(self.prompt, row.values, template=self.tokenizer.chat_template)
        tokens = np.concatenate([[self.tokenizer.bos_id], self.tokenizer.encode(text)])
        return Rendered(text, tokens.astype(np.int32))


def turn_token_in(values: Mapping[str, object], column: str) -> str | None:
    """Names the turn token in a column's text, which would end or begin a turn there."""
    for token in (START_OF_TURN, END_OF_TURN):
        if token in str(values[column]):
            return f"column {column!r} holds the turn token {token}"
    return None
