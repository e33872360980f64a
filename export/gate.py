"""Whether a graph of lower precision may stand in for its checkpoint: both run on the same texts, and what differs is bounded.

Parity (`export.verify`) asks whether a graph computes what its precision should; the gate asks whether that is good enough.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from tokenizers import Tokenizer

from export.checkpoint import Checkpoint
from export.errors import ExportError
from export.gate_texts import QUESTIONS, SENTENCES
from export.scorers import Ids, Scorer
from export.train.sentences import ScoredPair, similarity
from model_store.manifest import Gate, Task

LIMITS: Mapping[str, float] = {
    "embedding_cosine_mean": 0.995,
    "embedding_cosine_least": 0.98,
    "sts_spearman_change": -0.003,
    "fill_mask_top1_agreement": 0.95,
    "nsp_agreement": 0.95,
    "qa_span_agreement": 0.95,
}
"""What each figure must reach."""

_PAIR_TOKENS = 128


def pass_gate(
    original: Scorer,
    graph: Scorer,
    title: str,
    checkpoint: Checkpoint,
    tasks: Sequence[Task],
    max_tokens: int,
    pairs: Sequence[ScoredPair] = (),
) -> Gate:
    """Compare a checkpoint as it came with a graph of it.

    Args:
        original: the checkpoint.
        graph: of lower precision, or of rounded weights.
        title: the graph's, for the error.
        checkpoint: whose tokenizer reads the texts.
        tasks: those that the graph was written for.
        max_tokens: the longest sequence.
        pairs: sentences with scores of their likeness, to rank (STS-B); none: that is not measured.

    Returns:
        What was measured.

    Raises:
        ExportError: a figure is under its limit, or is no number.
    """
    texts = _Texts(checkpoint, max_tokens)
    both = (original, graph)
    measured: dict[str, float] = {}
    if Task.EMBED in tasks:
        measured |= _embeddings(both, texts)
    if Task.EMBED in tasks and pairs:
        tokens = min(_PAIR_TOKENS, max_tokens)
        one, other = (similarity(pairs, checkpoint.tokenizer.tokenizer, scorer, tokens) for scorer in both)
        measured["sts_spearman_change"] = other - one
    if Task.FILL_MASK in tasks:
        assert checkpoint.tokenizer.mask_id is not None
        measured["fill_mask_top1_agreement"] = _fill_mask(both, texts, checkpoint.tokenizer.mask_id)
    if Task.NSP in tasks:
        measured["nsp_agreement"] = _next_sentence(both, texts)
    if Task.QA in tasks:
        measured["qa_span_agreement"] = _spans(both, texts)
    for name, value in measured.items():
        if not value >= LIMITS[name]:  # nor is NaN
            raise ExportError(
                f"the {title} loses too much of this checkpoint: {name} is {value:.4f} and must be {LIMITS[name]}; "
                "keep it, or its weights, in a higher precision"
            )
    return Gate(measured=measured, limits={name: LIMITS[name] for name in measured})


class _Texts:
    """Texts as a checkpoint reads them, cut to its limit."""

    def __init__(self, checkpoint: Checkpoint, max_tokens: int) -> None:
        self._tokenizer = Tokenizer.from_str(checkpoint.tokenizer.tokenizer.to_str())
        self._tokenizer.enable_truncation(max_tokens)
        self._largest_type = max(0, checkpoint.model.config.type_vocab_size - 1)

    def sentences(self) -> list[Ids]:
        """[1, S] each."""
        return [np.asarray([encoding.ids], np.int64) for encoding in self._tokenizer.encode_batch(list(SENTENCES))]

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[Ids, Ids]]:
        """Ids and token types, [1, S] each."""
        for encoding in self._tokenizer.encode_batch(list(pairs)):
            types = np.minimum(np.asarray([encoding.type_ids], np.int64), self._largest_type)
            yield np.asarray([encoding.ids], np.int64), types


def _embeddings(both: Sequence[Scorer], texts: _Texts) -> dict[str, float]:
    cosines = []
    for ids in texts.sentences():
        one, other = (scorer.embed(ids)[0] for scorer in both)
        with np.errstate(invalid="ignore"):  # of a vector of zeros: no number, which does not pass
            cosines.append((one @ other) / (np.linalg.norm(one) * np.linalg.norm(other)))
    return {"embedding_cosine_mean": float(np.mean(cosines)), "embedding_cosine_least": float(np.min(cosines))}


def _fill_mask(both: Sequence[Scorer], texts: _Texts, mask_id: int) -> float:
    """The share of tokens, each masked alone, whose first prediction is the same."""
    same, count = 0, 0
    for ids in texts.sentences():
        inner = np.arange(1, ids.shape[1] - 1)
        rows = np.repeat(ids, len(inner), 0)  # [n, S], in row i token i + 1 is masked
        rows[np.arange(len(inner)), inner] = mask_id
        positions = np.arange(len(inner)) * ids.shape[1] + inner
        best = [scorer.masked(rows, np.zeros_like(rows), positions, ids[0, inner], 1)[0][:, 0] for scorer in both]
        same, count = same + int((best[0] == best[1]).sum()), count + len(inner)
    return same / count


def _next_sentence(both: Sequence[Scorer], texts: _Texts) -> float:
    """The share of pairs, true neighbours and others, that get the same label."""
    pairs = [(SENTENCES[i], SENTENCES[(i + step) % len(SENTENCES)]) for i in range(len(SENTENCES)) for step in (1, 7)]
    pairs += [(context[:half], context[half:]) for _, context in QUESTIONS for half in (len(context) // 2,)]
    labels = [[scorer.next_sentence(ids, types).argmax() for scorer in both] for ids, types in texts.pairs(pairs)]
    return float(np.mean([one == other for one, other in labels]))


def _spans(both: Sequence[Scorer], texts: _Texts) -> float:
    """The share of questions, each asked of each context, whose best start and end are the same."""
    pairs = [(question, context) for question, _ in QUESTIONS for _, context in QUESTIONS]
    best = [[scorer.spans(ids, types)[0].argmax(0) for scorer in both] for ids, types in texts.pairs(pairs)]  # [2] each
    return float(np.mean([bool((one == other).all()) for one, other in best]))
