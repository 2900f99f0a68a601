"""Prompt texts: Gemma's turns, template columns, literal braces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from configs.schema import Prompt, Shot
from pipeline.data.text.chat import (
    GEMMA4,
    ChatTemplate,
    read_chat_template,
)
from pipeline.data.text.chat import render as render_with

CASES = Path(__file__).parents[1] / "cases"


def read_case(name: str) -> str:
    return (CASES / name).read_text(encoding="utf-8")


GEMMA2, GEMMA3 = read_case("gemma2.jinja"), read_case("gemma3.jinja")
"""As published with google/gemma-2-2b-it and google/gemma-3-1b-it."""
GEMMA4_TEMPLATE = read_case("gemma4.jinja")
"""What the one published with google/gemma-4-E2B-it does without tools, images and sound."""
SHOTS = (Shot(user="1 + 1?", model="2"), Shot(user="2 + 2?", model="4"))
PLAIN = (Shot(user="Q: 1 + 1?\nA:", model=" 2"),)
SPOKEN = (
    "<start_of_turn>user\nThink.\n\n1 + 1?<end_of_turn>\n<start_of_turn>model\n2<end_of_turn>\n"
    "<start_of_turn>user\nQ: q<end_of_turn>\n<start_of_turn>model\n"
)


def render(prompt: Prompt, row: Mapping[str, object], *, template: str | None = None) -> str:
    chat_template = None if template is None else ChatTemplate(Path("folder/file"), template)
    return render_with(prompt, row, template=chat_template)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (Prompt(system="Think.", template="Q: {a}", shots=SHOTS[:1]), SPOKEN),
        (Prompt(system="s", template="{a}+{b}={a}", turn="plain"), "s\n\nq+1=q"),
        (
            Prompt(system="s", template="Q: {a}\nA:", shots=PLAIN, turn="plain"),
            "s\n\nQ: 1 + 1?\nA: 2\n\nQ: q\nA:",
        ),
        # Braces in data and the system's text are literal.
        (Prompt(system="{no} {", template="{{{braces}}}", turn="plain"), "{no} {\n\n{{a} {} {{}"),
        (
            Prompt(template='{a}: {{"v": {{"a": 1}}}} \\frac{{1}}{{2}}', turn="plain"),
            'q: {"v": {"a": 1}} \\frac{1}{2}',
        ),
    ],
)
def test_prompts_by_hand(prompt: Prompt, text: str):
    assert render(prompt, {"a": "q", "b": 1, "braces": "{a} {} {{", "other": "x"}) == text


@pytest.mark.parametrize("shots", [(), SHOTS])
@pytest.mark.parametrize("system", ["", "Think first."])
@pytest.mark.parametrize("template", [GEMMA2, GEMMA3])
def test_gemmas_chat_templates_equal_the_built_in_turns(
    template: str, system: str, shots: tuple[Shot, ...]
):
    prompt = Prompt(system=system, shots=shots)
    found = render(prompt, {"question": "q"}, template=template)
    assert found == render(prompt, {"question": "q"})
    assert found == render(prompt.model_copy(update={"turn": "gemma"}), {"question": "q"})


@pytest.mark.parametrize(
    ("system", "thinking", "opening"),
    [
        ("", False, ""),
        ("Be brief.", False, "<|turn>system\nBe brief.<turn|>\n"),
        ("", True, "<|turn>system\n<|think|>\n<turn|>\n"),
        ("Be brief.", True, "<|turn>system\n<|think|>\nBe brief.<turn|>\n"),
    ],
)
def test_gemma_4_has_a_turn_of_the_system_and_a_thinking_mode(
    system: str, thinking: bool, opening: str
):
    prompt = Prompt(system=system, shots=SHOTS[:1], thinking=thinking)
    spoken = "<|turn>user\n1 + 1?<turn|>\n<|turn>model\n2<turn|>\n"
    spoken += "<|turn>user\nq<turn|>\n<|turn>model\n"
    for template in (None, ChatTemplate(Path("folder/file"), GEMMA4_TEMPLATE)):
        found = render_with(prompt, {"question": "q"}, template=template, turns=GEMMA4)
        assert found == opening + spoken


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + {1}?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2 + 2?"},
]


@pytest.mark.parametrize("template", [None, GEMMA2, GEMMA3])
def test_messages_replace_the_question(template: str | None):
    prompt = Prompt(system="Think.", shots=SHOTS[:1], template="{messages}")
    chat_template = None if template is None else ChatTemplate(Path("folder/file"), template)
    turns = (
        "<start_of_turn>user\n1 + {1}?<end_of_turn>\n<start_of_turn>model\n2<end_of_turn>\n"
        "<start_of_turn>user\nAnd 2 + 2?<end_of_turn>\n<start_of_turn>model\n"
    )
    shot = "1 + 1?<end_of_turn>\n<start_of_turn>model\n2<end_of_turn>\n"
    found = render_with(prompt, {}, template=chat_template, messages=MESSAGES)
    assert found == f"<start_of_turn>user\nThink.\n\nBe brief.\n\n{shot}{turns}"
    prompt = Prompt(template="{messages}")
    found = render_with(prompt, {}, template=chat_template, messages=MESSAGES)
    assert found == turns.replace("user\n", "user\nBe brief.\n\n", 1)


def test_only_auto_uses_the_models_template():
    template = "{{ bos_token }}[{{ messages[0].role }}: {{ messages[0].content }}]{{ eos_token }}"
    assert render(Prompt(), {"question": "q"}, template=template) == "[user: q]<eos>"
    for prompt in (Prompt(turn="gemma"), Prompt(turn="plain")):
        found = render(prompt, {"question": "q"}, template=template)
        assert found == render(prompt, {"question": "q"})


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{{ strftime_now('%d') }}", "'strftime_now' is undefined"),
        ("{% if %}", "Expected an expression"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth exceeded"),
        (read_case("tmpl_parts.jinja"), "it omits the text of the user, 'q'"),
        (read_case("tmpl_space_bos.jinja"), "it writes <bos> elsewhere than once at the beginning"),
    ],
)
def test_an_unusable_template_is_refused(monkeypatch: pytest.MonkeyPatch, template: str, what: str):
    monkeypatch.setattr("pipeline.data.text.chat._CHECKED", {template})  # without a child process
    with pytest.raises(ValueError, match=rf"^folder/file: the chat template fails: .*{what}"):
        render(Prompt(), {"question": "q"}, template=template)
    assert render(Prompt(turn="gemma"), {"question": "q"}, template=template)


def test_the_marks_of_trained_turns_change_no_text():
    prompt = Prompt(system="s", shots=SHOTS)
    template = read_case("tmpl_generation.jinja")
    assert render(prompt, {"question": "q"}, template=template) == render(prompt, {"question": "q"})


def test_the_template_is_found_where_hugging_face_puts_it(tmp_path: Path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert read_chat_template(tmp_path) is None
    for name, content, text in (
        ("tokenizer_config.json", json.dumps({"bos_token": "<bos>"}), None),
        ("tokenizer_config.json", json.dumps({"chat_template": named}), "d"),
        ("tokenizer_config.json", json.dumps({"chat_template": "c"}), "c"),
        ("chat_template.json", json.dumps({"chat_template": "j"}), "j"),
        ("chat_template.jinja", "{{ messages[0].content }}", "{{ messages[0].content }}"),
    ):
        (tmp_path / name).write_text(content)
        found = read_chat_template(tmp_path)
        assert (found and found.text) == text


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{qestion}", r"no column 'qestion'; nearest: 'question' \(of \['answer', 'question'\]"),
        (
            "{question} \\frac{1}{{2}}",
            r"no column '1'; its columns: .*; for braces in the text write \{\{1\}\}$",
        ),
        ("{question.__class__}", r"no column 'question\.__class__'"),  # it is not evaluated
    ],
)
def test_a_missing_column_names_the_nearest_or_a_remedy(template: str, what: str):
    with pytest.raises(ValueError, match=f"the row has {what}"):
        render(Prompt(template=template), {"question": "q", "answer": "a"})


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "2 s of",
        ),
        ("{{ 'x' * 10 ** 10 }}", "it takes more than 1 GiB of memory"),
        ("{{ 'x' * 10 ** 7 }}", "it writes 10,000,000 characters"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "recursion"),
    ],
)
def test_a_template_that_does_not_end_or_needs_much_memory_is_refused(template: str, reason: str):
    with pytest.raises(ValueError, match=f"^folder/file: the chat template fails: .*{reason}"):
        render(Prompt(), {"question": "q"}, template=template)
