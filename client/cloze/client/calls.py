"""One function per task: what to send, and how the responses become a result.

Every function takes one input or a list of inputs, and its result has one element per input. The
server's routes return other shapes for one input than for many; here the shape is always the same.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import httpx
import numpy as np

from cloze.client.arguments import one_text, pairs_of, texts_of, texts_or_pairs_of, words_of
from cloze.client.call import (
    Call,
    Float32,
    LongText,
    Pair,
    body_with,
    chain,
    given,
    json_call,
    results,
)
from cloze.client.results import (
    Answer,
    Entity,
    Filling,
    Label,
    NamedEntity,
    Prediction,
    Rank,
    Redaction,
    Replacement,
    Score,
    ScoredToken,
    WordPrediction,
)

R = TypeVar("R")


def fill_mask(
    texts: str | Sequence[str],
    *,
    top_k: int | None = None,
    targets: Sequence[str] | None = None,
    long_text: LongText | None = None,
    model: str | None = None,
) -> Call[list[list[list[Prediction]]]]:
    """Return the likeliest tokens: for each text, for each of its masks, best first.

    One text counts as a list of one text, as in all methods: the nesting of the result does not
    depend on the input. The predictions of the only mask of the only text are ``result[0][0]``.

    Args:
        texts: a text or many, each with at least one mask token.
        top_k: number of predictions per mask; None selects the server's default, 5.
        targets: tokens to choose among; None selects the whole vocabulary.
        long_text: whether to refuse, cut or divide a long text; None selects "truncate".
    """
    read = partial(_per_mask, Prediction)
    chosen = None if targets is None else words_of("fill_mask", targets)
    options = {"top_k": top_k, "targets": chosen, "long_text": long_text}
    return json_call("/fill-mask", texts_of("fill_mask", texts), read, model, **options)


def fill_mask_words(
    texts: str | Sequence[str],
    targets: Sequence[str],
    *,
    top_k: int | None = None,
    long_text: LongText | None = None,
    model: str | None = None,
) -> Call[list[list[list[WordPrediction]]]]:
    """Return the likeliest words among targets: for each text, for each of its masks, best first.

    Args:
        texts: a text or many, each with at least one mask token.
        targets: the words, of one or more sub-tokens.
        top_k: number of words per mask; None selects the server's default, 5.
        long_text: whether to refuse, cut or divide a long text; None selects "error".
    """
    read, options = partial(_per_mask, WordPrediction), {"top_k": top_k, "long_text": long_text}
    words = {"targets": words_of("fill_mask_words", targets), "targets_as": "words"}
    return json_call(
        "/fill-mask", texts_of("fill_mask_words", texts), read, model, **words, **options
    )


def fill_mask_jointly(
    texts: str | Sequence[str],
    *,
    decode: Literal["independent", "left-to-right", "beam"] = "beam",
    top_k: int | None = None,
    long_text: LongText | None = None,
    model: str | None = None,
) -> Call[list[list[Filling]]]:
    """Return whole fillings of each text, with their joint probability, best first.

    Args:
        texts: a text or many, each with at least one mask token.
        decode: how the masks are filled together.
        top_k: number of fillings per text; None selects the server's default, 5.
        long_text: whether to refuse, cut or divide a long text; None selects "error".
    """
    read, options = partial(results, Filling), {"top_k": top_k, "long_text": long_text}
    return json_call(
        "/fill-mask", texts_of("fill_mask_jointly", texts), read, model, decode=decode, **options
    )


def score(
    texts: str | Sequence[str], *, long_text: LongText | None = None, model: str | None = None
) -> Call[list[Score]]:
    """Return the pseudo-log-likelihood of each text, with that of each token.

    Args:
        long_text: whether to refuse, cut or divide a long text; None selects "error".
    """

    def read(item: Mapping[str, Any]) -> Score:
        return Score(item["score"], results(ScoredToken, item["tokens"]))

    return json_call("/score", texts_of("score", texts), read, model, long_text=long_text)


def nsp(
    pairs: Pair | Sequence[Pair],
    *,
    long_text: Literal["error", "truncate"] | None = None,
    model: str | None = None,
) -> Call[Float32]:
    """Return the probability that the second text of a pair follows the first, [n] float32.

    Args:
        long_text: whether to refuse or cut a long pair; None selects "truncate".
    """

    def read(response: httpx.Response, _: int) -> Float32:
        return np.array([labels[0]["score"] for labels in response.json()], np.float32)

    options = given(parameters=given(long_text=long_text) or None, model=model)
    inputs = pairs_of("nsp", pairs, "text", "next")
    return Call("/nsp", inputs, partial(body_with, options), read, np.concatenate)


def qa(
    pairs: Pair | Sequence[Pair],
    *,
    top_k: int | None = None,
    doc_stride: int | None = None,
    max_answer_len: int | None = None,
    handle_impossible_answer: bool | None = None,
    long_text: LongText | None = None,
    model: str | None = None,
) -> Call[list[list[Answer]]]:
    """Return the answers to each question, best first.

    Args:
        pairs: a (question, context) or many.
        top_k: number of answers per question; None selects the server's default, 1.
        doc_stride: number of tokens that neighbouring windows of a long context share.
        max_answer_len: most tokens per answer.
        handle_impossible_answer: whether the empty text, "no answer", is a candidate.
        long_text: whether to refuse, cut or divide a long text; None selects "window".
    """

    def read(item: Any) -> list[Answer]:
        return results(Answer, item if isinstance(item, list) else [item])

    return json_call(
        "/qa",
        pairs_of("qa", pairs, "question", "context"),
        read,
        model,
        long_text=long_text,
        top_k=top_k,
        doc_stride=doc_stride,
        max_answer_len=max_answer_len,
        handle_impossible_answer=handle_impossible_answer,
    )


def classify(
    texts: str | Pair | Sequence[str | Pair],
    *,
    label_set: str | None = None,
    top_k: int | None = None,
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None,
    long_text: LongText | None = None,
    model: str | None = None,
) -> Call[list[list[Label]]]:
    """Return the labels of each text, best first.

    Args:
        texts: a text, a pair of texts as a tuple, or a list of these. A list of two texts is two
            texts, and a tuple of two texts is one pair.
        label_set: one of the model's label sets; None selects the first.
        top_k: number of labels per text; None selects all.
        function_to_apply: function from logits to scores; None selects the model's.
        long_text: whether to refuse, cut or divide a long text; None selects "truncate".
    """
    inputs = texts_or_pairs_of("classify", texts)
    return json_call(
        "/classify",
        inputs,
        partial(results, Label),
        model,
        label_set=label_set,
        top_k=top_k,
        function_to_apply=function_to_apply,
        long_text=long_text,
    )


def zero_shot_classification(
    texts: str | Sequence[str],
    candidate_labels: Sequence[str],
    *,
    hypothesis_template: str | None = None,
    multi_label: bool | None = None,
    long_text: LongText | None = None,
    model: str | None = None,
) -> Call[list[list[Label]]]:
    """Return how well labels of your own fit each text, best first.

    Args:
        candidate_labels: the labels to choose among.
        hypothesis_template: the sentence that a fitting text entails, with {} in the label's place;
            None selects "This example is {}."
        multi_label: whether each label is judged alone, so that several may fit.
        long_text: whether to refuse, cut or divide a long text; None selects "truncate".
    """
    method = "zero_shot_classification"
    return json_call(
        "/zero-shot-classification",
        texts_of(method, texts),
        partial(results, Label),
        model,
        candidate_labels=words_of(method, candidate_labels, "candidate_labels"),
        hypothesis_template=hypothesis_template,
        multi_label=multi_label,
        long_text=long_text,
    )


def token_classification(
    texts: str | Sequence[str],
    *,
    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] | None = None,
    words: Literal["transformers", "tokenizer"] | None = None,
    label_set: str | None = None,
    stride: int | None = None,
    long_text: LongText | None = None,
    model: str | None = None,
) -> Call[list[list[Entity]]]:
    """Return the entities of each text, in their order.

    Args:
        aggregation_strategy: how tokens form entities; None selects "simple".
        words: where words of "first", "average" and "max" begin: as for transformers' pipeline, or
            as for the tokenizer, to which punctuation is a word; None selects "transformers".
        label_set: one of the model's label sets; None selects the first.
        stride: number of tokens that neighbouring windows of a long text share; None cuts it.
        long_text: whether to refuse, cut or divide a long text; None selects "truncate".
    """

    def read(entities: Sequence[Mapping[str, Any]]) -> list[Entity]:
        return results(Entity, [{"entity": e.get("entity_group"), **e} for e in entities])

    return json_call(
        "/token-classification",
        texts_of("token_classification", texts),
        read,
        model,
        aggregation_strategy=aggregation_strategy,
        words=words,
        label_set=label_set,
        stride=stride,
        long_text=long_text,
    )


def entities(
    texts: str | Sequence[str],
    labels: Sequence[str] | Mapping[str, str],
    *,
    threshold: float | None = None,
    flat_ner: bool | None = None,
    multi_label: bool | None = None,
    long_text: LongText | None = None,
    model: str | None = None,
) -> Call[list[list[NamedEntity]]]:
    """Return the entities of your own labels of each text, in their order.

    Args:
        labels: the labels, or a description of each, which the model reads in place of the label.
        threshold: score that entities exceed; None selects 0.5.
        flat_ner: whether entities share no words; else one may lie inside another.
        multi_label: whether a span may have several labels.
        long_text: whether to refuse, cut or divide a long text; None selects "truncate".
    """
    if isinstance(labels, Mapping):
        named: Any = dict(labels)
    else:
        named = words_of("entities", labels, "labels")
    return json_call(
        "/entities",
        texts_of("entities", texts),
        partial(results, NamedEntity),
        model,
        labels=named,
        threshold=threshold,
        flat_ner=flat_ner,
        multi_label=multi_label,
        long_text=long_text,
    )


def redact(
    texts: str | Sequence[str],
    *,
    labels: Sequence[str] | None = None,
    patterns: Sequence[str] | None = None,
    min_score: float | None = None,
    region: str | None = None,
    across_texts: bool | None = None,
    label_set: str | None = None,
    model: str | None = None,
) -> Call[list[Redaction]]:
    """Return each text with placeholders in the place of its entities.

    Args:
        labels: labels of the model to replace; None selects all.
        patterns: forms to replace besides, of EMAIL, PHONE, IBAN and CARD; None selects none.
        min_score: least score of an entity that is replaced.
        region: country of telephone numbers without +, in two letters.
        across_texts: whether a name has the same number in all texts of one request.
        label_set: one of the model's label sets; None selects the first.
    """

    def read(item: Mapping[str, Any]) -> Redaction:
        return Redaction(item["text"], results(Replacement, item["replacements"]))

    return json_call(
        "/redact",
        texts_of("redact", texts),
        read,
        model,
        labels=None if labels is None else words_of("redact", labels, "labels"),
        patterns=None if patterns is None else words_of("redact", patterns, "patterns"),
        min_score=min_score,
        region=region,
        across_texts=across_texts,
        label_set=label_set,
    )


def rerank(
    query: str,
    texts: str | Sequence[str],
    *,
    raw_scores: bool | None = None,
    model: str | None = None,
) -> Call[list[Rank]]:
    """Return the texts' ranks by relevance to a query, best first.

    Args:
        raw_scores: whether the scores of a classifier are its logits; None selects what the
            checkpoint declares.
        model: a served model; None selects a classifier with one label, or similarity.
    """
    query = one_text("rerank", "query", query)
    options = given(raw_scores=raw_scores, model=model)

    def body(part: Sequence[str]) -> Mapping[str, Any]:
        return {"query": query, "texts": part, **options}

    def read(response: httpx.Response, first: int) -> list[Rank]:
        return [Rank(first + rank["index"], rank["score"]) for rank in response.json()]

    def join(parts: list[list[Rank]]) -> list[Rank]:
        return sorted(chain(parts), key=lambda rank: -rank.score)

    return Call("/rerank", texts_of("rerank", texts), body, read, join)


def _per_mask(kind: type[R], values: list[Any]) -> list[list[R]]:
    """Return the predictions per mask; the server omits the outer list for one mask."""
    masks = values if values and isinstance(values[0], list) else [values]
    return [results(kind, predictions) for predictions in masks]
