"""KServe's client with version 2 of the protocol: python kserve_v2.py URL MODEL TEXTS"""

import asyncio
import json
import sys

import httpx
import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig
from kserve.protocol.infer_type import RequestedOutput

url, model, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])


def request(binary):
    tensor = InferInput("text", [len(texts)], "BYTES", parameters={"mine": 1})
    data = np.array([text.encode() for text in texts], dtype=object)
    tensor.set_data_from_numpy(data, binary_data=binary)
    asked = [RequestedOutput("embedding", {"binary_data": binary})]
    return InferRequest(
        model, [tensor], request_id="mine", parameters={"mine": 1}, request_outputs=asked
    )


async def main():
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        found = {
            "live": await client.is_server_live(url),
            "ready": await client.is_server_ready(url),
            "model ready": await client.is_model_ready(url, model),
            "unknown ready": await client.is_model_ready(url, "nobody"),
        }
        headers = {}
        for name, binary in (("json", False), ("binary", True)):
            answer = await client.infer(
                url, request(binary), model_name=model, response_headers=headers
            )
            assert answer.id == "mine"
            found[name] = answer.outputs[0].as_numpy().tolist()
        found["warning"] = headers["x-warning"]
        try:
            await client.infer(url, request(False), model_name="nobody")
        except httpx.HTTPStatusError as error:
            found["error"] = [error.response.status_code, str(error)]
    return found


print(json.dumps(asyncio.run(main())))
