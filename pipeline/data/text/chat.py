"""Renders the prompt text of a dataset row: template or messages, few-shot examples, chat turns.

Training and evaluation share this code. Only `prompt.template` is a template: braces in the system
text or in the data are literal.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as show
from string import Formatter
from typing import Any

from configs.schema import Prompt
from pipeline.data.models.hf_folder import read_object, read_text
from pipeline.data.text.jinja_sandbox import check_limits, render_template


@dataclass(frozen=True)
class Turns:
    """The turns of a family of models.

    Attributes:
        start: piece that begins a turn, before the name of its role.
        end: piece that ends it.
        has_system: whether there is a turn of the system; otherwise its text begins the user's
            first turn.
        think: piece at the beginning of the system's turn that makes the model think before it
            answers; None: it has no thinking mode.
        other_ends: further pieces at which published models stop.
    """

    start: str
    end: str
    has_system: bool = False
    think: str | None = None
    other_ends: tuple[str, ...] = ()


GEMMA3 = Turns("<start_of_turn>", "<end_of_turn>")
"""The turns of Gemma 2 and 3."""
GEMMA4 = Turns(
    "<|turn>", "<turn|>", has_system=True, think="<|think|>", other_ends=("<|tool_response>",)
)
"""The turns of Gemma 4 (https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4)."""
TEMPLATE_FILE = "chat_template.jinja"
BOS = "<bos>"
"""Piece at the beginning of every prompt."""
_SIMILAR = 0.7
"""Ratio of matching characters above which a column is suggested for another name."""
_MOST_REASON = 200
_SPECIAL = {"bos_token": BOS, "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}

Turn = tuple[str, str]
"""Role, `system`, `user` or `assistant`, and text."""


@dataclass(frozen=True)
class ChatTemplate:
    """The Jinja chat template of a model, and the file that contains it."""

    path: Path
    text: str

    def render(self, turns: Sequence[Turn], *, thinking: bool = False) -> str:
        """Renders the turns and the beginning of the model's next turn, without <bos>.

        With `thinking` the template's variable `enable_thinking` is true, else it is not defined.
        The first call in a process also checks that the template keeps the limits of time and
        memory, which takes seconds.

        Raises:
            ValueError: naming the file, if the template cannot be rendered, omits the text of the
                user, or writes <bos> elsewhere than at the beginning.
        """
        messages = [{"role": who, "content": text} for who, text in turns]
        variables: dict[str, Any] = _SPECIAL | ({"enable_thinking": True} if thinking else {})
        try:
            if self.text not in _CHECKED:
                check_limits(self.text, messages, variables)
                _CHECKED.add(self.text)
            text = render_template(self.text, messages, variables).removeprefix(BOS)
            if BOS in text:
                raise ValueError(f"it writes {BOS} elsewhere than once at the beginning")
            omitted = [said for who, said in turns if who == "user" and said.strip() not in text]
            if omitted:
                raise ValueError(f"it omits the text of the user, {show(omitted[0])}")
        except Exception as error:  # noqa: BLE001  # templates may raise anything
            reason = " ".join(str(error).split())[:_MOST_REASON] or type(error).__name__
            raise ValueError(
                f"{self.path}: the chat template fails: {reason}; "
                'prompt.turn = "gemma" uses Gemma\'s turns instead'
            ) from None
        return text


_CHECKED: set[str] = set()
"""Templates that keep the limits of `check_limits`."""


def template_columns(template: str) -> tuple[str, ...]:
    """Columns in `template`, in order, without duplicates.

    Placeholders are plain column names, which are looked up, never evaluated.
    """
    return tuple(dict.fromkeys(column for _, column in _parse(template) if column is not None))


def sole_column(template: str) -> str | None:
    """The column of a template that is nothing else; None for other templates."""
    parts = _parse(template)
    columns = [column for _, column in parts if column is not None]
    is_sole = len(columns) == 1 and not any(literal.strip() for literal, _ in parts)
    return columns[0] if is_sole else None


def check_columns(columns: Iterable[str], *, present: Iterable[str], where: str) -> None:
    """Raises a ValueError with a line for each of `columns` that the dataset lacks."""
    known, wanted = sorted(set(present)), list(dict.fromkeys(columns))
    unused = [column for column in known if column not in wanted]
    lines = []
    for column in wanted:
        if column in known:
            continue
        nearest = difflib.get_close_matches(column, unused, n=1, cutoff=_SIMILAR)
        hint = f"nearest: {nearest[0]!r} (of {known})" if nearest else f"its columns: {known}"
        if column[:1].isdecimal():
            hint += f"; for braces in the text write {{{{{column}}}}}"
        lines.append(f"{where} has no column {column!r}; {hint}")
    if lines:
        raise ValueError("\n".join(lines))


def render(
    prompt: Prompt,
    row: Mapping[str, object],
    *,
    template: ChatTemplate | None,
    turns: Turns = GEMMA3,
    messages: Sequence[Mapping[str, str]] | None = None,
) -> str:
    """Renders the prompt of `row`, without <bos>; the model's completion follows it.

    Few-shot examples (`prompt.shots`) precede the question, each as a user turn and a model turn.
    The system's text is `prompt.system`, then the system message, if any. It begins the first user
    turn of models without a turn of the system. In plain text the two parts of an example are
    concatenated, and an empty line ends it.

    Args:
        prompt: the prompt settings.
        row: the columns of the dataset's row.
        template: of the model's folder, used with `prompt.turn = "auto"`; None: Gemma's turns.
        turns: of the model.
        messages: in place of the question, as in `Row.messages`, not for plain text; None: the
            question is `prompt.template` with the columns of `row`.

    Raises:
        ValueError: if `prompt.template` contains a column that `row` lacks, or the chat template
            cannot be rendered.
    """
    if messages is None:
        check_columns(template_columns(prompt.template), present=row, where="the row")
        question = "".join(
            literal + ("" if column is None else str(row[column]))
            for literal, column in _parse(prompt.template)
        )
        messages = [{"role": "user", "content": question}]
    system = [prompt.system] if prompt.system else []
    system += [message["content"] for message in messages if message["role"] == "system"]
    spoken: list[Turn] = [(m["role"], m["content"]) for m in messages if m["role"] != "system"]
    opening = "".join(f"{text}\n\n" for text in system)
    if prompt.turn == "plain":
        shots = "".join(f"{shot.user}{shot.model}\n\n" for shot in prompt.shots)
        return opening + shots + spoken[0][1]
    examples = [(("user", shot.user), ("assistant", shot.model)) for shot in prompt.shots]
    dialogue = [*(turn for example in examples for turn in example), *spoken]
    if not turns.has_system:
        dialogue[0] = ("user", opening + dialogue[0][1])
    elif system:
        dialogue = [("system", "\n\n".join(system)), *dialogue]
    if prompt.turn == "auto" and template is not None:
        return template.render(dialogue, thinking=prompt.thinking)
    return in_turns(dialogue, turns, thinking=prompt.thinking)


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """Reads the chat template of a Hugging Face folder; None if it has none.

    It is in `chat_template.jinja`, `chat_template.json` or `tokenizer_config.json`; of several
    named templates the one named "default" is used.

    Raises:
        ValueError: if a file cannot be read, or the template is not text.
    """
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return ChatTemplate(path, read_text(path))
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        found = read_object(path).get("chat_template") if path.is_file() else None
        if isinstance(found, list):
            entries = [entry for entry in found if isinstance(entry, dict)]
            named = {str(entry.get("name")): entry.get("template") for entry in entries}
            found = named.get("default")
        if found is not None and not isinstance(found, str):
            raise ValueError(f"{path}: chat_template is {show(found)}, not text")
        if found is not None:
            return ChatTemplate(path, found)
    return None


def in_turns(dialogue: Sequence[Turn], turns: Turns, *, thinking: bool = False) -> str:
    """The text of Gemma's own turns, up to the beginning of the model's."""
    names = {"system": "system", "user": "user", "assistant": "model"}
    if thinking:
        system = dialogue[0][1] if dialogue[0][0] == "system" else ""
        dialogue = [("system", f"{turns.think}\n{system}"), *dialogue[bool(system) :]]
    spoken = "".join(f"{turns.start}{names[who]}\n{text}{turns.end}\n" for who, text in dialogue)
    return f"{spoken}{turns.start}model\n"


def _parse(template: str) -> list[tuple[str, str | None]]:
    """Splits the template into literal texts, each with the column that follows it, if any."""
    return [(literal, column) for literal, column, _, _ in Formatter().parse(template)]
