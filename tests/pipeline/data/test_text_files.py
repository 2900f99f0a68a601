"""JSON and CSV files: rows, and malformed ones with their numbers."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.data.rows import Malformed, Row
from pipeline.data.text_files import PARSERS, Parsed, parser_of

LONG = "x" * 200_000


def packed(content: bytes) -> bytes:
    """In gzip's format, without the time: names of tests must be the same in all processes."""
    return gzip.compress(content, mtime=0)


def parse(folder: Path, name: str, content: str | bytes, limit: int | None = None) -> Parsed:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    parser = parser_of(name)
    assert parser is not None
    return parser(path, limit)


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        # The number of a row is that of its first line.
        (
            "a.csv",
            '\ufeffquestion, answer\r\n"a, ""b""\r\nc",1\r\n\r\n,\r\n\xe9,007\r\n',
            [
                Row(2, {"question": 'a, "b"\r\nc', "answer": "1"}),
                Row(6, {"question": "\xe9", "answer": "007"}),
            ],
        ),
        ("a.csv", f"q,a\n{LONG},1\n", [Row(2, {"q": LONG, "a": "1"})]),
        ("a.csv", ",q,a\n7,x,1\n", [Row(2, {"q": "x", "a": "1"})]),  # pandas' index
        ("a.csv", "q,a\rx,1\r", [Row(2, {"q": "x", "a": "1"})]),
        ("a.json", '\ufeff[{"q": [1]}, {"q": 2}]', [Row(1, {"q": [1]}), Row(2, {"q": 2})]),
        ("a.jsonl", '\ufeff{"q": 1}\r\n\r\n{"q": 2}', [Row(1, {"q": 1}), Row(3, {"q": 2})]),
        ("a.NDJSON", '{"q": "x", "a": "1"}', [Row(1, {"q": "x", "a": "1"})]),
        ("a.tsv", "q\ta\nx, y\t1\n", [Row(2, {"q": "x, y", "a": "1"})]),
        # gzip is found by its content.
        ("a.Jsonl.gz", packed(b'{"q": 1}'), [Row(1, {"q": 1})]),
        ("a.JSON.GZ", packed(b'[{"q": 1}]'), [Row(1, {"q": 1})]),
        ("a.tsv", packed(b"q\nx\n"), [Row(2, {"q": "x"})]),
    ],
)
def test_rows_have_their_values_and_numbers(
    tmp_path: Path, name: str, content: str | bytes, rows: list[Row]
):
    assert parse(tmp_path, name, content) == (rows, [])
    assert parse(tmp_path, name, content, limit=1) == (rows[:1], [])


def test_malformed_rows_are_reported_and_the_rest_is_read(tmp_path: Path):
    text = b'q,a\n1,2,3\n"x" y,1\n\xff,1\nq\nfine,1\n'
    assert parse(tmp_path, "a.csv", text) == (
        [Row(6, {"q": "fine", "a": "1"})],
        [
            Malformed(2, "has 3 values for 2 columns"),
            Malformed(3, "not CSV: ',' expected after '\"'"),
            Malformed(4, "not UTF-8"),
            Malformed(5, "has 1 values for 2 columns"),
        ],
    )
    rows, malformed = parse(tmp_path, "a.csv", text, limit=2)
    assert ([row.number for row in rows], [bad.row for bad in malformed]) == ([], [2, 3])
    number = Malformed(2, "a value of type int, not an object with columns")
    assert parse(tmp_path, "a.json", '[{"q": 1}, 3]') == ([Row(1, {"q": 1})], [number])


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.csv", "a,b,a\n1,2,3\n", "repeats the column names a"),
        ("a.csv", "a,\n1,2\n", "an empty column name"),
        ("a.csv", "a;b\n1;2\n", "the separator is ';' instead of ','; write commas or tabs"),
        ("a.csv", "a\tb\n1\t2\n", r"the separator is '\\t' instead of ','; call the file \.tsv"),
        ("a.tsv", "a,b\n1,2\n", r"the separator is ',' instead of '\\t'; call the file \.csv"),
        ("a.json", '{"q": 1}', "a value of type dict, not a list of objects"),
        ("a.csv", 'q,a\nx,1\n"never\nclosed,1\n', "a quote in the row of line 3 is never closed"),
        ("a.json", '{"q": 1}\n{"q": 2}\n', r"a file with one object per line is called \.jsonl"),
        ("a.json", "[" * 100_000, "not a JSON list: maximum recursion depth exceeded"),
        ("a.jsonl", '[{"q": 1},\n{"q": 2}]\n', r"a JSON list, .*; call the file \.json"),
        ("a.json", '[{"q": 1}]'.encode("utf-16"), "UTF-16, not UTF-8; convert it"),
        ("a.csv", "q,a\n".encode("utf-16-le"), "UTF-16, not UTF-8"),
        ("a.csv", packed(b"q,a\n")[:-9], "not gzip: "),
    ],
)
def test_a_file_of_another_kind_is_refused(
    tmp_path: Path, name: str, content: str | bytes, what: str
):
    with pytest.raises(ValueError, match=what):
        parse(tmp_path, name, content)


@pytest.mark.parametrize("kind", PARSERS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60) | st.text('",\n\ra\x00[{}]:1', max_size=40))
def test_any_file_is_parsed_or_refused_in_words(tmp_path: Path, kind: str, content: bytes | str):
    try:
        rows, malformed = parse(tmp_path, f"a{kind}", content)
    except ValueError:
        return
    numbers = [row.number for row in rows] + [bad.row for bad in malformed]
    assert len(set(numbers)) == len(numbers)
