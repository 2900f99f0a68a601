"""JSON and CSV files: rows, and malformed ones with their numbers."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.data.rows import Malformed, Row
from pipeline.data.text_files import PARSERS, Parsed, parse_csv, parse_json, parser_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a"


def csv(path: Path, text: str | bytes, limit: int | None = None) -> Parsed:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return parse_csv(path, limit)


def json(path: Path, text: str, limit: int | None = None) -> Parsed:
    path.write_text(text, encoding="utf-8")
    return parse_json(path, limit)


def test_a_csv_row_has_the_number_of_its_first_line(path: Path):
    text = b'\xef\xbb\xbfquestion, answer\r\n"a, ""b""\r\nc",1\r\n\r\n,\r\n\xc3\xa9,007\r\n'
    assert csv(path, text) == (
        [
            Row(2, {"question": 'a, "b"\r\nc', "answer": "1"}),
            Row(6, {"question": "\xe9", "answer": "007"}),
        ],
        [],
    )


def test_malformed_csv_rows_are_reported_and_the_rest_is_read(path: Path):
    text = b'q,a\n1,2,3\n"x" y,1\n\xff,1\nq\nfine,1\n'
    rows, malformed = csv(path, text)
    assert rows == [Row(6, {"q": "fine", "a": "1"})]
    assert malformed == [
        Malformed(2, "has 3 values for 2 columns"),
        Malformed(3, "not CSV: ',' expected after '\"'"),
        Malformed(4, "not UTF-8"),
        Malformed(5, "has 1 value for 2 columns"),
    ]
    rows, malformed = csv(path, text, limit=2)
    assert ([row.number for row in rows], [bad.row for bad in malformed]) == ([], [2, 3])


def test_a_csv_quote_that_is_never_closed_is_an_error_and_hides_no_rows(path: Path):
    with pytest.raises(ValueError, match=r"a quote in the row of line 3 is never closed"):
        csv(path, 'q,a\nfine,1\n"never closed,1\nrest,1\n')


def test_csv_values_may_be_long(path: Path):
    long = "x" * 200_000
    assert csv(path, f"q,a\n{long},1\n") == ([Row(2, {"q": long, "a": "1"})], [])


def test_the_name_of_the_only_column_may_contain_a_comma(path: Path):
    assert csv(path, '"Question, in full"\nx\n') == ([Row(2, {"Question, in full": "x"})], [])


def test_a_first_column_without_a_name_is_ignored(path: Path):
    assert csv(path, ",q,a\n7,x,1\n") == ([Row(2, {"q": "x", "a": "1"})], [])


@pytest.mark.parametrize(
    ("header", "what"),
    [
        ("a,b,a\n1,2,3\n", "repeats the column names a"),
        ("a,\n1,2\n", "an empty column name"),
        ("a;b\n1;2\n", "the separator is ';' instead of ','; write commas or tabs"),
        ("a\tb\n1\t2\n", r"the separator is '\\t' instead of ','; call the file \.tsv"),
    ],
)
def test_csv_columns_need_different_names_and_commas(path: Path, header: str, what: str):
    with pytest.raises(ValueError, match=what):
        csv(path, header)


def test_the_objects_of_a_json_list_are_rows(path: Path):
    rows, malformed = json(path, '\ufeff[{"q": [1]}, 3, {"q": 2}]')
    assert rows == [Row(1, {"q": [1]}), Row(3, {"q": 2})]
    assert malformed == [Malformed(2, "a number, not an object with columns")]
    assert json(path, '[{"q": 1}, {"q": 2}]', limit=1) == ([Row(1, {"q": 1})], [])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"q": 1}', "an object, not a list of objects"),
        ('{"q": 1}\n{"q": 2}\n', r"Extra data: .*; a file with one object per line is .* \.jsonl"),
        ("[{]", "not JSON: Expecting property name"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_json_list_is_refused(path: Path, text: str, what: str):
    with pytest.raises(ValueError, match=what):
        json(path, text)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.NDJSON", b'{"q": "x", "a": "1"}'),
        ("a.Jsonl.gz", gzip.compress(b'{"q": "x", "a": "1"}', mtime=0)),
        ("a.JSON.GZ", gzip.compress(b'[{"q": "x", "a": "1"}]', mtime=0)),
        ("a.tsv", b"q\ta\nx\t1\n"),
        ("a.csv.gz", gzip.compress(b"q,a\nx,1\n", mtime=0)),
    ],
)
def test_the_ending_says_how_a_file_is_written(tmp_path: Path, name: str, content: bytes):
    (tmp_path / name).write_bytes(content)
    parser = parser_of(name)
    assert parser is not None
    (row,), malformed = parser(tmp_path / name, None)
    assert (row.values, malformed) == ({"q": "x", "a": "1"}, [])


@pytest.mark.parametrize("kind", PARSERS)
def test_utf_16_and_damaged_gzip_are_named(tmp_path: Path, kind: str):
    (tmp_path / "a").write_text("q", encoding="utf-16")
    with pytest.raises(ValueError, match="UTF-16, not UTF-8; convert it"):
        PARSERS[kind](tmp_path / "a", None)
    for damaged in (b"q,a\n", gzip.compress(b"q,a\n")[:-9]):
        (tmp_path / "a.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match="not gzip: "):
            PARSERS[kind](tmp_path / "a.gz", None)


@pytest.mark.parametrize("kind", PARSERS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60) | st.text('",\n\ra\x00[{}]:1', max_size=40))
def test_any_file_is_parsed_or_refused_in_words(path: Path, kind: str, content: bytes | str):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        rows, malformed = PARSERS[kind](path, None)
    except ValueError:
        if kind in {".jsonl", ".ndjson"}:  # their mistakes belong to lines
            assert path.read_bytes().startswith((b"\xff\xfe", b"\xfe\xff"))
    else:
        numbers = [row.number for row in rows] + [bad.row for bad in malformed]
        assert len(set(numbers)) == len(numbers)
