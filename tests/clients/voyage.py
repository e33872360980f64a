"""Runs in an environment of its own: Voyage's client against a server.

Prints one JSON object: the vector of a text in each role, and the error of another role.
"""

import json
import sys

import voyageai

url, model, text = sys.argv[1:]
client = voyageai.Client(api_key="none", base_url=f"{url}/v1", max_retries=0)
found = {}
for role in (None, "query", "document"):
    [found[str(role)]] = client.embed([text], model=model, input_type=role).embeddings
[found["short"]] = client.embed([text], model=model, output_dimension=8).embeddings
try:
    client.embed([text], model=model, input_type="clustering")
except voyageai.error.VoyageError as error:
    found["error"] = str(error)

print(json.dumps(found))
