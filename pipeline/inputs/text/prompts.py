"""From a dataset's row to the tokens that the model reads, and from what it then draws to text.

The same for prompts and examples, rollouts, evaluations and questions.

Knows nothing of splits or files. What cannot be used is named, never mended or cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from configs.schema import Prompt
from pipeline.contracts.rollouts import Completion
from pipeline.inputs.dataset.rows import Malformed, Row
from pipeline.inputs.text.chat import END_OF_TURN, START_OF_TURN, render, template_columns
from pipeline.inputs.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Rendered:
    """What the model reads of a row.

    Attributes:
        text: turn tokens included, without the leading <bos> and `prompt.answer_prefix`.
        tokens: int32 `seq`, <bos> first, the prefix last.
    """

    text: str
    tokens: np.ndarray


@dataclass(frozen=True)
class PromptMaker:
    """Makes prompts in one way, and knows how a completion begins and ends behind them.

    Attributes:
        prompt: how.
        tokenizer: the model's.

    Raises:
        ValueError: if `prompt.answer_prefix` is not plain text to the tokenizer.
    """

    prompt: Prompt
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        prefix = self.prompt.answer_prefix
        read = self.tokenizer.decode(self.tokenizer.encode(prefix))
        if read != prefix:
            raise ValueError(
                f"prompt.answer_prefix = {prefix!r}: {self.tokenizer.path} reads it back as "
                f"{read!r}; leave out what is no text, such as turn tokens"
            )

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
        # Apart, so that the prompt's own tokens are the same with any prefix.
        own, prefix = map(self.tokenizer.encode, (text, self.prompt.answer_prefix))
        tokens = np.concatenate([[self.tokenizer.bos_id], own, prefix])
        return Rendered(text, tokens.astype(np.int32))

    def text_of(self, completion: Completion) -> str:
        """What people and reward functions see of a completion: the prefix and what was drawn.

        Without special tokens, so without the stop token.
        """
        return self.prompt.answer_prefix + self.tokenizer.decode(completion.tokens)


def turn_token_in(values: Mapping[str, object], column: str) -> str | None:
    """Names the turn token in a column's text, which would end or begin a turn there."""
    for token in (START_OF_TURN, END_OF_TURN):
        if token in str(values[column]):
            return f"column {column!r} holds the turn token {token}"
    return None
