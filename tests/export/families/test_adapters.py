"""Graphs with adapters of every family, on all linear layers, beside torch with merged weights."""

from pathlib import Path
from typing import Any

import pytest

from cloze.export.adapters import ALL_LAYERS, AdaptedModel
from cloze.export.check.verify import TOLERANCES, GraphUnderTest
from cloze.export.errors import ExportError
from cloze.export.graph.session import open_session
from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.model import GraphWriter
from tests.support.family_checkpoints import OWN

REFUSED = {"deberta-v2"}
"""Families whose graphs have constants that depend on queries and keys."""


@pytest.mark.parametrize("family", OWN)
def test_a_graph_with_adapters_computes_what_torch_does(
    family: str, built: Any, tmp_path: Path
) -> None:
    _, checkpoint, _ = built(family)
    adapted = AdaptedModel.of(checkpoint.model, [ALL_LAYERS])
    writer = GraphWriter(checkpoint.model, EmbeddingRecipe(), checkpoint.heads, tmp_path)
    graph = writer.write(adapted=adapted.numbers)
    session = open_session(tmp_path / graph.file, graph.layout)
    spec = GraphUnderTest(graph, checkpoint, checkpoint.heads, 32).spec
    if family in REFUSED:
        with pytest.raises(ExportError, match=f"a {family} with adapters .* leave out --adapters"):
            adapted.verify(session, spec, TOLERANCES[graph.precision])
    else:
        assert adapted.verify(session, spec, TOLERANCES[graph.precision]) < 1e-5
