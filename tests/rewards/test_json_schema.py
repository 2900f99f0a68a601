"""JSON by a schema, and the hacks that `JsonSchema` lists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.schema import Prompt
from rewards.base import Tags
from rewards.json_schema import JsonSchema

TAGS = Tags.of(Prompt())
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANN = '{"name": "Ann", "age": 3}'


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (ANN, 1),
        (f"so <answer>{ANN}</answer>", 1),
        (f"<answer>\n```json\n{ANN}\n```\n</answer>", 1),
        (f"First\n```json\n{{}}\n```\nthen\n```\n{ANN}\n```", 1),
        (f"Here: {ANN}", 0),
        (f"{ANN} <answer>{{}}</answer>", 0),
        ('{"name": "Ann", "age": "3"}', 0),
        ('{"name": "Ann"}', 0),
        ("", 0),
        ("[" * 100_000, 0),
        ("9" * 5000, 0),
    ],
)
def test_the_answer_is_valid_json(completion: str, score: float) -> None:
    assert JsonSchema(PERSON)(completion, tags=TAGS) == score


def test_a_schema_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "person.json"
    path.write_text(json.dumps(PERSON))
    assert JsonSchema(str(path))(ANN, tags=TAGS) == 1


def test_invalid_schemas_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"schema: 'int' is not valid .* at properties/a/type"):
        JsonSchema({"properties": {"a": {"type": "int"}}})
    with pytest.raises(ValueError, match=r"gone\.json cannot be read"):
        JsonSchema(str(tmp_path / "gone.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"bad\.json is not JSON"):
        JsonSchema(str(tmp_path / "bad.json"))


def test_an_unknown_reference_is_an_error_and_downloads_nothing() -> None:
    score = JsonSchema({"$ref": "http://127.0.0.1:9/schema.json"})
    with pytest.raises(Exception, match=r"schema\.json"):
        score("{}", tags=TAGS)


def test_hack_the_smallest_value_is_valid_unless_the_schema_requires_more() -> None:
    loose = {"type": "object", "properties": PERSON["properties"]}
    assert [JsonSchema(schema)("{}", tags=TAGS) for schema in (loose, PERSON)] == [1, 0]


@pytest.mark.parametrize(
    "text", ['{"name": "A", "age": 1, "age": 2}', '{"name": "A", "age": NaN}', "Infinity"]
)
def test_hack_what_only_python_reads_scores_zero(text: str) -> None:
    assert JsonSchema({})(text, tags=TAGS) == 0
