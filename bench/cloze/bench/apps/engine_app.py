"""An engine as a process that ``cloze bench engines`` measures.

    python engine_app.py FOLDER ENGINE THREADS

FOLDER is a Hugging Face folder; what the engine converts stays there. In the environment of another
engine, this file does not import this package. Vectors are means over all tokens of a text.
"""

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

Embed = Callable[[Any], Any]
"""Token ids [B, S] int64 -> vectors [B, H] float32."""

_PART_TOKENS = 512
"""Most tokens of a batch on a server of ours; larger batches do not fit the caches."""


def answer_lines(embed: Embed, vocabulary: int) -> None:
    """Answer requests, one JSON object per line, until the input ends.

    The answer to ``shape`` [B, S] and ``seconds`` is the ms of one run. The answer to ``ids``, a
    file with lists of token ids, is their number; their vectors [N, H] are written to ``out``.
    """
    output, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    print("ready", file=output, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = _milliseconds if "shape" in request else _write_vectors
        print(answer(embed, vocabulary, **request), file=output, flush=True)


def _milliseconds(embed: Embed, vocabulary: int, shape: list[int], seconds: float) -> float:
    """Return the time of a batch as a whole, or in parts of `_PART_TOKENS` if that is less."""
    ids = np.random.default_rng(0).integers(vocabulary // 30, vocabulary, shape)
    parts = _cut(ids, max(1, _PART_TOKENS // shape[1]))
    whole = _duration_ms(embed, [ids], seconds)
    return min(whole, _duration_ms(embed, parts, seconds)) if len(parts) > 1 else whole


def _cut(ids: Any, texts: int) -> list[Any]:
    """Return parts of a batch, each of at most so many texts."""
    return [ids[first : first + texts] for first in range(0, len(ids), texts)]


def _duration_ms(embed: Embed, batches: list[Any], seconds: float) -> float:
    begin, runs = time.perf_counter(), 0
    while not runs or time.perf_counter() - begin < seconds:
        for batch in batches:
            embed(batch)
        runs += 1
    return (time.perf_counter() - begin) / runs * 1000


def _write_vectors(embed: Embed, _: int, ids: str, out: str) -> int:
    vectors = [embed(np.array([each]))[0] for each in json.loads(Path(ids).read_text())]
    np.save(out, np.array(vectors, np.float32))
    return len(vectors)


def _cloze(folder: Path, precision: str, threads: int) -> Embed:
    """Open a graph of the bundle that ``bundle.json`` names, and run it as a server does.

    One text runs on all threads. Several texts are shared by as many callers with one thread each.
    """
    from cloze.model_store import Store
    from cloze.model_store.batch import BatchCodec, Encoding, PackedBatch
    from cloze.model_store.heads import HeadRequest
    from cloze.model_store.manifest import Precision
    from cloze.service.engine.session import CpuSession, cpu_session

    store, name = json.loads((folder / "bundle.json").read_text())
    bundle = Store(Path(store)).open(name)
    graph = bundle.manifest.graph_of(Precision(precision))
    if graph is None:
        sys.exit(f"the bundle {name} has no graph in {precision}")
    codec = BatchCodec(bundle.manifest.graph_spec(graph.layout))
    shared = cpu_session(bundle.path / graph.file, 1, max(2, threads))
    if not isinstance(shared, CpuSession):
        sys.exit("no folder for temporary files is on a disk")
    asked, workers = {"embedding": HeadRequest()}, ThreadPoolExecutor(threads)

    def pack(ids: Any) -> PackedBatch:
        rows, types = ids.astype(np.int32), np.zeros(ids.shape[1], np.int32)
        return codec.pack([Encoding(row, types, asked) for row in rows])

    def embed(ids: Any) -> Any:
        session = shared.alone if len(ids) == 1 < threads else shared.side_by_side
        first, *others = map(pack, _cut(ids, -(-len(ids) // threads)))
        runs = [workers.submit(session.run, each.outputs, each.feeds) for each in others]
        outputs = [session.run(first.outputs, first.feeds), *(run.result() for run in runs)]
        return np.concatenate([vectors for (vectors,) in outputs])

    return embed


def _feeds(ids: Any) -> dict[str, Any]:
    mask = np.ones_like(ids)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": 0 * mask}


def _plain_graph(folder: Path, precision: str) -> Path:
    """Return torch's export of transformers' model, or its stock dynamic int8."""
    file = folder / f"plain-{precision}.onnx"
    if file.exists():
        return file
    if precision == "int8":
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(_plain_graph(folder, "fp32"), file, weight_type=QuantType.QInt8)
        return file
    import torch
    from transformers import AutoModel

    class Mean(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(folder).eval()

        def forward(self, ids: Any, mask: Any, types: Any) -> Any:
            states = self.model(ids, mask, types).last_hidden_state
            weights = mask.unsqueeze(-1).to(states.dtype)
            return (states * weights).sum(1) / weights.sum(1)

    example = _feeds(np.ones((2, 8), np.int64))
    torch.onnx.export(
        Mean(),
        tuple(map(torch.from_numpy, example.values())),
        str(file),
        input_names=list(example),
        output_names=["vectors"],
        dynamic_axes={name: {0: "B", 1: "S"} for name in example} | {"vectors": {0: "B"}},
        opset_version=17,
        dynamo=False,  # as optimum exports
    )
    return file


def _onnxruntime(folder: Path, precision: str, threads: int) -> Embed:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(_plain_graph(folder, precision), options)
    return lambda ids: session.run(None, _feeds(ids))[0]


def _openvino(folder: Path, precision: str, threads: int, streams: int = 1) -> Embed:
    """Open a graph in OpenVINO; several streams share the texts of a batch."""
    import openvino

    core, file = openvino.Core(), folder / "openvino-int8.xml"
    if precision == "int8" and not file.exists():
        import nncf

        texts = json.loads((folder / "calibration.json").read_text())
        data = nncf.Dataset([_feeds(np.array([ids])) for ids in texts])
        model = core.read_model(_plain_graph(folder, "fp32"))
        rounded = nncf.quantize(model, data, model_type=nncf.ModelType.TRANSFORMER)
        openvino.save_model(rounded, file, compress_to_fp16=False)
    options = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": streams,
        "INFERENCE_PRECISION_HINT": "bf16" if precision == "bf16" else "f32",
    }
    graph = file if precision == "int8" else _plain_graph(folder, "fp32")
    model = core.compile_model(graph, "CPU", options)
    requests = [model.create_infer_request() for _ in range(streams)]

    def embed(ids: Any) -> Any:
        running = [*zip(requests, _cut(ids, -(-len(ids) // streams)), strict=False)]
        for request, part in running:
            request.start_async(_feeds(part))
        for request, _ in running:
            request.wait()
        return np.concatenate([request.get_output_tensor().data for request, _ in running])

    return embed


def _ctranslate2(folder: Path, precision: str, threads: int) -> Embed:
    import ctranslate2

    converted = folder / f"ctranslate2-{precision}"
    if not converted.exists():
        import transformers

        # ctranslate2 4.8 reads this field, which transformers 5 has no more.
        transformers.BertConfig.position_embedding_type = "absolute"  # type: ignore[attr-defined]
        converter = ctranslate2.converters.TransformersConverter(str(folder))
        converter.convert(str(converted), quantization="int8" if precision == "int8" else None)
    encoder = ctranslate2.Encoder(str(converted), device="cpu", intra_threads=threads)
    return lambda ids: np.array(encoder.forward_batch(ids.tolist()).last_hidden_state).mean(1)


_OPEN: dict[str, Callable[[Path, str, int], Embed]] = {
    "cloze": _cloze,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
    "openvino-streams": lambda folder, kind, threads: _openvino(folder, kind, threads, threads),
    "ctranslate2": _ctranslate2,
}

if __name__ == "__main__":
    place, (engine, kind) = Path(sys.argv[1]), sys.argv[2].split()
    words = json.loads((place / "config.json").read_text())["vocab_size"]
    answer_lines(_OPEN[engine](place, kind, int(sys.argv[3])), words)
