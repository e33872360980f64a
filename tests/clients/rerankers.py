"""Runs in an environment of its own: clients that rerank, against a server.

Prints one JSON object: per client, the order of the documents and their scores, or its error.
"""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks another host

import cohere
import litellm
import voyageai
from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.rankers.cohere import CohereRanker
from haystack_integrations.components.rankers.jina import JinaRanker
from haystack_integrations.components.rankers.nvidia import NvidiaRanker
from infinity_client import Client
from infinity_client.api.default import classify, rerank
from infinity_client.models import ClassifyInput, RerankInput
from langchain_cohere import CohereRerank
from langchain_core.documents import Document as LangChainDocument
from langchain_nvidia_ai_endpoints import NVIDIARerank
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.postprocessor.cohere_rerank import CohereRerank as LlamaCohere
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from llama_index.postprocessor.nvidia_rerank import NVIDIARerank as LlamaNvidia
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

url, model, query, texts = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
key, v1 = Secret.from_token("none"), f"{url}/v1"


def with_cohere(client, **options):
    rows = client.rerank(model=model, query=query, documents=texts, **options).results
    return [[row.index, row.relevance_score] for row in rows]


def with_litellm(provider, address):
    answer = litellm.rerank(
        model=f"{provider}/{model}", query=query, documents=texts, api_base=address, api_key="none"
    )
    for row in answer.results:
        assert row["document"]["text"] == texts[row["index"]], row
    return [[row["index"], row["relevance_score"]] for row in answer.results]


def with_voyage(documents=texts):
    client = voyageai.Client(api_key="none", base_url=v1, max_retries=0)
    rows = client.rerank(query, documents, model=model).results
    return [[row.index, row.relevance_score] for row in rows]


def with_infinity():
    body = RerankInput(query=query, documents=texts, return_documents=True)
    rows = rerank.sync(client=Client(base_url=url), body=body).results
    assert [row.document for row in rows] == [texts[row.index] for row in rows]
    return [[row.index, row.relevance_score] for row in rows]


def with_haystack(ranker):
    getattr(ranker, "warm_up", lambda: None)()
    rows = ranker.run(query=query, documents=[Document(content=text) for text in texts])
    return [[texts.index(row.content), row.score] for row in rows["documents"]]


def with_llama(ranker):
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in texts]
    rows = ranker.postprocess_nodes(nodes, QueryBundle(query_str=query))
    return [[texts.index(row.node.text), row.score] for row in rows]


def with_langchain_cohere():
    client = cohere.ClientV2(api_key="none", base_url=url)
    ranker = CohereRerank(client=client, model=model, top_n=len(texts))
    rows = ranker.rerank([LangChainDocument(text) for text in texts], query)
    return [[row["index"], row["relevance_score"]] for row in rows]


def with_langchain_nvidia():
    ranker = NVIDIARerank(base_url=v1, model=model, api_key="none", top_n=len(texts))
    rows = ranker.compress_documents([LangChainDocument(text) for text in texts], query)
    return [[texts.index(row.page_content), row.metadata["relevance_score"]] for row in rows]


def infinity_labels():
    body = ClassifyInput(input_=[query], model="classes")
    [row] = classify.sync(client=Client(base_url=url), body=body).data
    return [[label.label, label.score] for label in row]


n = len(texts)
CALLS = {
    "cohere 1": lambda: with_cohere(cohere.Client(api_key="none", base_url=url)),
    "cohere 2": lambda: with_cohere(cohere.ClientV2(api_key="none", base_url=url), top_n=n),
    "voyage": with_voyage,
    "litellm cohere": lambda: with_litellm("cohere", url),
    "litellm jina": lambda: with_litellm("jina_ai", url),
    "litellm infinity": lambda: with_litellm("infinity", url),
    "litellm vllm": lambda: with_litellm("hosted_vllm", v1),
    "litellm huggingface": lambda: with_litellm("huggingface", url),
    "litellm voyage": lambda: with_litellm("voyage", v1),
    "infinity": with_infinity,
    "langchain cohere": with_langchain_cohere,
    "langchain nvidia": with_langchain_nvidia,
    "llama cohere": lambda: with_llama(
        LlamaCohere(api_key="none", base_url=url, model=model, top_n=n)
    ),
    "llama jina": lambda: with_llama(JinaRerank(api_key="none", base_url=v1, model=model, top_n=n)),
    "llama nvidia": lambda: with_llama(LlamaNvidia(base_url=v1, model=f"{model}@1", top_n=n)),
    "llama tei": lambda: with_llama(TextEmbeddingInference(base_url=url, top_n=n)),
    "haystack cohere": lambda: with_haystack(
        CohereRanker(api_key=key, api_base_url=url, model=model, top_k=n)
    ),
    "haystack jina": lambda: with_haystack(
        JinaRanker(api_key=key, model=model, base_url=f"{v1}/rerank")
    ),
    "haystack nvidia": lambda: with_haystack(
        NvidiaRanker(model=model, api_url=v1, api_key=key, top_k=n)
    ),
    "infinity labels": infinity_labels,
    "cohere error": lambda: with_cohere(cohere.ClientV2(api_key="none", base_url=url), top_n=-1),
    "voyage error": lambda: with_voyage([""]),
}
found = {}
for name, call in CALLS.items():
    try:
        found[name] = call()
    except Exception as error:
        found[name] = f"{type(error).__module__}.{type(error).__name__}: {str(error)[:300]}"
print(json.dumps(found))
