"""The limits of a bundle, which a reader checks before it reads or allocates anything.

A bundle may come from a stranger. Each limit is several times what the largest published BERT and
DistilBERT checkpoints need.
"""

from typing import Final

_MIB: Final = 2**20

MAX_MANIFEST_BYTES: Final = 4 * _MIB
MAX_TOKENIZER_BYTES: Final = 32 * _MIB
"""Half a million tokens take about 15 MiB."""

MAX_GOLDEN_BYTES: Final = 16 * _MIB
MAX_GRAPH_BYTES: Final = 2 * _MIB
"""Bytes of an ONNX file without its weights; a graph of 24 layers takes about 0.2 MiB."""

MAX_FILE_BYTES: Final = 16 * 1024 * _MIB
"""Bytes of any other file, for example of weights; BERT-large takes 1.4 GB in fp32."""

MAX_ADAPTER_BYTES: Final = 512 * _MIB
"""Bytes of an adapter's tensors; rank 64 on all layers of BERT-large takes about 90 MiB in fp32."""

MAX_FILES: Final = 64

MAX_VOCABULARY: Final = 2_000_000
MAX_POSITIONS: Final = 16_384
MAX_LAYERS: Final = 128
MAX_WIDTH: Final = 65_536
"""Largest hidden size, intermediate size, number of attention heads and embedding dimension."""

MAX_PARAMETERS: Final = 10**11

MAX_TOLERANCE: Final = 0.25
"""Largest tolerance of golden outputs, that of int8; see `cloze.export.check.verify.TOLERANCES`."""

MAX_GOLDEN_CASES: Final = 16
MAX_GOLDEN_INPUT: Final = 4096
"""Most numbers of one input of a golden case; exported cases have at most 2 x 16 tokens."""
