"""By which name a weight finds the documents of a corpus."""

from cloze.export.train.corpus import Origin
from cloze.export.train.sampling import _group


def test_the_source_of_a_document_goes_before_its_file() -> None:
    origin = Origin(file="news.jsonl", source="papers")
    assert _group(origin, ["news.jsonl", "papers"]) == 1
    assert _group(origin, ["news.jsonl", "other"]) == 0
    assert _group(origin, ["other"]) == 1
