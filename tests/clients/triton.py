"""Runs in an environment of its own: Triton's HTTP client against a server.

Prints one JSON object: what the client found, in JSON and in the binary extension.
"""

import json
import sys

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

address, texts = sys.argv[1], json.loads(sys.argv[2])
client = triton.InferenceServerClient(address)


def tensor(name, values, binary):
    data = np.array([value.encode() for value in values], dtype=object)
    made = triton.InferInput(name, [len(values)], "BYTES")
    made.set_data_from_numpy(data, binary_data=binary)
    return made


def embed(binary, **options):
    asked = [triton.InferRequestedOutput("embedding", binary_data=binary)]
    inputs = [tensor("text", texts, binary)]
    answer = client.infer("bert.embed", inputs, outputs=asked, request_id="mine", **options)
    assert answer.get_response()["id"] == "mine"
    return answer.as_numpy("embedding").tolist()


def columns(model, binary, *inputs, **options):
    inputs = [tensor(name, values, binary) for name, values in inputs]
    answer = client.infer(model, inputs, **options)
    names = [output["name"] for output in answer.get_response()["outputs"]]
    return {name: show(answer.as_numpy(name)) for name in names}


def classes():
    inputs = [tensor("text", texts, True), tensor("next", texts, True)]
    asked = [triton.InferRequestedOutput("score", class_count=1)]
    options = {"timeout": 20_000_000, "priority": 1, "sequence_id": 7, "sequence_start": True}
    answer = client.infer("bert.nsp", inputs, outputs=asked, **options)
    return [row.decode() for row in answer.as_numpy("score").ravel()]


def show(array):
    return [item.decode() if isinstance(item, bytes) else item for item in array.tolist()]


def message_of_error():
    try:
        client.infer("bert.nothing", [tensor("text", texts, True)])
    except InferenceServerException as error:
        return [error.status(), error.message()]


pair = (("question", ["who?"]), ("context", ["the king"]))
print(
    json.dumps(
        {
            "live": client.is_server_live(),
            "ready": client.is_server_ready(),
            "model ready": client.is_model_ready("bert.embed", "1"),
            "unknown ready": client.is_model_ready("bert.nothing"),
            "server": client.get_server_metadata(),
            "model": client.get_model_metadata("bert-qa.qa"),
            "binary": embed(True),
            "json": embed(False),
            "compressed": embed(True, request_compression_algorithm="gzip"),
            "version": embed(True, model_version="1"),
            "qa": columns("bert-qa.qa", True, *pair),
            "fill-mask": columns(
                "bert.fill-mask",
                False,
                ("text", ["the [MASK]", "a [MASK] and a [MASK]"]),
                parameters={"top_k": 2},
            ),
            "classes": classes(),
            "error": message_of_error(),
        }
    )
)
