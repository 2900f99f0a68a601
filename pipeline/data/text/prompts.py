"""Converts dataset rows to prompt tokens, and completions to text.

Shared by training prompts, demonstrations, evaluations and interactive questions. Independent of
splits and files. Malformed rows are reported, never fixed or truncated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from configs.schema import Prompt
from pipeline.data.rows import Malformed, Row
from pipeline.data.text.chat import BOS, Turns, render, template_columns
from pipeline.data.text.tokenizer import Tokenizer
from pipeline.types import Completion


@dataclass(frozen=True)
class Rendered:
    """The rendered prompt of a row.

    Its text with turn tokens, and the tokens, int32 `seq`: <bos>, the text, `prompt.answer_prefix`.
    """

    text: str
    tokens: np.ndarray


@dataclass(frozen=True)
class PromptMaker:
    """Makes prompts from rows, and texts from completions.

    Raises:
        ValueError: if the tokenizer does not reproduce `prompt.answer_prefix` as text, or the model
            has no thinking mode for `prompt.thinking`.
    """

    prompt: Prompt
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        prefix = self.prompt.answer_prefix
        read = self.tokenizer.decode(self.tokenizer.encode(prefix))
        if read != prefix:
            raise ValueError(
                f"prompt.answer_prefix = {prefix!r}: {self.tokenizer.path} decodes it to "
                f"{read!r}; remove special tokens, such as turn tokens"
            )
        if self.prompt.thinking:
            self._check_thinking()

    def _check_thinking(self) -> None:
        if self.tokenizer.turns.think is None:
            raise ValueError(
                f"prompt.thinking = true: {self.tokenizer.path} is of a model without a thinking "
                "mode; remove it"
            )
        template = self.tokenizer.chat_template if self.prompt.turn == "auto" else None
        if template is not None and "enable_thinking" not in template.text:
            raise ValueError(
                f"prompt.thinking = true: the chat template in {template.path} has no thinking "
                'mode; remove it, or use Gemma\'s turns: prompt.turn = "gemma"'
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """Required columns of a row."""
        return template_columns(self.prompt.template)

    @property
    def end_of_completion(self) -> str:
        """The end token of a completion: the end of the turn, or <eos> with plain prompts."""
        return "<eos>" if self.prompt.turn == "plain" else self.tokenizer.turns.end

    def with_template(self, template: str | None) -> PromptMaker:
        """A PromptMaker with another template; None keeps the template."""
        if template is None:
            return self
        prompt = self.prompt.model_copy(update={"template": template})
        return PromptMaker(prompt, self.tokenizer)

    def make(self, row: Row) -> Rendered | Malformed:
        """The prompt of a row, or the reason why the row is malformed."""
        texts = {column: str(row.values[column]) for column in self.columns}
        if row.messages is not None:
            texts = {self.columns[0]: "\n".join(one["content"] for one in row.messages)}
            if self.prompt.turn == "plain":
                what = 'has messages, which need turns; prompt.turn = "plain" has none'
                return Malformed(row.number, f"column {self.columns[0]!r} {what}")
        for column, text in texts.items():
            problem = None
            if self.prompt.turn != "plain":
                problem = turn_token_in(text, self.tokenizer.turns)
            if BOS in text:
                problem = f"contains {BOS}, with which every prompt begins already"
            if problem:
                return Malformed(row.number, f"column {column!r} {problem}")
        text = render(
            self.prompt,
            row.values,
            template=self.tokenizer.chat_template,
            turns=self.tokenizer.turns,
            messages=row.messages,
        )
        if BOS in text:
            raise ValueError(
                f"prompt: the system text, the template or a shot contains {BOS}, with which every "
                "prompt begins already; remove it"
            )
        # Tokenized separately, so that the prompt's tokens do not depend on the prefix.
        own, prefix = map(self.tokenizer.encode, (text, self.prompt.answer_prefix))
        tokens = np.concatenate([[self.tokenizer.bos_id], own, prefix])
        if problem := self.tokenizer.problem_of(tokens):
            return Malformed(row.number, f"the prompt {problem}")
        return Rendered(text, tokens.astype(np.int32))

    def text_of(self, completion: Completion) -> str:
        """The text of a completion for users and reward functions: the prefix and the completion.

        Without special tokens, including the stop token.
        """
        return self.prompt.answer_prefix + self.tokenizer.decode(completion.tokens)


def turn_token_in(text: str, turns: Turns) -> str | None:
    """Describes a turn token in a text, which would break the turns; None without one."""
    for token in (turns.start, turns.end):
        if token in text:
            return f"contains the turn token {token}"
    return None
