"""Single questions to base and tuned policy, with the prompts of the run."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import zip_longest

from configs.schema import Config
from pipeline.data.rows import Malformed, Row, clean_row
from pipeline.data.text.prompts import PromptMaker
from pipeline.evaluate.measurement import answer, open_adapter
from pipeline.protocols import Sampler
from pipeline.types import RolloutName, RolloutRequest

_BETWEEN = " | "


class QuestionError(ValueError):
    """The question does not give a valid prompt; the message gives the reason."""


@dataclass(frozen=True)
class Reply:
    """The answer of one policy, and whether it ended before the token limit."""

    policy: str
    text: str
    num_tokens: int
    ended: bool

    @property
    def note(self) -> str:
        """How the answer ended, in words."""
        return f"({self.num_tokens} tokens{'' if self.ended else ', cut off'})"


@dataclass
class Conversation:
    """Asks base and tuned policy the same questions, which are independent.

    `adapter` is the path of the tuned policy's; None: there is only the base.
    """

    config: Config
    maker: PromptMaker
    samplers: Sequence[Sampler]
    _: KW_ONLY
    adapter: str | None
    temperature: float
    asked: int = 0

    async def ask(self, values: Mapping[str, str]) -> list[Reply]:
        """The replies of base and tuned policy, sampled with the same noise.

        Args:
            values: the columns of `prompt.template`.

        Raises:
            QuestionError: if the values make no prompt, or one that is too long.
        """
        self.asked += 1
        row = clean_row(Row(self.asked, values), columns=self.maker.columns)
        made = row if isinstance(row, Malformed) else self.maker.make(row)
        if isinstance(made, Malformed):
            raise QuestionError(made.reason)
        count, limit = len(made.tokens), self.config.rollout.max_prompt_tokens
        if count > limit:
            raise QuestionError(f"this makes {count} tokens; rollout.max_prompt_tokens = {limit}")
        request = RolloutRequest(RolloutName("chat", self.asked, 0, 0), made.tokens)
        replies = [await self._reply("base", None, request)]
        if self.adapter is not None:
            replies.append(await self._reply("tuned", self.adapter, request))
        return replies

    async def _reply(self, policy: str, path: str | None, request: RolloutRequest) -> Reply:
        adapter = await open_adapter(self.samplers, path)
        (generated,) = await answer(
            self.samplers, [request], temperature=self.temperature, adapter=adapter
        )
        text = self.maker.text_of(generated)
        return Reply(policy, text, len(generated.tokens), generated.stop_reason != "length")


def read_question(text: str, *, columns: Sequence[str]) -> dict[str, str]:
    """The columns of a question that is given as one text.

    It is a JSON object of the template's columns; with one column the text may also be its value.

    Raises:
        QuestionError: if the text is no such object, and there are several columns.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or set(found) != set(columns):
        if len(columns) == 1:
            return {columns[0]: text}
        example = json.dumps(dict.fromkeys(columns, "..."))
        raise QuestionError(f"prompt.template needs several columns; write {example}")
    return {name: str(value) for name, value in found.items()}


def side_by_side(replies: Sequence[Reply], *, width: int) -> Iterator[str]:
    """The replies in columns, wrapped to a terminal of `width` characters."""
    free = width - (len(replies) - 1) * len(_BETWEEN)
    column = max(free // len(replies), 8)
    columns = [_column(reply, width=column) for reply in replies]
    for lines in zip_longest(*columns, fillvalue=""):
        yield _BETWEEN.join(line.ljust(column) for line in lines).rstrip()


def _column(reply: Reply, *, width: int) -> Iterator[str]:
    yield from textwrap.wrap(reply.policy, width)
    yield "-" * width
    for line in reply.text.expandtabs(4).splitlines():
        # Replaces control characters, which could move the cursor or change colours.
        seen = "".join(c if c.isprintable() else "\ufffd" for c in line)
        yield from textwrap.wrap(seen, width, break_on_hyphens=False) or [""]
    yield from textwrap.wrap(reply.note, width)
