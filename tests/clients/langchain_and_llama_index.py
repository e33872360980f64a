"""Runs in an environment of its own: LangChain's and LlamaIndex's classes against a server.

Prints one JSON object: what each class returned, or the name of the exception that it raised.
"""

import asyncio
import json
import sys

from errors import name_of_error
from huggingface_hub import InferenceClient
from langchain_huggingface import HuggingFaceEndpointEmbeddings
from langchain_openai import OpenAIEmbeddings
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference as Reranker

url, model, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
query = texts[0]


openai = OpenAIEmbeddings(
    model=model,
    base_url=f"{url}/v1",
    api_key="none",
    check_embedding_ctx_length=False,  # otherwise it sends the ids of OpenAI's own tokenizer
    max_retries=0,
)
hub = HuggingFaceEndpointEmbeddings(model="any/name", huggingfacehub_api_token="none")
hub.client = InferenceClient(base_url=url)  # the class itself refuses an address
llama = TextEmbeddingsInference(model_name=model, base_url=url, timeout=30)
nodes = [NodeWithScore(node=TextNode(text=text)) for text in texts]
reranker = Reranker(base_url=url, top_n=len(texts))
ranked = reranker.postprocess_nodes(nodes, QueryBundle(query_str=query))

print(
    json.dumps(
        {
            "openai documents": openai.embed_documents(texts),
            "openai query": openai.embed_query(query),
            "openai asynchronous": asyncio.run(openai.aembed_query(query)),
            "openai error": name_of_error(lambda: openai.embed_query("")),
            "hub documents": hub.embed_documents(texts),
            "hub query": hub.embed_query(query),
            "hub error": name_of_error(lambda: hub.embed_query("")),
            "llama texts": llama.get_text_embedding_batch(texts),
            "llama query": llama.get_query_embedding(query),
            "llama asynchronous": asyncio.run(llama.aget_text_embedding(query)),
            "llama ranks": [[texts.index(node.node.text), node.score] for node in ranked],
        }
    )
)
