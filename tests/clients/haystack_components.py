"""Runs in an environment of its own: Haystack's components against a server.

Prints one JSON object: what each component returned, or the name of the exception that it raised.
"""

import json
import sys

from errors import name_of_error
from haystack import Document
from haystack_integrations.components.embedders.huggingface_api import (
    HuggingFaceAPIDocumentEmbedder,
    HuggingFaceAPITextEmbedder,
)
from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

url, texts = sys.argv[1], json.loads(sys.argv[2])
query, documents = texts[0], [Document(content=text) for text in texts]


server = {
    "api_type": "text_embeddings_inference",
    "api_params": {"url": url},
    "token": None,
    "normalize": True,
}
embedder = HuggingFaceAPITextEmbedder(**server)
document_embedder = HuggingFaceAPIDocumentEmbedder(**server, progress_bar=False)
ranker = HuggingFaceTEIRanker(url=url, token=None)
ranked = ranker.run(query=query, documents=documents)["documents"]

print(
    json.dumps(
        {
            "text": embedder.run(text=query)["embedding"],
            "documents": [d.embedding for d in document_embedder.run(documents)["documents"]],
            "error": name_of_error(lambda: embedder.run(text="")),
            "ranks": [[texts.index(document.content), document.score] for document in ranked],
            "rank error": name_of_error(lambda: ranker.run(query="", documents=documents)),
        }
    )
)
