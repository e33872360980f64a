"""Awkward lines: a served tokenizer has the ids of its reference, and words and places of texts.

The references share no code with the export: they are built with the tokenizers library from what
the papers and file formats say.
"""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, TokenClassificationPipeline
from transformers.pipelines.token_classification import AggregationStrategy

from cloze.model_store.heads import ArrayResult
from cloze.service.tasks.qa import QaPair
from cloze.service.tasks.task import TaskContext
from tests.support.task_model import LABELS, decoded, prepared
from tests.support.tokenizer_references import KINDS, lines, served


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_reference(kind: str, tmp_path: Path) -> None:
    KINDS[kind].write(tmp_path)
    tokenizer, reference = served(tmp_path).tokenizer, KINDS[kind].reference()
    texts = lines(200)
    expected = [reference.encode(text, add_special_tokens=False) for text in texts]
    assert [*map(list, tokenizer.ids(texts))] == [encoding.ids for encoding in expected]
    seconds = [*texts[1:], texts[0]]
    for text, second, encoding in zip(texts, seconds, expected, strict=True):
        assert tokenizer.ids([text]) == [encoding.ids], ascii(text)
        pair = reference.encode(text, second)
        ours = tokenizer.pair(encoding.ids, *tokenizer.ids([second]), 10**6)
        assert ours.input_ids.tolist() == pair.ids, ascii(text)
        assert ours.token_type_ids.tolist() == pair.type_ids, ascii(text)
        spans = tokenizer.spans(text)
        assert [*spans.ids] == encoding.ids, ascii(text)
        for (start, end), place in zip(spans.offsets(), encoding.offsets, strict=True):
            part = text[start:end]
            assert part == part.strip() if part.strip() else (start, end) == place, ascii(text)
    long = "".join(texts)  # divided
    assert [*map(list, tokenizer.ids([long]))] == [
        reference.encode(long, add_special_tokens=False).ids
    ]


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"wordpiece-vocabulary", "bytes-merges"}))
def test_no_entity_is_a_part_of_a_word_of_the_tokenizer(kind: str, tmp_path: Path) -> None:
    """Neighbouring tokens have different labels, and a word takes one of them."""
    KINDS[kind].write(tmp_path)
    context, reference = served(tmp_path), KINDS[kind].reference()
    asked = {"aggregation_strategy": "first", "words": "tokenizer", "ignore_labels": []}
    for text in lines(120):
        encoding = reference.encode(text, add_special_tokens=False)
        if not encoding.ids:
            continue
        chosen = np.arange(len(encoding.ids) + 2) % 4
        request = prepared("token-classification", text, context, **asked)
        result = {"token_classification": ArrayResult(9 * np.eye(4, dtype=np.float32)[chosen])}
        [entities] = decoded("token-classification", request, [result], context)
        runs = [set(range(*run.span())) for run in re.finditer(r"\S+", text)]
        covered = [set(range(entity.start, entity.end)) for entity in entities]
        for word in set(encoding.word_ids) - {None}:
            places = zip(encoding.word_ids, encoding.offsets, strict=True)
            own = {place for one, ends in places if one == word for place in range(*ends)}
            for part in (own & run for run in runs):
                assert all(part & one in (set(), part) for one in covered), ascii(text)


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"wordpiece-vocabulary", "bytes-merges"}))
def test_entities_are_those_of_the_pipeline(kind: str, strategy: str, tmp_path: Path) -> None:
    """The same logits become the same groups with the same scores, by transformers' own code."""
    KINDS[kind].write(tmp_path)
    context = served(tmp_path)
    fast = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    if (unknown := context.tokenizer.unknown_id) is not None:
        fast.unk_token = context.tokenizer.token_of(unknown)
    oracle = object.__new__(TokenClassificationPipeline)  # without a model, which it only runs
    oracle.tokenizer = fast
    oracle.model = SimpleNamespace(config=SimpleNamespace(id2label=LABELS))
    compared = 0
    for number, text in enumerate(lines(120)):
        encoding = fast(text, add_special_tokens=False, return_offsets_mapping=True)
        if not encoding["input_ids"]:
            continue
        count = len(encoding["input_ids"])
        logits = np.random.default_rng(number).normal(size=(count + 2, len(LABELS)))
        theirs = oracle.postprocess(
            [{
                "logits": torch.tensor(logits[None, 1:-1], dtype=torch.float32),
                "input_ids": torch.tensor([encoding["input_ids"]]),
                "offset_mapping": [encoding["offset_mapping"]],
                "special_tokens_mask": torch.zeros(1, count, dtype=torch.int64),
                "sentence": text,
            }],
            AggregationStrategy(strategy),
        )  # fmt: skip
        request = prepared("token-classification", text, context, aggregation_strategy=strategy)
        result = {"token_classification": ArrayResult(logits.astype(np.float32))}
        [ours] = decoded("token-classification", request, [result], context)
        label = "entity" if strategy == "none" else "entity_group"
        shown = [(getattr(each, label), text[each.start : each.end].strip()) for each in ours]
        assert shown == [
            (each[label], text[each["start"] : each["end"]].strip()) for each in theirs
        ], ascii(text)
        scores = [each["score"] for each in theirs]
        assert [each.score for each in ours] == pytest.approx(scores, rel=1e-5)
        compared += len(ours)
    assert compared > 300


NAMES = [
    "Ro\u00adbert",
    "Ro\u200bbert",
    "Re\u0301mi",
    "E\u0301a\u0301n",
    "Robe\u0301\u200brt",
    "Robert",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("kind", ["wordpiece", "wordpiece-mpnet"])
def test_a_name_with_characters_that_the_normaliser_drops_is_redacted(
    kind: str, name: str, tmp_path: Path
) -> None:
    """Only the first token of the name has the label, and its length is not that of the text."""
    KINDS[kind].write(tmp_path)
    text = f"the {name} was here"
    redaction = redacted(text, lambda token: token.startswith(name[0].lower()), served(tmp_path))
    assert redaction.text == "the <LOC_1> was here"
    assert [one.text for one in redaction.replacements] == [name]


UNDIVIDED = ["gemma", "bytes-undivided", "unigram-undivided"]
"""Kinds whose library has one word for a whole text."""


@pytest.mark.parametrize("kind", UNDIVIDED)
def test_words_begin_at_white_space_where_the_tokenizer_has_one_word(
    kind: str, tmp_path: Path
) -> None:
    KINDS[kind].write(tmp_path)
    text, context = "the bank\nwas here", served(tmp_path)
    assert {*KINDS[kind].reference().encode(text, add_special_tokens=False).word_ids} == {0}
    redaction = redacted(text, lambda token: "b" in token, context)
    assert redaction.text == "the <LOC_1>\nwas here"
    request = prepared("qa", QaPair(question="who was here", context=text), context)
    [encoding] = request.encodings
    spans = context.tokenizer.spans(text)
    [named] = [n for n, (first, last) in enumerate(spans.offsets()) if "b" in text[first:last]]
    logits = np.zeros((len(encoding.input_ids), 2), np.float32)
    logits[len(logits) - 1 - len(spans.ids) + named] = 20
    [answer] = decoded("qa", request, [{"span": ArrayResult(logits)}], context)
    assert (answer.answer, answer.start, answer.end) == ("bank", 4, 8)


@pytest.mark.parametrize("kind", ["bytes", "bytes-prefix", "bytes-brackets"])
@pytest.mark.parametrize("text", ["tabs\tand", "a  b", " a \n b "])
def test_white_space_has_the_places_of_the_library_and_is_no_name(
    kind: str, text: str, tmp_path: Path
) -> None:
    KINDS[kind].write(tmp_path)
    context = served(tmp_path)
    expected = KINDS[kind].reference().encode(text, add_special_tokens=False).offsets
    spaces = [number for number, (a, b) in enumerate(expected) if not text[a:b].strip()]
    assert spaces
    places = context.tokenizer.spans(text).offsets()
    assert [places[number] for number in spaces] == [expected[number] for number in spaces]
    assert redacted(text, lambda token: not token.strip("ĠĊĉ "), context).text == text


def redacted(text: str, is_named: Callable[[str], bool], context: TaskContext) -> Any:
    """Return the redaction of a text, some of whose tokens have a label."""
    tokens = map(context.tokenizer.token_of, context.tokenizer.spans(text).ids)
    labels = [0, *(3 * is_named(token) for token in tokens), 0]
    assert 3 in labels
    result = {"token_classification": ArrayResult(9 * np.eye(4, dtype=np.float32)[labels])}
    [redaction] = decoded("redact", prepared("redact", [text], context), [result], context)
    return redaction
