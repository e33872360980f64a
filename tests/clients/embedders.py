"""Runs in an environment of its own: clients of Ollama, Cohere, Jina and others, against a server.

Prints one JSON object: the vectors that each client got for the texts, and what it says of models
and errors. Some clients accept their maker's names of models only, which are aliases of the server. The
environment has the address and the key for clients without such an option.
"""

import asyncio
import json
import sys

import chromadb.utils.embedding_functions as chroma
import cohere
import litellm
import ollama
from errors import error_of
from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.embedders.cohere import CohereDocumentEmbedder
from haystack_integrations.components.embedders.jina import JinaDocumentEmbedder
from haystack_integrations.components.embedders.ollama import OllamaDocumentEmbedder
from langchain_cohere import CohereEmbeddings
from langchain_ollama import OllamaEmbeddings
from llama_index.embeddings.cohere import CohereEmbedding
from llama_index.embeddings.jinaai import JinaEmbedding
from llama_index.embeddings.nvidia import NVIDIAEmbedding
from llama_index.embeddings.ollama import OllamaEmbedding
from llama_index.embeddings.openai import OpenAIEmbedding
from mistralai.client import Mistral

url, texts = sys.argv[1], json.loads(sys.argv[2])
MODEL, COHERE = "an/alias:v1", "embed-english-v3.0"
JINA = f"{url}/v1/embeddings"
key, documents = Secret.from_token("none"), [Document(content=text) for text in texts]


def haystack(embedder):
    return [document.embedding for document in embedder.run(documents)["documents"]]


def chroma_vectors(function):
    return [vector.tolist() for vector in function(texts)]


def at_jina(client, **options):
    """Return a client of Jina, whose address has no option."""
    if client is JinaEmbedding:
        made = client(api_key="none", model=MODEL, **options)
        made._api.api_url = JINA
    else:
        made = client(api_key="none", model_name=MODEL, **options)
        made._api_url = JINA
    return made


def litellm_vectors(model, base, **options):
    answer = litellm.embedding(model, texts, api_base=base, api_key="none", **options)
    return [row["embedding"] for row in answer.data]


mistral, client = Mistral(api_key="none", server_url=url), ollama.Client(url)
version_1 = cohere.Client("none", base_url=url)
task = {"task": "text-matching"}
vectors = {
    "mistral": [row.embedding for row in mistral.embeddings.create(model=MODEL, inputs=texts).data],
    "ollama": client.embed(MODEL, texts, options={"num_ctx": 8}, keep_alive="5m").embeddings,
    "ollama asynchronous": asyncio.run(ollama.AsyncClient(url).embed(MODEL, texts)).embeddings,
    "ollama older": [client.embeddings("bert:latest", text).embedding for text in texts],
    "cohere version 1": version_1.embed(
        texts=texts, model=COHERE, input_type="clustering"
    ).embeddings,
    "langchain ollama": OllamaEmbeddings(
        model="bert", base_url=url, validate_model_on_init=True
    ).embed_documents(texts),
    "langchain cohere": CohereEmbeddings(
        model=MODEL, cohere_api_key="none", base_url=url
    ).embed_documents(texts),
    "haystack jina": haystack(JinaDocumentEmbedder(key, MODEL, base_url=JINA, **task)),
    "haystack cohere": haystack(CohereDocumentEmbedder(key, MODEL, api_base_url=url)),
    "haystack ollama": haystack(OllamaDocumentEmbedder(MODEL, url)),
    "chroma openai": chroma_vectors(
        chroma.OpenAIEmbeddingFunction(api_key="none", api_base=f"{url}/v1", model_name=MODEL)
    ),
    "chroma cohere": chroma_vectors(chroma.CohereEmbeddingFunction(model_name=MODEL)),
    "chroma jina": chroma_vectors(at_jina(chroma.JinaEmbeddingFunction, **task)),
    "chroma ollama": chroma_vectors(chroma.OllamaEmbeddingFunction(url, MODEL)),
    "chroma hugging face": chroma_vectors(chroma.HuggingFaceEmbeddingServer(f"{url}/embed")),
    "litellm openai": litellm_vectors(f"openai/{MODEL}", f"{url}/v1"),
    "litellm cohere": litellm_vectors(f"cohere/{MODEL}", f"{url}/v1/embed"),
    "litellm ollama": litellm_vectors(f"ollama/{MODEL}", url),
    "litellm jina": litellm_vectors(f"jina_ai/{MODEL}", f"{url}/v1"),
}
llama = {
    "openai": OpenAIEmbedding(model_name=MODEL, api_base=f"{url}/v1", api_key="none"),
    "cohere": CohereEmbedding(model_name=COHERE, api_key="none", base_url=url),
    "jina": at_jina(JinaEmbedding, **task),
    "nvidia": NVIDIAEmbedding(base_url=f"{url}/v1", api_key="none", model="bert"),
    "ollama": OllamaEmbedding(MODEL, url),
}
for name, embedder in llama.items():
    vectors[f"llama {name}"] = embedder.get_text_embedding_batch(texts)
found = {
    "vectors": vectors,
    "late": [
        at_jina(JinaEmbedding, late_chunking=True).get_text_embedding_batch(texts),
        haystack(JinaDocumentEmbedder(key, MODEL, base_url=JINA, late_chunking=True)),
    ],
    "signs": at_jina(JinaEmbedding, encoding_documents="binary").get_text_embedding_batch(texts),
    "listed": [model.model for model in client.list().models],
    "shown": client.show("bert:latest").capabilities,
    "errors": [
        error_of(lambda: client.embed("nobody", texts)),
        error_of(lambda: client.chat("bert", [])),
        error_of(lambda: version_1.embed(images=["data:"], model=COHERE, input_type="image")),
        error_of(lambda: mistral.embeddings.create(model="nobody", inputs=texts)),
    ],
}
print(json.dumps(found, default=list))
