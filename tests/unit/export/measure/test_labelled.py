"""Lines of texts with labels and of sentences with tags: an error names what is wrong."""

from pathlib import Path
from typing import Any

import pytest

from cloze.export.errors import DataError
from cloze.export.measure.documents import read_lines
from cloze.export.measure.labelled import read_labelled, read_tagged

EXPECTED = "label: a text or a number is expected"


@pytest.mark.parametrize(
    ("read", "line", "message"),
    [
        (read_labelled, '{"text": "a", "label": true}', f"{EXPECTED}, got True"),
        (read_labelled, '{"text": "a", "label": " "}', f"{EXPECTED}, got ' '"),
        (read_labelled, '{"text": "a", "label": null}', 'needs either "label" or "labels"'),
        (read_labelled, '{"text": " ", "label": "x"}', "text: String should match pattern"),
        (read_labelled, '{"text": "a", "text_pair": 1}', "text_pair: Input should be a valid str"),
        (read_labelled, '{"text": "a", "labels": ["x", 1]}', "labels.1: Input should be a valid"),
        (read_tagged, '{"tokens": ["a b"], "tags": ["O"]}', "tokens.0: String should match pat"),
        (read_tagged, '{"tokens": ["a"], "tags": ["O", "O"]}', "1 tokens have 2 tags"),
        (read_tagged, '{"words": ["a"], "tags": ["O"]}', "tokens: Field required"),
    ],
)
def test_a_bad_line(read: Any, line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"\n{line}\n")
    with pytest.raises(DataError) as caught:
        read([file])
    assert str(caught.value).startswith(f"{file}, line 2: {message}")


def test_a_line_with_a_zero_byte_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(b"a\n\0\n")
    with pytest.raises(DataError, match="line 2 is not text"):
        list(read_lines(file))


def test_the_kinds_of_labels(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for line, problem, names in (
        ('{"text": "a", "label": "x", "id": 7}', "single_label_classification", ("x",)),
        ('{"text": "a", "labels": ["x", "y"]}', "multi_label_classification", ("x", "y")),
        ('{"text": "a", "label": 3}', "regression", ("score",)),
    ):
        file.write_text(line)
        [row] = read_labelled([file])
        assert (row.problem, row.names) == (problem, names)


def test_a_table_with_a_header(tmp_path: Path) -> None:
    for name, content in {
        "rows.csv": '\ufefftext,label,id\n"A, b\nc",1,7\n\nd,x,8\n',
        "rows.tsv": 'text\tlabel\n"A, b\nc"\t1\nd\tx\n',
    }.items():
        (tmp_path / name).write_text(content)
        rows = read_labelled([tmp_path / name])
        assert [(row.text, row.label) for row in rows] == [("A, b\nc", "1"), ("d", "x")]
    numbers = tmp_path / "numbers.csv"
    numbers.write_text("text,text_pair,score\na,b,0.5\n")
    [row] = read_labelled([numbers])
    assert (row.text_pair, row.label, row.problem) == ("b", 0.5, "regression")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", " has no line with the names of the columns"),
        ("text,text\na,b\n", " has two columns named 'text'"),
        ("text,label\na\n", ", line 2: the row has 1 fields, and the header has 2"),
        ("a,label\nb,c\n", ', line 2: needs the columns "text" and either "label" or "score", got'),
        ("text,score\na,many\n", ", line 2: score is not a number: 'many'"),
        ("text,score\na,nan\n", f", line 2: {EXPECTED}, got nan"),
        ("text,label\n ,x\n", ", line 2: text: String should match pattern"),
        ('text,label\n"a"b,x\n', " ',' expected after '\"'"),
    ],
)
def test_a_bad_table(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(content)
    with pytest.raises(DataError) as caught:
        read_labelled([file])
    assert str(caught.value).startswith(f"{file}{message}")
