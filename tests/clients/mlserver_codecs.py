"""MLServer's codecs write the requests and read the answers: python mlserver_codecs.py URL TEXTS"""

import json
import sys
import urllib.request

from mlserver.codecs import Base64Codec, NumpyCodec, StringCodec
from mlserver.types import InferenceRequest, InferenceResponse

url, texts = sys.argv[1], json.loads(sys.argv[2])


def post(tensor, model):
    body = InferenceRequest(inputs=[tensor]).model_dump_json().encode()
    request = urllib.request.Request(f"{url}/v2/models/{model}/infer", body)
    with urllib.request.urlopen(request) as answer:
        response = InferenceResponse.model_validate_json(answer.read())
    return {output.name: output for output in response.outputs}


encoded = [text.encode() for text in texts]
tensors = {
    "str": StringCodec.encode_input("text", texts, use_bytes=False),
    "base64": Base64Codec.encode_input("text", encoded, use_bytes=False),
}
found = {
    name: NumpyCodec.decode_output(post(tensor, "cloze-bert.embed")["embedding"]).tolist()
    for name, tensor in tensors.items()
}
masked = StringCodec.encode_input("text", ["He opened the [MASK]."], use_bytes=False)
words = post(masked, "cloze-bert.fill-mask")["token_str"]
found["words"] = StringCodec.decode_output(words)
print(json.dumps(found))
