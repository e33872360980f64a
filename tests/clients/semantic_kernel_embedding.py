"""Semantic Kernel's embeddings: python semantic_kernel_embedding.py URL TEXTS"""

import asyncio
import json
import sys

from openai import AsyncOpenAI
from semantic_kernel.connectors.ai.open_ai import OpenAITextEmbedding

url, texts = sys.argv[1], json.loads(sys.argv[2])
client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
service = OpenAITextEmbedding(ai_model_id="cloze-bert", async_client=client)
vectors = asyncio.run(service.generate_embeddings(texts))
print(json.dumps({"vectors": vectors.tolist()}))
