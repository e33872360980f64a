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
