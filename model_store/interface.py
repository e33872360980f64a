"""The tensors that cross from a bundle's graph to the service: one name, shape and dtype each.

The trunk of a graph computes ``hidden [T, H]``, one row a real token. In the dense layout all sequences of a batch
have one length S, so ``T = B * S`` and token ``i`` of sequence ``b`` is row ``b * S + i``. In the packed layout they have any
lengths and lie one after the other: sequence ``b`` has the rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``. Every head first
gathers the rows it is asked for; a head asked for zero rows costs nothing. That is why one batch may mix all heads.

Inputs (a graph has those of its tasks only):

=============== ============== =====================================================================
``input_ids``        int32 [B, S]   vocabulary ids, ``[CLS]`` first
``token_type_ids``   int32 [B, S]   0 for the first text of a pair, 1 for the second; absent for DistilBERT
``mask_rows``        int32 [M]      fill-mask: the rows of ``hidden`` to predict
``top_k``            int64 [1]      fill-mask: K, how many predictions a mask
``target_masks``     int32 [N]      fill-mask: index into ``mask_rows`` of each asked-for logit
``target_ids``       int32 [N]      fill-mask: vocabulary id of each asked-for logit
``pair_rows``        int32 [P]      nsp: the rows of ``hidden`` that hold ``[CLS]``
``embed_sequences``  int32 [E]      embed: the sequences (0 to B - 1) to pool
=============== ============== =====================================================================

The packed layout (made by `model_store.packing`) has ``input_ids`` and ``token_type_ids`` as [T], no ``embed_sequences``, and:

=============== ============== =====================================================================
``position_ids``     int32 [T]      0 for the first token of each sequence
``cu_seqlens``       int32 [B + 1]  the row where each sequence starts, and T
``token_offset``     int32 [B, S]   the cells of a padded batch, S the longest length: first those of tokens, then the others
``pool_rows``        int32 [E, L]   embed: the rows of ``hidden`` that make each embedding
``pool_weights``     float32 [E, L] embed: how much each counts, 0 beyond its sequence; absent where the largest counts
=============== ============== =====================================================================

Outputs:

=============== ============== =====================================================================
``top_logits``       float32 [M, K] best first
``top_ids``          int64 [M, K]   their vocabulary ids
``logsumexp``        float32 [M]    over the whole vocabulary: ``score = exp(logit - logsumexp)``
``target_logits``    float32 [N]
``pair_logits``      float32 [P, 2] column 0 is "is next", column 1 "is not" (Devlin et al. 2019, section 3.1)
``embeddings``       float32 [E, D] pooled, not normalised
``span_logits``      float32 [T, 2] qa: start and end
=============== ============== =====================================================================
"""

from typing import Final

INPUT_IDS: Final = "input_ids"
TOKEN_TYPE_IDS: Final = "token_type_ids"
MASK_ROWS: Final = "mask_rows"
TOP_K: Final = "top_k"
TARGET_MASKS: Final = "target_masks"
TARGET_IDS: Final = "target_ids"
PAIR_ROWS: Final = "pair_rows"
EMBED_SEQUENCES: Final = "embed_sequences"

POSITION_IDS: Final = "position_ids"
CU_SEQLENS: Final = "cu_seqlens"
TOKEN_OFFSET: Final = "token_offset"
POOL_ROWS: Final = "pool_rows"
POOL_WEIGHTS: Final = "pool_weights"

TOP_LOGITS: Final = "top_logits"
TOP_IDS: Final = "top_ids"
LOGSUMEXP: Final = "logsumexp"
TARGET_LOGITS: Final = "target_logits"
PAIR_LOGITS: Final = "pair_logits"
EMBEDDINGS: Final = "embeddings"
SPAN_LOGITS: Final = "span_logits"
