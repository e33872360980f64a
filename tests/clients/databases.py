"""Databases with vectors of a server: python databases.py URL TEXTS"""

import json
import sys

import chromadb
import httpx
from chromadb.utils.embedding_functions import HuggingFaceEmbeddingServer
from qdrant_client import QdrantClient
from qdrant_client.models import Distance, PointStruct, VectorParams

url, texts = sys.argv[1], json.loads(sys.argv[2])


def embed(*inputs):
    body = {"model": "cloze-bert", "input": inputs, "encoding_format": "float"}
    answer = httpx.post(f"{url}/v1/embeddings", json=body).raise_for_status()
    return [row["embedding"] for row in answer.json()["data"]]


vectors = embed(*texts)
qdrant = QdrantClient(":memory:")
size = VectorParams(size=len(vectors[0]), distance=Distance.COSINE)
qdrant.create_collection("articles", size)
points = [PointStruct(id=number, vector=vector) for number, vector in enumerate(vectors)]
qdrant.upsert("articles", points)
nearest = qdrant.query_points("articles", query=embed(texts[1])[0], limit=len(texts)).points

function = HuggingFaceEmbeddingServer(url=f"{url}/embed")
articles = chromadb.EphemeralClient().create_collection("articles", embedding_function=function)
articles.add(ids=[str(number) for number in range(len(texts))], documents=texts)
chosen = articles.query(query_texts=[texts[1]], n_results=len(texts))

print(
    json.dumps(
        {
            "qdrant": [[point.id, point.score] for point in nearest],
            "chroma": [int(number) for number in chosen["ids"][0]],
        }
    )
)
