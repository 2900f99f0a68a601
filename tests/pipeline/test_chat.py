"""Prompts: Gemma's turns, the template's columns, braces that stand for themselves."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Prompt
from pipeline.chat import render, template_columns


def test_gemmas_turns():
    prompt = Prompt(system="Think first.", template="Question: {question}")
    assert render(prompt, {"question": "1 + 1?", "answer": "2"}) == (
        "<start_of_turn>user\nThink first.\n\nQuestion: 1 + 1?<end_of_turn>\n<start_of_turn>model\n"
    )


def test_no_system_text_leaves_no_gap():
    assert render(Prompt(), {"question": "q"}) == (
        "<start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\n"
    )


def test_plain_is_the_text_alone():
    prompt = Prompt(system="s", template="{a}+{b}={a}", turn="plain")
    assert render(prompt, {"a": 1, "b": "x"}) == "s\n\n1+x=1"


@given(text=st.text())
def test_braces_in_data_and_system_stand_for_themselves(text: str):
    prompt = Prompt(system="{not a column} {", template="{{{question}}}", turn="plain")
    assert render(prompt, {"question": text}) == f"{{not a column}} {{\n\n{{{text}}}"


def test_columns_are_listed_once_in_order():
    assert template_columns("{b} {a} {{c}} {b} {two words}") == ("b", "a", "two words")


def test_a_missing_column_names_the_nearest():
    expected = r"the row has no column 'qestion'; nearest: 'question' \(of \['answer', 'question'\]"
    with pytest.raises(ValueError, match=expected):
        render(Prompt(template="{qestion}"), {"question": "q", "answer": "a"})


@pytest.mark.parametrize("template", ["{question.__class__}", "{question[0]}", "{0}"])
def test_placeholders_are_looked_up_and_never_evaluated(template: str):
    with pytest.raises(ValueError, match="the row has no column"):
        render(Prompt(template=template), {"question": "q"})
    column = template.strip("{}")
    assert render(Prompt(template=template, turn="plain"), {column: "as it is"}) == "as it is"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("no placeholder", "names no column"),
        ("{{question}}", "names no column"),
        ("{}", "empty braces"),
        ("{question!r}", "converted or formatted; write {question}"),
        ("{question:>10}", "converted or formatted; write {question}"),
        ("{question", "write {{ and }} for braces"),
        ("question}", "write {{ and }} for braces"),
        ("{a{b}}", "write {{ and }} for braces"),
    ],
)
def test_templates_that_are_none(template: str, reason: str):
    with pytest.raises(ValueError, match=re.escape(reason)) as raised:
        template_columns(template)
    assert repr(template) in str(raised.value)
