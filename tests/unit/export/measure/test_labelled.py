"""Files of texts with labels, of sentences with tags, of pairs and of questions."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cloze.export.errors import DataError
from cloze.export.measure.audit import read_stereotypes
from cloze.export.measure.documents import read_lines
from cloze.export.measure.evaluate import read_sentences
from cloze.export.measure.labelled import read_labelled, read_tagged
from cloze.export.measure.pairs import read_pairs
from cloze.export.measure.squad import read_questions
from tests.support.refusals import check_table


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


READERS: dict[str, Callable[[Path], Any]] = {
    "labelled": lambda file: read_labelled([file]),
    "tagged": lambda file: read_tagged([file]),
    "lines": lambda file: list(read_lines(file)),
    "pairs": lambda file: read_pairs([file]),
    "questions": lambda file: read_questions([file]),
    "sentences": read_sentences,
    "stereotypes": read_stereotypes,
}


def test_what_is_wrong_in_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    """`refused.txt` has a kind of file with its ending, its content in Python, and the error."""

    def outcome(kind: str, content: str) -> str:
        file = tmp_path / kind.replace(" ", ".")
        file.unlink(missing_ok=True)
        if (written := eval(content)) is not None:
            file.write_bytes(written if isinstance(written, bytes) else written.encode())
        try:
            return str(READERS[kind.split()[0]](file))
        except DataError as error:
            message = str(error).replace(str(tmp_path), "FOLDER")
            return re.sub(r"(format: \w+Error|xz file)\b.*", r"\1", message)

    check_table(Path(__file__).with_name("refused.txt"), outcome)
