"""Measures what int8 loses of an adapter."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from cloze.export.check.verify import measure_gate
from cloze.export.measure.texts import GateTexts
from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.manifest import Precision
from cloze.service.core import Device
from cloze.service.engine.onnx_engine import OnnxEngine, SessionOptions
from cloze.service.models.adapters import AdapterBundle


class _AdaptedScorer:
    """Runs encodings through a base with an adapter."""

    def __init__(self, adapter: AdapterBundle, precision: Precision) -> None:
        options = SessionOptions(adapter_bytes=adapter.size)
        self._engine = OnnxEngine(adapter.base, Device.CPU, precision, options=options)
        assert self._engine.adapters is not None
        self._engine.adapters.add(adapter.key, adapter.read)
        self._engine.adapters.hold(adapter.key).result()
        self._key, self.layers = adapter.key, adapter.manifest.architecture.layers

    def run(self, batch: Sequence[Encoding]) -> list[HeadOutputs]:
        """Return the results of encodings of one length, in order."""
        for encoding in batch:
            encoding.adapter = self._key
        return self._engine.run(batch)


def int8_figures(adapter: AdapterBundle) -> tuple[dict[str, float], dict[str, float]]:
    """Compare an adapter on the int8 graph of its base with itself on the fp32 graph.

    Returns:
        The figures of the quality gate of an export, on its texts, and their limits.

    Raises:
        StartupError: the graphs of the base do not run.
    """
    manifest = adapter.manifest
    texts = GateTexts(
        Tokenizer.from_file(str(adapter.file(manifest.tokenizer.file))),
        type_vocab_size=manifest.architecture.type_vocab_size,
        mask_id=manifest.tokenizer.mask_id,
        max_tokens=manifest.limits.max_tokens,
    )
    fp32, int8 = (_AdaptedScorer(adapter, one) for one in (Precision.FP32, Precision.INT8))
    return measure_gate(fp32, int8, manifest.graph_heads, texts)
