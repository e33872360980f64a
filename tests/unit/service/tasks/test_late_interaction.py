"""Late interaction: MaxSim by hand."""

import numpy as np

from cloze.model_store.heads.multi_vector import LateInteraction
from cloze.service.tasks import late_interaction


def test_scores_are_averaged_if_the_model_says_so() -> None:
    query = np.array([[1, 0], [0, 1]], np.float32)
    documents = [query, -query, query[:0]]
    options = LateInteraction(dimensions=2, query_tokens=8, document_tokens=8)
    assert late_interaction.scores(query, documents, options) == [2, 0, 0]
    averaged = options.model_copy(update={"averages": True})
    assert late_interaction.scores(query, documents, averaged) == [1, 0, 0]
