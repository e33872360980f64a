"""KServe's client with version 1 of the protocol: python kserve_v1.py URL MODEL TEXTS"""

import asyncio
import json
import sys

import httpx
from kserve import InferenceRESTClient
from kserve.inference_client import RESTConfig

url, model, texts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])


async def main() -> dict[str, object]:
    async with InferenceRESTClient(RESTConfig(protocol="v1")) as client:
        found: dict[str, object] = {"ready": await client.is_model_ready(url, model)}
        found["live"] = await client.is_server_live(url)
        answer = await client.infer(url, {"instances": texts}, model_name=model)
        found["vectors"] = answer["predictions"]
        masked = {"instances": [{"inputs": "the [MASK]"}], "parameters": {"top_k": 2}}
        found["masks"] = (await client.infer(url, masked, model_name=model))["predictions"]
        for name, body in {model: {"instances": ["a", {}]}, "nobody": {"instances": texts}}.items():
            try:
                await client.infer(url, body, model_name=name)
            except httpx.HTTPStatusError as error:
                found[f"error of {name}"] = [error.response.status_code, str(error)]
    return found


print(json.dumps(asyncio.run(main())))
