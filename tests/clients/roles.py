"""Runs in an environment of its own: clients that name the roles of texts, against a server.

Prints one JSON object: per client, the vectors of a text as a query and as a document, and what the
client raised for a role or a text that the server refuses.
"""

import json
import sys

import cohere
import voyageai
from errors import error_of
from haystack.utils import Secret
from haystack_integrations.components.embedders.jina import JinaTextEmbedder
from langchain_nvidia_ai_endpoints import NVIDIAEmbeddings

url, model, text, long_text = sys.argv[1:]


def voyage_embed(text=text, **options):
    client = voyageai.Client(api_key="none", base_url=f"{url}/v1", max_retries=0)
    return client.embed([text], model=model, **options).embeddings[0]


def nvidia_embedder(**options):
    return NVIDIAEmbeddings(base_url=f"{url}/v1", model=model, api_key="none", **options)


def jina_embed(text=text, **options):
    key, address = Secret.from_token("none"), f"{url}/v1/embeddings"
    embedder = JinaTextEmbedder(api_key=key, model=model, base_url=address, **options)
    return embedder.run(text)["embedding"]


def cohere_embed(text=text, input_type="search_query", **options):
    client = cohere.ClientV2(api_key="none", base_url=url, max_retries=0)
    return client.embed(texts=[text], model=model, input_type=input_type, **options)


found = {
    "voyage": {
        "query": voyage_embed(input_type="query"),
        "document": voyage_embed(input_type="document"),
        "without": voyage_embed(),
        "short": voyage_embed(input_type="query", output_dimension=8),
        "unknown": error_of(lambda: voyage_embed(input_type="poetry")),
        "long": error_of(lambda: voyage_embed(long_text, truncation=False)),
    },
    "nvidia": {
        "query": nvidia_embedder().embed_query(text),
        "document": nvidia_embedder().embed_documents([text])[0],
        "short": nvidia_embedder(dimensions=8).embed_query(text),
        "cut": nvidia_embedder(truncate="START").embed_query(long_text),
        "long": error_of(lambda: nvidia_embedder().embed_query(long_text)),
    },
    "jina": {
        "query": jina_embed(task="retrieval.query"),
        "document": jina_embed(task="retrieval.passage"),
        "without": jina_embed(),
        "short": jina_embed(task="retrieval.query", dimensions=8),
        "unknown": error_of(lambda: jina_embed(task="poetry")),
    },
    "cohere": {
        "query": cohere_embed().embeddings.float_[0],
        "document": cohere_embed(input_type="search_document").embeddings.float_[0],
        "short": cohere_embed(output_dimension=8).embeddings.float_[0],
        "cut": cohere_embed(long_text, truncate="START").embeddings.float_[0],
        "unknown": error_of(lambda: cohere_embed(input_type="poetry")),
        "long": error_of(lambda: cohere_embed(long_text, truncate="NONE")),
    },
}
kinds = ["base64", "binary", "ubinary"]
given = [cohere.EmbedInput(content=[cohere.TextEmbedContent(text=text)])]
client = cohere.ClientV2(api_key="none", base_url=url, max_retries=0)
answer = client.embed(inputs=given, model=model, input_type="search_query", embedding_types=kinds)
found["cohere types"] = {kind: getattr(answer.embeddings, kind)[0] for kind in kinds}
found["cohere answer"] = [answer.texts, answer.meta.billed_units.input_tokens, answer.id]
print(json.dumps(found))
