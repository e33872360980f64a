"""OpenAI's embeddings protocol: its released client reads our answers and our errors."""

import httpx
import numpy as np
import openai
import pytest

from tests.support.serving import Server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)


def test_the_client_gets_the_vectors_of_embed(server: Server, client: openai.OpenAI) -> None:
    """By base64, which it asks for unless told otherwise, and as floats."""
    texts = ["the king", "the moon was red"]
    expected = httpx.post(f"{server.url}/embed", json={"inputs": texts, "model": "bert"}).json()
    for options in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model="bert", input=texts, **options)
        assert [row.index for row in answer.data] == [0, 1]
        np.testing.assert_array_equal(
            np.float32([row.embedding for row in answer.data]), np.float32(expected)
        )
        assert answer.model == "bert"
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 4


def test_a_model_is_described(client: openai.OpenAI) -> None:
    assert client.models.retrieve("bert").id == "bert@1"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody")
    assert caught.value.code == "model_not_found"
