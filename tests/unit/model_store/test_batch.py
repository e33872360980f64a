"""Dense and packed batches: which row belongs to which token, and which head computes."""

import numpy as np

from cloze.model_store.batch import BatchCodec, Encoding, placement_of
from cloze.model_store.heads import GraphSpec, HeadRequest
from cloze.model_store.heads.head import Pooling
from cloze.model_store.heads.masked_lm import MaskedLMRequest
from cloze.model_store.layouts import Layout

HEADS = ("masked_lm", "next_sentence", "embedding")


def codec(layout: Layout = Layout.PACKED, *, token_types: bool = True) -> BatchCodec:
    return BatchCodec(GraphSpec(layout, HEADS, token_types, Pooling.MEAN))


def encoding(*ids: int, **requests: object) -> Encoding:
    array = np.array(ids, np.int32)
    return Encoding(array, array % 2, requests)


def test_a_packed_placement_counts_positions_per_sequence() -> None:
    feeds = placement_of(Layout.PACKED, [3, 1]).feeds()
    assert feeds["position_ids"].tolist() == [0, 1, 2, 0]
    assert feeds["cu_seqlens"].tolist() == [0, 3, 4]
    # The cells of the padded batch [2, 3]: those of tokens first, then the padding.
    assert feeds["token_offset"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert placement_of(Layout.PACKED, [1, 3]).feeds()["token_offset"].tolist() == [
        [0, 3, 4],
        [5, 1, 2],
    ]
    assert all(array.dtype == np.int32 for array in feeds.values())


def test_a_head_that_nobody_asks_gets_no_rows() -> None:
    for layout in Layout:
        made = codec(layout)
        asked = made.pack([encoding(5, 6, masked_lm=MaskedLMRequest([1], 2))])
        assert list(asked.requests) == ["masked_lm"]
        for head in made.heads:
            placement = placement_of(layout, [2])
            feeds = head.pack([None], placement, GraphSpec(layout, HEADS, True, Pooling.MEAN))
            for name, array in feeds.items():
                if head.name != "masked_lm":
                    assert asked.feeds[name].tolist() == array.tolist()
                    assert asked.feeds[name].dtype == array.dtype


def test_only_the_outputs_of_heads_that_are_asked_are_computed() -> None:
    masked = encoding(5, 6, masked_lm=MaskedLMRequest([1], 2))
    embedded = encoding(5, 6, embedding=HeadRequest())
    assert codec().pack([masked, embedded]).outputs == [
        "top_logits",
        "top_ids",
        "logsumexp",
        "target_logits",
        "embeddings",
    ]
    assert codec().pack([embedded]).outputs == ["embeddings"]
    assert len(codec().pack([encoding(1)]).outputs) == 6, "a batch that asks nothing: all outputs"
    assert [head.name for head in codec().heads] == list(HEADS)
