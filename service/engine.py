"""Runs a bundle's graph. Hides onnxruntime: queries go in, outputs come out. Knows no queue, no text, no HTTP."""

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # the official builds otherwise report to their maker from the import on
import onnxruntime as ort
from numpy.typing import NDArray

from model_store import Bundle, Manifest, Task
from model_store import interface as names
from model_store.manifest import Graph, Parity
from model_store.parity import errors
from model_store.processor import INT8_NAMES, int8_instructions, int8_settings
from service.core import AskedPrecision, Device, Output, Query, StartupError

Feeds = dict[str, NDArray[Any]]

_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

_NOTHING = np.zeros(0, np.int32)
_NO_MASKS: Feeds = {
    names.MASK_ROWS: _NOTHING,
    names.TOP_K: np.ones(1, np.int64),
    names.TARGET_MASKS: _NOTHING,
    names.TARGET_IDS: _NOTHING,
}


class OnnxEngine:
    """A session on one of a bundle's dense graphs, its goldens checked before it answers anything.

    Args:
        bundle: an opened, hence verified, bundle.
        device: where to run; CUDA that does not come up is an error, never a silent CPU.
        precision: which graph to run; auto takes int8 on a processor with instructions for it.

    Raises:
        StartupError: the device is not there, the bundle lacks the precision, the graph does not load, or the goldens do
            not come back.
    """

    def __init__(self, bundle: Bundle, device: Device = Device.AUTO, precision: AskedPrecision = AskedPrecision.FP32) -> None:
        manifest = bundle.manifest
        self._name = manifest.reference
        graph, parity, self.reason = _choose_graph(manifest, _provider(device), precision)
        session = _open_session(bundle, graph, device)
        if _provider(device) == _CUDA and session.get_providers()[0] == _CPU:  # auto, and the GPU did not come up
            device = Device.CPU
            graph, parity, self.reason = _choose_graph(manifest, _CPU, precision)
            session = _open_session(bundle, graph, device)
        self.precision = str(graph.precision)
        self._tasks = frozenset(manifest.tasks)
        self._has_token_types = manifest.architecture.type_vocab_size > 0
        self._tolerance = parity.tolerance
        self._session = session
        self._outputs = [output.name for output in self._session.get_outputs()]
        self.device = Device.CUDA if self._session.get_providers()[0] == _CUDA else Device.CPU
        self._goldens = json.loads(bundle.file(parity.golden_file).read_bytes())
        try:
            for golden in self._goldens:
                self._check(golden)
        except Exception as error:
            raise StartupError(f"bundle {self._name} does not reproduce its golden outputs: {_first_line(error)}") from error

    def run(self, batch: Sequence[Query]) -> list[Output]:
        """As `Engine.run`. Queries must have one length."""
        feeds, counts = self._pack(batch)
        values = dict(zip(self._outputs, self._session.run(self._outputs, feeds), strict=True))
        return _unpack(batch, values, counts)

    def probe(self) -> None:
        """As `Engine.probe`, with the first golden."""
        self._check(self._goldens[0])

    def _pack(self, batch: Sequence[Query]) -> tuple[Feeds, list[int]]:
        """The graph's inputs, and each query's number of masks."""
        length = len(batch[0])
        feeds: Feeds = {names.INPUT_IDS: np.array([query.input_ids for query in batch])}
        if self._has_token_types:
            feeds[names.TOKEN_TYPE_IDS] = np.array([query.token_type_ids for query in batch])
        counts = [len(query.masks) for query in batch]
        if Task.FILL_MASK in self._tasks and not any(counts):
            feeds |= _NO_MASKS
        elif Task.FILL_MASK in self._tasks:
            rows = [row * length + mask for row, query in enumerate(batch) for mask in query.masks]
            feeds[names.MASK_ROWS] = np.array(rows, np.int32)
            # Every target of a query is asked of each of its masks.
            numbers = np.split(np.arange(len(rows), dtype=np.int32), np.cumsum(counts)[:-1])
            pairs = [
                (np.repeat(masks, len(query.targets)), np.tile(np.array(query.targets, np.int32), len(masks)))
                for masks, query in zip(numbers, batch, strict=True)
            ]
            feeds[names.TOP_K] = np.array([max(1, *(query.top_k for query in batch))], np.int64)
            feeds[names.TARGET_MASKS] = np.concatenate([masks for masks, _ in pairs])
            feeds[names.TARGET_IDS] = np.concatenate([targets for _, targets in pairs])
        if Task.NSP in self._tasks:
            feeds[names.PAIR_ROWS] = np.array([row * length for row, query in enumerate(batch) if query.pair], np.int32)
        if Task.EMBED in self._tasks:
            feeds[names.EMBED_SEQUENCES] = np.array([row for row, query in enumerate(batch) if query.embed], np.int32)
        return feeds, counts

    def _check(self, golden: dict[str, dict[str, Any]]) -> None:
        """Run a golden batch; every output must come back within the manifest's tolerance."""
        feeds: Feeds = {
            node.name: np.array(golden["feeds"][node.name], np.int64 if node.name == names.TOP_K else np.int32)
            for node in self._session.get_inputs()
        }
        expected = {name: np.array(values) for name, values in golden["outputs"].items()}
        outputs = dict(zip(expected, self._session.run(list(expected), feeds), strict=True))
        for name, error in errors(outputs, expected, self._tolerance).items():
            if error > self._tolerance:
                raise ValueError(f"{name} is off by {error:.1e}, more than {self._tolerance:.0e}")


def _unpack(batch: Sequence[Query], values: dict[str, NDArray[Any]], counts: list[int]) -> list[Output]:
    """Give every query its rows of the graph's outputs."""
    outputs = []
    mask = target = pair = embed = 0
    for row, query in enumerate(batch):
        fields: dict[str, NDArray[Any]] = {}
        if count := counts[row]:
            masks = slice(mask, mask + count)
            fields["top_logits"] = values[names.TOP_LOGITS][masks, : query.top_k]
            fields["top_ids"] = values[names.TOP_IDS][masks, : query.top_k]
            fields["logsumexp"] = values[names.LOGSUMEXP][masks]
            wanted = count * len(query.targets)
            fields["target_logits"] = values[names.TARGET_LOGITS][target : target + wanted].reshape(count, -1)
            mask, target = mask + count, target + wanted
        if query.pair:
            fields["pair_logits"] = values[names.PAIR_LOGITS][pair]
            pair += 1
        if query.embed:
            fields["embedding"] = values[names.EMBEDDINGS][embed]
            embed += 1
        if names.SPAN_LOGITS in values:
            fields["span_logits"] = values[names.SPAN_LOGITS].reshape(len(batch), len(query), 2)[row]
        outputs.append(Output(**fields))
    return outputs


def _provider(device: Device) -> str:
    there = ort.get_available_providers()
    if device is Device.CUDA and _CUDA not in there:
        raise StartupError(f"device cuda was asked for, but this onnxruntime has only {', '.join(there)}; install cloze[gpu]")
    return _CPU if device is Device.CPU or _CUDA not in there else _CUDA


def _choose_graph(manifest: Manifest, provider: str, asked: AskedPrecision) -> tuple[Graph, Parity, str]:
    """The graph to run, its parity, and why it is this one."""
    fp32 = manifest.graph, manifest.parity
    if asked is AskedPrecision.FP32:
        return *fp32, "as asked"
    if provider != _CPU:
        if asked is AskedPrecision.INT8:
            raise StartupError("precision int8 was asked for, which runs on a CPU only; set the device to cpu")
        return *fp32, "since int8 runs on a CPU only"
    if manifest.int8 is None:
        if asked is AskedPrecision.INT8:
            raise StartupError(f"bundle {manifest.reference} has no int8 graph; export it with --precision int8")
        return *fp32, "since the bundle has nothing else"
    int8 = manifest.int8.graph, manifest.int8.parity
    if asked is AskedPrecision.INT8:
        return *int8, "as asked"
    if there := int8_instructions():
        return *int8, f"since the processor has {', '.join(there)} and the bundle's gate was passed"
    return *fp32, f"since the processor has none of {INT8_NAMES}"


def _open_session(bundle: Bundle, graph: Graph, device: Device) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # one run is one thread; the scheduler's workers bring the cores
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    for name, value in int8_settings(int8_instructions()).items():
        options.add_session_config_entry(name, value)
    providers = [_CPU] if _provider(device) == _CPU else [_CUDA, _CPU]
    try:
        session = ort.InferenceSession(bundle.file(graph.file), options, providers=providers)
    except Exception as error:
        raise StartupError(f"bundle {bundle.manifest.reference}: its graph does not load: {_first_line(error)}") from error
    session.disable_fallback()
    if device is Device.CUDA and session.get_providers()[0] != _CUDA:
        raise StartupError("device cuda was asked for, but it did not come up: its driver or its libraries are missing")
    return session


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
