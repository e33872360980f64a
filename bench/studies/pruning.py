"""Speed of the graphs of a model at several shares of its heads and neurons, in alternation.

The parts are chosen by importance on a text, as `cloze train prune` does. Quality is not measured
here: `cloze train evaluate` does it.

    python bench/studies/pruning.py CHECKPOINT TEXT FOLDER
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch

from cloze.export.check.rounding import input_scales
from cloze.export.load.checkpoint import Checkpoint, load_checkpoint
from cloze.export.model import GraphWriter, Model
from cloze.export.train.compress import describe_sizes
from cloze.export.train.corpus import prepare_corpus
from cloze.export.train.importance import choose, importance, without_others
from cloze.export.train.recipe import PruneRecipe
from cloze.export.train.recipe_files import load_recipe
from cloze.export.train.save import save_checkpoint
from cloze.export.train.start import kept_recipe
from cloze.export.train.text_objective import text_batches
from cloze.model_store.batch import BatchCodec, Encoding
from cloze.model_store.heads import GraphSpec, HeadRequest, embedding
from cloze.model_store.layouts import Layout
from cloze.model_store.manifest import Precision, Weights

SHARES = (1.0, 0.8, 0.6, 0.4)
SHAPES = ((1, 16), (1, 128), (8, 128))
"""Sequences and tokens of the measured batches."""

ROUNDS = 15
PRECISIONS = (Precision.FP32, Precision.INT8)


def pruned(checkpoint: Checkpoint, text: Path, folder: Path) -> dict[float, Model]:
    """Return the model at each share, before it learns again."""
    recipe = load_recipe("prune", PruneRecipe)
    corpus = prepare_corpus(
        [text], checkpoint.tokenizer.tokenizer, folder / "corpus", held_out=0.08, report=print
    )
    batches = text_batches(corpus.train, recipe, checkpoint.tokenizer)
    scores = importance(checkpoint.model, (batches(step, 0) for step in range(4)))
    models = {1.0: checkpoint.model}
    for share in SHARES[1:]:
        heads = round(share * sum(len(layer.heads) for layer in scores))
        neurons = round(share * sum(len(layer.neurons) for layer in scores))
        models[share] = without_others(checkpoint.model, choose(scores, heads, neurons), 0.0)
        print(share, describe_sizes(models[share].config))
    return models


def sessions_of(
    checkpoint: Checkpoint, model: Model, folder: Path
) -> dict[Precision, ort.InferenceSession]:
    """Write the graphs of a model with embeddings only, and open them on one thread."""
    folder.mkdir(parents=True, exist_ok=True)
    scales = input_scales(model, checkpoint.tokenizer)
    heads = (embedding.HEAD,)
    writer = GraphWriter(model, checkpoint.recipe, heads, folder, Weights.FP32, scales)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return {
        precision: ort.InferenceSession(folder / writer.write(precision).file, options)
        for precision in PRECISIONS
    }


def feeds_of(sequences: int, tokens: int, layers: int) -> dict[str, np.ndarray]:
    """Return the inputs of a batch whose texts are all embedded."""
    spec = GraphSpec(Layout.DENSE, (embedding.HEAD.name,), token_types=True, layers=layers)
    rng = np.random.default_rng(0)
    ids = rng.integers(1000, 20_000, (sequences, tokens)).astype(np.int32)
    types = np.zeros(tokens, np.int32)
    return (
        BatchCodec(spec)
        .pack([Encoding(row, types, {embedding.HEAD.name: HeadRequest()}) for row in ids])
        .feeds
    )


def milliseconds(run: Callable[[], object], least: float = 0.05) -> float:
    """Return the time of one call, over calls that take ``least`` seconds together."""
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < least:
        run()
        count += 1
    return 1000 * passed / count


def main() -> None:
    """Print the size and the median times of each share."""
    source, text, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(2)
    checkpoint = load_checkpoint(source)
    models = pruned(checkpoint, text, folder)
    opened = {}
    for share, model in models.items():
        save_checkpoint(
            model, checkpoint.tokenizer, folder / f"{share}", embedding=kept_recipe(checkpoint)
        )
        opened[share] = sessions_of(checkpoint, model, folder / f"graph-{share}")
    print("ready", flush=True)
    for sequences, tokens in SHAPES:
        feeds = feeds_of(sequences, tokens, checkpoint.model.config.layers)
        times: dict[tuple[float, Precision], list[float]] = {}
        for _ in range(ROUNDS):
            for share, graphs in opened.items():
                for precision, session in graphs.items():
                    names = [o.name for o in session.get_outputs()]
                    spent = milliseconds(partial(session.run, names, feeds))
                    times.setdefault((share, precision), []).append(spent)
        for share, model in models.items():
            medians = [statistics.median(times[share, precision]) for precision in PRECISIONS]
            print(sequences, tokens, share, model.parameter_count(), *(f"{m:.3f}" for m in medians))


if __name__ == "__main__":
    main()
