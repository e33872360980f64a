"""The Python client: one method per task, numpy results, retries, and long lists in batches.

    from cloze.client import Client

    with Client("http://localhost:8000") as client:
        vectors = client.embed(["What is deep learning?", "A cat sat."])

`AsyncClient` has the same methods as coroutines. The distribution ``cloze-client``
has this package alone; ``cloze-server`` depends on it.
"""

from cloze.client.clients import AsyncClient, Client
from cloze.client.errors import (
    ClientError,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServerUnreachable,
)
from cloze.client.results import (
    Answer,
    Entity,
    Filling,
    Label,
    NamedEntity,
    Prediction,
    Rank,
    Redaction,
    Replacement,
    Score,
    ScoredToken,
    SparseVectors,
    Vectors,
    Word,
    WordPrediction,
)

__all__ = [
    "Answer",
    "AsyncClient",
    "Client",
    "ClientError",
    "Entity",
    "Filling",
    "Label",
    "NamedEntity",
    "Prediction",
    "Rank",
    "Redaction",
    "Replacement",
    "RequestRefused",
    "Score",
    "ScoredToken",
    "ServerBusy",
    "ServerFailed",
    "ServerUnreachable",
    "SparseVectors",
    "Vectors",
    "Word",
    "WordPrediction",
]
