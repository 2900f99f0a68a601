"""From a dataset row to what the model reads: the template, worked examples, and the model's turns.

The one source of prompts for training and evaluation. Only the template is a template: braces in
the system text or in the data stand for themselves.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

from configs.schema import Prompt
from pipeline.model_files.hf_folder import read_object

START_OF_TURN = "<start_of_turn>"
END_OF_TURN = "<end_of_turn>"
_SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}

Turn = tuple[str, str]
"""Who speaks, `user` or `assistant`, and what."""


def template_columns(template: str) -> tuple[str, ...]:
    """Columns that `template` names, in order, each once.

    Placeholders are bare column names: what stands between the braces is looked up as it is, never
    evaluated.

    Raises:
        ValueError: if the template cannot be read, formats or converts, or names no column.
    """
    columns = dict.fromkeys(column for _, column in _parse(template) if column is not None)
    if not columns:
        raise ValueError(
            f"prompt.template = {template!r} names no column, so that all prompts would be equal; "
            "write for example '{question}'"
        )
    return tuple(columns)


def check_columns(columns: Iterable[str], *, present: Iterable[str], where: str) -> None:
    """Refuse columns that the dataset lacks.

    Raises:
        ValueError: with a line for each of `columns` that is not `present`; names the nearest one
            that is and that no other of them stands for.
    """
    known, wanted = sorted(present), list(dict.fromkeys(columns))
    absent = [column for column in wanted if column not in known]
    if not absent:
        return
    left = [column for column in known if column not in wanted]
    nearest = _pairs(absent, left)
    lines = []
    for column in absent:
        hint = f"it has {known}" if known else "it has no columns"
        if column in nearest:
            hint = f"nearest: {nearest[column]!r} (of {known})"
        lines.append(f"{where} has no column {column!r}; {hint}")
    raise ValueError("\n".join(lines))


def _pairs(names: Sequence[str], others: Sequence[str]) -> dict[str, str]:
    """The most alike of `others` for each name; none is taken twice."""
    alike = {
        (name, other): difflib.SequenceMatcher(None, name, other).ratio()
        for name in names
        for other in others
    }
    found: dict[str, str] = {}
    for name, other in sorted(alike, key=lambda pair: -alike[pair]):
        if name not in found and other not in found.values():
            found[name] = other
    return found


def render(prompt: Prompt, row: Mapping[str, object], *, template: str | None) -> str:
    """The prompt of `row`, without <bos>; a completion is what the model writes next.

    Worked examples (`prompt.shots`) come before the question, each as a turn of the user and one of
    the model; `prompt.system` opens the user's first turn. In plain text the two parts of an
    example follow one another as they are, and an empty line ends it.

    Args:
        prompt: how to ask.
        row: the columns of the dataset's row.
        template: the chat template of the model's folder, which `prompt.turn = "auto"` uses; None:
            Gemma's turns are used.

    Raises:
        ValueError: if `prompt.template` is wrong or names a column that `row` lacks, or if the chat
            template refuses the turns.
    """
    check_columns(template_columns(prompt.template), present=row, where="the row")
    question = "".join(
        literal + ("" if column is None else str(row[column]))
        for literal, column in _parse(prompt.template)
    )
    opening = f"{prompt.system}\n\n" if prompt.system else ""
    if prompt.turn == "plain":
        shots = "".join(f"{shot.user}{shot.model}\n\n" for shot in prompt.shots)
        return opening + shots + question
    examples = [(("user", shot.user), ("assistant", shot.model)) for shot in prompt.shots]
    turns = [*(turn for example in examples for turn in example), ("user", question)]
    turns[0] = ("user", opening + turns[0][1])
    if prompt.turn == "auto" and template is not None:
        return _rendered_by(template, turns)
    return _gemmas_turns(turns)


def read_chat_template(folder: Path) -> str | None:
    """The chat template of a Hugging Face folder as Jinja text; None if it has none.

    It stands in `chat_template.jinja`, in `chat_template.json` or in `tokenizer_config.json`; of
    several under names it is the one named default.

    Raises:
        ValueError: if a file cannot be read, or if the template is no Jinja.
    """
    found: Any = None
    if (folder / "chat_template.jinja").is_file():
        found = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if found is None and (folder / name).is_file():
            found = read_object(folder / name).get("chat_template")
    if isinstance(found, list):
        named = {entry["name"]: entry["template"] for entry in found}
        found = named.get("default")
    if found is not None:
        try:
            _compiled(found)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
    return found


def _gemmas_turns(turns: Sequence[Turn]) -> str:
    names = {"user": "user", "assistant": "model"}
    spoken = "".join(f"{START_OF_TURN}{names[who]}\n{text}{END_OF_TURN}\n" for who, text in turns)
    return f"{spoken}{START_OF_TURN}model\n"


def _rendered_by(template: str, turns: Sequence[Turn]) -> str:
    from jinja2 import TemplateError

    messages = [{"role": who, "content": text} for who, text in turns]
    try:
        text = _compiled(template)(messages=messages, add_generation_prompt=True, **_SPECIAL)
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the model's chat template refuses the turns: {error}") from None
    return text.removeprefix(_SPECIAL["bos_token"])


@functools.lru_cache(maxsize=4)
def _compiled(template: str) -> Callable[..., str]:
    """As transformers compiles it, without the clock: the same row is the same prompt every day."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(template).render
    except TemplateError as error:
        raise ValueError(f"the chat template is no Jinja: {error}") from None


def _parse(template: str) -> list[tuple[str, str | None]]:
    """Pieces of the template: a literal text and the column that follows it, if one does."""
    where = f"prompt.template = {template!r}"
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{where}: {error}; write {{{{ and }}}} for braces") from None
    for _, column, spec, conversion in parsed:
        if column == "":
            raise ValueError(f"{where}: empty braces; name a column, e.g. {{question}}")
        if spec or conversion:
            raise ValueError(f"{where}: {{{column}}} is converted or formatted; write {{{column}}}")
    return [(literal, column) for literal, column, _, _ in parsed]
