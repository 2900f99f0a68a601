"""From a dataset row to what the model reads: the template and Gemma's turns.

The one source of prompts for training and evaluation. Only the template is a template: braces in
the system text or in the data stand for themselves.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from string import Formatter

from configs.schema import Prompt

START_OF_TURN = "<start_of_turn>"
END_OF_TURN = "<end_of_turn>"


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
        ValueError: if one of `columns` is not `present`; names the nearest one that is.
    """
    known = sorted(present)
    for column in columns:
        if column not in known:
            nearest = difflib.get_close_matches(column, known, n=1, cutoff=0.0)
            hint = f"nearest: {nearest[0]!r} (of {known})" if nearest else "it has no columns"
            raise ValueError(f"{where} has no column {column!r}; {hint}")


def render(prompt: Prompt, row: Mapping[str, object]) -> str:
    """The prompt of `row`, without <bos>; a completion is what the model writes next.

    Raises:
        ValueError: if the template is wrong or names a column that `row` lacks.
    """
    check_columns(template_columns(prompt.template), present=row, where="the row")
    question = "".join(
        literal + ("" if column is None else str(row[column]))
        for literal, column in _parse(prompt.template)
    )
    text = f"{prompt.system}\n\n{question}" if prompt.system else question
    if prompt.turn == "plain":
        return text
    return f"{START_OF_TURN}user\n{text}{END_OF_TURN}\n{START_OF_TURN}model\n"


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
