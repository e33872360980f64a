"""The figures of the quality gate: each head's, from models that differ in a known way."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cloze.export.check.verify import pass_gate
from cloze.export.errors import ExportError
from cloze.export.heads import EXPORT_HEADS
from cloze.export.measure.pairs import ScoredPair
from cloze.model_store.batch import Encoding
from cloze.model_store.heads import ArrayResult
from cloze.model_store.heads.label_sets import read_labels
from cloze.model_store.heads.masked_lm import MaskedLMResult
from cloze.model_store.heads.sequence_classification import read_options
from cloze.model_store.heads.sparse_embedding import SparseEmbeddingResult
from tests.support.scorers import CLS, MASK, SEP, ByHand, gate_texts

TEXTS = gate_texts(max_tokens=64)
COUNT = len(TEXTS.sentences())


def measured(
    name: str,
    checkpoint: Callable[[Encoding], Any],
    graph: Callable[[Encoding], Any],
    **changes: Any,
) -> dict[str, float]:
    """Return the figures of a head for two models; a function gives an encoding's result."""
    texts = gate_texts(max_tokens=64, **changes)
    scorers = [ByHand(lambda e, r=result: {name: r(e)}) for result in (checkpoint, graph)]
    return EXPORT_HEADS[name].measure(*scorers, texts)


def first_of(result: Callable[[bool], Any]) -> Callable[[Encoding], Any]:
    """Return a model whose answer to the first text differs."""
    seen: list[int] = []

    def answer(_: Encoding) -> Any:
        seen.append(1)
        return result(len(seen) == 1)

    return answer


def row(*numbers: float, shape: tuple[int, ...] = (-1,)) -> ArrayResult:
    return ArrayResult(np.array(numbers, np.float32).reshape(shape))


def test_one_bad_text_among_good_ones_shows_in_the_least_cosine() -> None:
    other = first_of(lambda first: row(0.6, 0.8) if first else row(2, 0))
    figures = measured("embedding", lambda _: row(3, 0), other)
    assert figures == {
        "embedding_cosine_least": pytest.approx(0.6),
        "embedding_cosine_mean": pytest.approx((COUNT - 1 + 0.6) / COUNT),
    }


def test_a_vector_of_zeros_is_no_number() -> None:
    figures = measured("embedding", lambda _: row(1, 0), lambda _: row(0, 0))
    assert np.isnan(list(figures.values())).all()


def test_sparse_vectors_are_compared_by_their_words() -> None:
    def weights(*numbers: float, ids: tuple[int, ...]) -> SparseEmbeddingResult:
        return SparseEmbeddingResult(np.array(numbers, np.float32), np.array(ids, np.int64))

    both, none = weights(4, 3, ids=(2, 1)), weights(ids=())
    for other, cosine in ((both, 1), (weights(2, ids=(1,)), 0.6), (none, 0)):
        figures = measured("sparse_embedding", lambda _: both, lambda _, one=other: one)
        assert figures == {"sparse_cosine_mean": pytest.approx(cosine)}
    assert measured("sparse_embedding", lambda _: none, lambda _: none) == {"sparse_cosine_mean": 1}


def test_the_change_of_a_ranking_is_after_less_before() -> None:
    scored = [
        ScoredPair("a", "b b", 3.0),
        ScoredPair("a", "c c c", 2.0),
        ScoredPair("a", "d d d d", 1.0),
    ]

    def of(sign: float) -> Callable[[Encoding], Any]:
        return lambda e: row(np.cos(sign * len(e) / 9), np.sin(sign * len(e) / 9))

    def opposed(encoding: Encoding) -> ArrayResult:
        turn = {3: 0.0, 4: 0.9, 5: 0.5, 6: 0.1}[min(len(encoding), 6)]
        return row(np.cos(turn), np.sin(turn))

    figures = measured("embedding", of(1), opposed, scored_pairs=scored)
    assert figures["sts_spearman_change"] == pytest.approx(-2)
    assert "sts_spearman_change" not in measured("embedding", of(1), of(1))


def test_every_token_is_masked_alone() -> None:
    def predict(wrong: int) -> Callable[[Encoding], Any]:
        def answer(encoding: Encoding) -> MaskedLMResult:
            (position,) = encoding.requests["masked_lm"].positions  # type: ignore[attr-defined]
            ids = encoding.input_ids.tolist()
            assert ids[position] == MASK
            assert ids.count(MASK) == 1
            assert (ids[0], ids[-1]) == (CLS, SEP)
            token = wrong if position == 1 else 5
            one = np.zeros((1, 1), np.float32)
            return MaskedLMResult(one, np.array([[token]]), one[0], one)

        return answer

    tokens = sum(len(ids) - 2 for ids, _ in TEXTS.sentences())
    figures = measured("masked_lm", predict(5), predict(6))
    assert figures == {"fill_mask_top1_agreement": pytest.approx(1 - COUNT / tokens)}


@pytest.mark.parametrize(
    ("head", "figure", "same", "wrong", "count"),
    [
        ("next_sentence", "nsp_agreement", row(2, 1), row(0, 1), len(TEXTS.sentence_pairs())),
        ("sequence_classification", "text_classification_agreement", row(1, 2), row(5, 1),
         COUNT + len(TEXTS.sentence_pairs())),
        *(
            ("span", "qa_span_agreement", row(0, 0, 1, 0, 0, 1, shape=(3, 2)), wrong, len(TEXTS.questions()))
            for wrong in (row(1, 0, 0, 0, 0, 1, shape=(3, 2)), row(0, 0, 1, 1, 0, 0, shape=(3, 2)))
        ),
    ],
)  # fmt: skip
def test_answers_agree(
    head: str, figure: str, same: ArrayResult, wrong: ArrayResult, count: int
) -> None:
    """Of a span, the start and the end."""
    other = first_of(lambda first: wrong if first else same)
    assert measured(head, lambda _: same, other) == {figure: pytest.approx(1 - 1 / count)}


def test_a_single_logit_agrees_within_a_twentieth_of_the_spread() -> None:
    texts = COUNT + len(TEXTS.sentence_pairs())
    for spread, near, far in ((10.0, 0.49, 0.51), (0.5, 0.049, 0.051)):
        for off, expected in ((near, 1.0), (far, 1 / texts)):
            checkpoint = first_of(lambda first, s=spread: row(s if first else 0.0))
            graph = first_of(lambda first, s=spread, o=off: row(s if first else o))
            figures = measured("sequence_classification", checkpoint, graph)
            assert figures["text_classification_agreement"] == pytest.approx(expected)


def test_labels_of_tokens_agree() -> None:
    def of(wrong: int) -> Callable[[Encoding], Any]:
        def answer(encoding: Encoding) -> ArrayResult:
            logits = np.zeros((len(encoding), 2), np.float32)
            logits[:, 0] = 1
            logits[:wrong, 1] = 2
            return ArrayResult(logits)

        return answer

    tokens = sum(len(ids) for ids, _ in TEXTS.sentences())
    figures = measured("token_classification", of(0), of(1))
    assert figures == {"token_classification_agreement": pytest.approx(1 - COUNT / tokens)}


@pytest.mark.parametrize(("head", "mean"), [("token_embedding", 0.8), ("layer_embedding", 0.6)])
def test_mean_cosines_of_hidden_states(head: str, mean: float) -> None:
    """The first of two states differs; of layers, the figure is that of the worst."""
    one, other = row(1, 0, 0, 2, shape=(2, 2)), row(6, 8, 0, 2, shape=(2, 2))
    figures = measured(head, lambda _: one, lambda _: other)
    assert figures == {f"{head}_cosine_mean": pytest.approx(mean)}


def test_labels_of_a_configuration() -> None:
    assert read_labels({"id2label": {"1": "b", "0": "a"}}) == ("a", "b")
    assert read_labels({}) == ("LABEL_0", "LABEL_1")
    assert read_labels({"num_labels": 3}) == ("LABEL_0", "LABEL_1", "LABEL_2")
    for wrong in ({"1": "a"}, {"0": "a", "2": "b"}, {"x": "a"}, ["a"], {}):
        with pytest.raises(ValueError, match="id2label must name the labels 0 to N - 1"):
            read_labels({"id2label": wrong})


IDENTITY = "torch.nn.modules.linear.Identity"
SIGMOID = "torch.nn.modules.activation.Sigmoid"


def test_a_reranker_s_scores_are_raw_if_it_says_so() -> None:
    def raw(**settings: Any) -> bool | None:
        options = read_options({"num_labels": 1} | settings)
        return options.raw_scores

    older = {"sbert_ce_default_activation_function": IDENTITY}
    assert raw() is None
    assert raw(**older) is True
    assert raw(sentence_transformers={"activation_fn": IDENTITY}) is True
    assert raw(**older, sentence_transformers={"activation_fn": SIGMOID}) is None
    assert raw(**older, sentence_transformers={"version": "4.0"}) is True
    assert raw(sentence_transformers={"activation_fn": "mine.Tanh"}) is None, "it is never loaded"
    assert raw(**older, sentence_transformers=[5]) is True
    with pytest.raises(ValueError, match=r"activation torch.nn.Tanh is not supported"):
        raw(sentence_transformers={"activation_fn": "torch.nn.Tanh"})
    assert read_options(older).raw_scores is None, "a classifier of two labels ranks nothing"


def test_the_problem_type_follows_from_the_labels() -> None:
    assert read_options({}).problem_type == "single_label_classification"
    assert read_options({"num_labels": 1}).problem_type == "multi_label_classification"
    one = {"num_labels": 1, "problem_type": "single_label_classification"}
    assert read_options(one).problem_type == "multi_label_classification", "not 1.0 for every text"
    assert read_options({"problem_type": "regression"}).problem_type == "regression"
    with pytest.raises(ValueError, match="problem_type 'x' is not supported"):
        read_options({"problem_type": "x"})


def passed(cosine: float) -> Any:
    name = "token_embedding"
    turned = np.array([[cosine, (1 - cosine**2) ** 0.5]], np.float32)
    heads = [EXPORT_HEADS[name].head]
    scorers = [
        ByHand(lambda _, rows=rows: {name: ArrayResult(rows)})
        for rows in (np.array([[1, 0]], np.float32), turned)
    ]
    return pass_gate(*scorers, "int8 graph", heads, TEXTS)


def test_a_gate_measures_the_heads_of_the_graph() -> None:
    gate = passed(0.99)
    assert gate.measured == {"token_embedding_cosine_mean": pytest.approx(0.99)}
    assert gate.limits == {"token_embedding_cosine_mean": 0.98}
    with pytest.raises(
        ExportError, match="the int8 graph loses too much of this checkpoint: token_"
    ):
        passed(0.97)
    with pytest.raises(ExportError, match="cosine_mean is nan and must be at least"):
        passed(float("nan"))
