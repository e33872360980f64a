"""Exports a checkpoint in steps: load, choose heads, round weights, write and verify, publish."""

from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cloze.export.adapters import AdaptedModel
from cloze.export.check.rounding import input_scales, round_weights
from cloze.export.check.verify import TOLERANCES, GraphUnderTest, pass_gate, verify
from cloze.export.errors import ExportError, Report
from cloze.export.graph.linear_ops import InputScale
from cloze.export.graph.session import open_session
from cloze.export.heads import EMBEDDING
from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.heads.entities import GATE_LABELS
from cloze.export.load.checkpoint import Checkpoint, load_checkpoint
from cloze.export.load.weights import NO_TENSORS
from cloze.export.measure.pairs import ScoredPair
from cloze.export.measure.scorer import PLAIN, Floats, GraphScorer, row_arrays
from cloze.export.measure.texts import GateTexts
from cloze.export.model import LAYOUTS, GraphWriter, Model, TorchScorer
from cloze.model_store import manifest
from cloze.model_store.adapter_section import AdapterSupport
from cloze.model_store.heads import Head, multi_vector, span
from cloze.model_store.heads.multi_vector import LateInteraction
from cloze.model_store.heads.sequence_classification import HEAD as SEQUENCE_HEAD
from cloze.model_store.heads.sequence_classification import RERANK, SequenceLabels
from cloze.model_store.layouts import Layout
from cloze.model_store.manifest import Graph, Limits, Precision, Weights
from cloze.model_store.plain_files import sha256_of
from cloze.model_store.store import Bundle, Store, StoreError

TOKENIZER_FILE = "tokenizer.json"
CARD_FILE = "README.md"
_LABELS = "labels-"
"""What the names of the files of an encoder of labels begin with."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options of one export.

    Attributes:
        tasks: the heads to write, by task name; empty: the checkpoint's default heads. `RERANK` is
            the classifier, whose second of two labels is the relevance of a text.
        weights: the storage of matrices. fp16 and int8 round the matrices, and torch is compared
            with the same rounded matrices. int8 stores the integers of the int8 graph, for both
            graphs.
        pairs: scored sentence pairs, which a rounded graph must rank as well as the checkpoint.
        cuda: verify packed graphs on CUDA instead of in the reference.
        reuse: return the newest bundle of the name if it equals what the export would publish.
        adapters: names of linear layers that adapters may change (`AdaptedModel.of`); empty: the
            bundle takes no adapters.
        no_answer_threshold: see `span.SpanOptions`.
        backbone: see `load_checkpoint`.
    """

    tasks: tuple[str, ...] = ()
    revision: str | None = None
    precisions: tuple[Precision, ...] = ()
    weights: Weights = Weights.FP32
    pairs: tuple[ScoredPair, ...] = ()
    cuda: bool = False
    reuse: bool = False
    adapters: tuple[str, ...] = ()
    no_answer_threshold: float = 0.0
    backbone: str | None = None

    @property
    def lower_precisions(self) -> list[Precision]:
        """The precisions of further graphs beside the fp32 graph, in a fixed order."""
        return sorted(set(self.precisions) - {Precision.FP32})


_DEFAULT_OPTIONS = ExportOptions()


@dataclass(frozen=True, slots=True)
class _Job:
    """One export after its heads are chosen and its weights are rounded.

    Attributes:
        prefix: what the names of its files begin with, but that of the model card.
        labels: the encoder of labels of a bi-encoder.
        label_vectors: its vectors of the labels of the gate, before weights are rounded.
    """

    options: ExportOptions
    checkpoint: Checkpoint
    original: tuple[Model, EmbeddingRecipe]
    heads: tuple[Head, ...]
    limits: Limits
    scales: dict[str, InputScale]
    adapted: AdaptedModel | None
    prefix: str = ""
    labels: "_Job | None" = None
    label_vectors: Floats | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        """The task names of the heads, in the order of the options if they name any."""
        return tuple(dict.fromkeys(self.options.tasks)) or tuple(h.task for h in self.heads)


def export(
    source: str,
    name: str,
    store: Store,
    options: ExportOptions = _DEFAULT_OPTIONS,
    report: Report = lambda _: None,
) -> Bundle:
    """Export a checkpoint as a published bundle. An error leaves the store unchanged.

    Raises:
        ExportError: the checkpoint cannot be loaded or lacks a head, a graph does not agree with
            torch, or a rounded graph loses too much quality (`cloze.export.check.verify`).
        StoreError: the store is not writable.
    """
    report(f"loading {source}")
    reranks = RERANK in options.tasks
    if reranks:
        own = SEQUENCE_HEAD.task
        tasks = dict.fromkeys(own if task == RERANK else task for task in options.tasks)
        options = replace(options, tasks=tuple(tasks))
    checkpoint = load_checkpoint(source, options.revision, options.tasks, options.backbone)
    for note in checkpoint.notes:
        if not note.endswith(NO_TENSORS):
            report(f"  note: {note}")
    heads = _choose_heads(checkpoint, options)
    report(f"  heads for {', '.join(head.task for head in heads)}")
    if reranks:
        checkpoint = _as_reranker(checkpoint)
    job = _round(checkpoint, heads, options)
    with store.staging() as folder:
        graphs, adapters = _write_graphs(job, folder, report)
        if job.labels is not None:
            label_graphs, _ = _write_graphs(job.labels, folder, report)
        stored = _stored(name, job, store, folder) if options.reuse else None
        if stored is not None:
            report(f"the store has this export as {stored.manifest.reference}; nothing is written")
            return stored
        spec = _describe(name, job, folder, graphs)
        if job.labels is not None:
            labels = _describe(name, job.labels, folder, label_graphs)
            spec |= {"label_encoder": manifest.BundleSpec(**labels)}
        return store.publish(folder, manifest.BundleSpec(**spec, adapters=adapters))


def _describe(name: str, job: _Job, folder: Path, graphs: dict[Precision, Graph]) -> dict[str, Any]:
    """Verify the graphs of a job; return the fields of its bundle."""
    sections = {precision: _verify(job, folder, graph) for precision, graph in graphs.items()}
    fields = _describe_model(name, job) | sections.pop(Precision.FP32)
    lower = {each: manifest.LowerPrecision(**section) for each, section in sections.items()}
    return fields | lower | {"source": job.checkpoint.source}


def _stored(name: str, job: _Job, store: Store, folder: Path) -> Bundle | None:
    """Return the newest bundle of a name, if it is whole and has what the folder has.

    An older version does not count: a server serves the newest. Figures of a gate with scored
    pairs, or of a comparison on CUDA, are part of a bundle, and no stored one counts.
    """
    if job.options.pairs or job.options.cuda:
        return None
    try:
        newest = store.manifest(name)
        pairs = [(newest, job), (newest.label_encoder, job.labels)]
        encoders = [(spec, job) for spec, job in pairs if spec is not None and job is not None]
        goldens = {parity.golden_file for spec, _ in encoders for parity in spec.parities()}
        stored = {file: s.sha256 for file, s in newest.files.items() if file not in goldens}
        is_equal = stored == {file.name: sha256_of(file) for file in folder.iterdir()} and all(
            getattr(spec, field) == value
            for spec, job in encoders
            for field, value in _describe_model(name, job).items()
        )
        return store.open(newest.reference) if is_equal else None
    except StoreError:  # there is none, or it is damaged
        return None


def _choose_heads(checkpoint: Checkpoint, options: ExportOptions) -> tuple[Head, ...]:
    """Return the heads to write; raise if options contradict each other."""
    if checkpoint.broken_promise and not options.tasks:
        raise ExportError(f"{checkpoint.broken_promise}; choose what to export with --task")
    by_task = {head.task: head for head in checkpoint.heads}
    for task in options.tasks:
        if task not in by_task:
            offered = ", ".join(by_task)
            absent = f"{task} is not offered"
            because = "".join(f"; {one}" for one in checkpoint.notes if one.startswith(absent))
            raise ExportError(
                f"the checkpoint cannot do {task}: it has heads for {offered}{because}"
            )
    chosen = [by_task[task] for task in options.tasks] or checkpoint.default_heads
    heads = tuple(head for head in checkpoint.heads if head in chosen)
    if options.weights is Weights.INT8 and Precision.INT8 not in options.precisions:
        raise ExportError(
            "weights int8 are those of the int8 graph: ask for --precision int8 as well"
        )
    if checkpoint.label_encoder is not None and options.adapters:
        raise ExportError("a bi-encoder of labels and texts takes no adapters: leave them out")
    if options.pairs and EMBEDDING not in {head.name for head in heads}:
        raise ExportError(
            "scored pairs are ranked by embeddings, which this export has not: "
            "leave out --gate-pairs"
        )
    if options.pairs and not options.lower_precisions and options.weights is Weights.FP32:
        raise ExportError(
            "scored pairs say what a lower precision loses: leave out --gate-pairs, "
            "or give --precision int8"
        )
    _check_threshold(options.no_answer_threshold, heads)
    return heads


def _as_reranker(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose classifier is a reranker."""
    labels = checkpoint.options[SEQUENCE_HEAD.name]
    assert isinstance(labels, SequenceLabels)
    try:
        section = labels.reranking()
    except ValueError as error:
        raise ExportError(f"the checkpoint cannot do {RERANK}: {error}") from None
    return replace(checkpoint, options={**checkpoint.options, SEQUENCE_HEAD.name: section})


def _check_threshold(threshold: float, heads: tuple[Head, ...]) -> None:
    if not abs(threshold) <= span.MAX_THRESHOLD:  # or it is NaN
        raise ExportError(
            f"the threshold of no answer is {threshold}; it must be within "
            f"{span.MAX_THRESHOLD:.0f} logits of 0"
        )
    if threshold and span.HEAD not in heads:
        raise ExportError(
            "a threshold of no answer is for the task qa, which this export has not: "
            "leave out --no-answer-threshold"
        )


def _round(checkpoint: Checkpoint, heads: tuple[Head, ...], options: ExportOptions) -> _Job:
    """Round the checkpoint's weights in place; keep the original for the gate."""
    model, recipe = checkpoint.model, checkpoint.recipe
    quantises = Precision.INT8 in options.precisions
    scales = input_scales(model, checkpoint.tokenizer) if quantises else {}
    is_rounded = options.weights is not Weights.FP32
    original = deepcopy((model, recipe)) if is_rounded else (model, recipe)
    if is_rounded:
        round_weights(model, recipe, options.weights, scales)
    adapted = AdaptedModel.of(model, options.adapters) if options.adapters else None
    job = _Job(options, checkpoint, original, heads, _limits(checkpoint), scales, adapted)
    if (labels := checkpoint.label_encoder) is None:
        return job
    vectors = _gate_vectors(labels)
    of_labels = replace(options, tasks=(), pairs=())
    labels_job = replace(_round(labels, labels.heads, of_labels), prefix=_LABELS)
    return replace(job, labels=labels_job, label_vectors=vectors)


def _gate_vectors(labels: Checkpoint) -> Floats:
    """Return the vectors [l, d] of the labels of the gate of entities."""
    texts = _gate_texts(labels, _limits(labels))
    rows = [texts.row(texts.word_ids(label)) for label in GATE_LABELS]
    scorer = TorchScorer(labels.model, torch.device("cpu"), labels.recipe)
    return np.stack(row_arrays(scorer, EMBEDDING, rows, PLAIN))


def _gate_texts(checkpoint: Checkpoint, limits: Limits, **others: Any) -> GateTexts:
    """Return the texts of the quality gate as tokens of a checkpoint."""
    return GateTexts(
        checkpoint.tokenizer.tokenizer,
        type_vocab_size=checkpoint.model.config.type_vocab_size,
        mask_id=checkpoint.tokenizer.mask_id,
        max_tokens=limits.max_tokens,
        options=checkpoint.options,
        **others,
    )


def _write_graphs(
    job: _Job, folder: Path, report: Report
) -> tuple[dict[Precision, Graph], AdapterSupport | None]:
    """Write each graph, the tokenizer and the model card to a folder.

    Return the graphs without adapters, and the manifest's section about those that take adapters.
    """
    checkpoint, options = job.checkpoint, job.options
    file = folder / f"{job.prefix}{TOKENIZER_FILE}"
    checkpoint.tokenizer.tokenizer.save(str(file), pretty=False)
    if checkpoint.card is not None:
        (folder / CARD_FILE).write_text(checkpoint.card, encoding="utf-8")
    writer = GraphWriter(
        checkpoint.model,
        checkpoint.recipe,
        job.heads,
        folder,
        options.weights,
        job.scales,
        job.prefix,
    )
    graphs = {}
    for precision in (Precision.FP32, *options.lower_precisions):
        report(f"writing the {precision} graph and comparing it with torch")
        graphs[precision] = writer.write(precision)
    if job.adapted is None:
        return graphs, None
    return graphs, _write_adapted(job, job.adapted, folder, writer, report)


def _write_adapted(
    job: _Job, adapted: AdaptedModel, folder: Path, writer: GraphWriter, report: Report
) -> AdapterSupport:
    """Write and verify the graphs that take adapters."""
    graphs = {}
    for precision in (Precision.FP32, *job.options.lower_precisions):
        if LAYOUTS[precision] is not Layout.DENSE:
            continue
        graph = writer.write(precision, adapted.numbers)
        session = open_session(folder / graph.file, graph.layout)
        subject = GraphUnderTest(graph, job.checkpoint, job.heads, job.limits.max_tokens)
        error = adapted.verify(session, subject.spec, TOLERANCES[precision])
        report(f"the {precision} graph with adapters differs from torch by {error:.1e} at most")
        graphs[precision] = graph
    return adapted.describe(graphs, folder)


def _verify(job: _Job, folder: Path, graph: Graph) -> dict[str, Any]:
    """Compare a graph with torch, a rounded one also with the checkpoint; return its fields."""
    options = job.options
    session = open_session(folder / graph.file, graph.layout, cuda=options.cuda)
    subject = GraphUnderTest(graph, job.checkpoint, job.heads, job.limits.max_tokens, job.prefix)
    parity = verify(folder, subject, session)
    if graph.precision is Precision.FP32 and options.weights is Weights.FP32:
        return {"graph": graph, "parity": parity}  # nothing was rounded
    others = {"scored_pairs": options.pairs, "label_vectors": job.label_vectors}
    texts = _gate_texts(job.checkpoint, job.limits, **others)
    model, recipe = job.original
    before = TorchScorer(model, torch.device("cpu"), recipe)
    after, title = GraphScorer(session, subject.spec), f"{graph.precision} graph"
    gate = pass_gate(before, after, title, job.heads, texts)
    return {"graph": graph, "parity": parity, "gate": gate}


def _describe_model(name: str, job: _Job) -> dict[str, Any]:
    """Return the fields of a bundle that are known before its graphs are verified."""
    checkpoint, names = job.checkpoint, {head.name for head in job.heads}
    head_options = dict(checkpoint.options)
    if threshold := job.options.no_answer_threshold:
        head_options[span.HEAD.name] = span.SpanOptions(no_answer_threshold=threshold)
    return {
        "name": name,
        "tasks": job.tasks,
        "architecture": _architecture(checkpoint),
        "license": checkpoint.license,
        "tokenizer": _tokenizer_spec(checkpoint, f"{job.prefix}{TOKENIZER_FILE}"),
        "limits": job.limits,
        "embedding": _embedding(checkpoint, job.limits) if EMBEDDING in names else None,
        "tables": {
            name: (table.num_embeddings, table.embedding_dim)
            for name, table in checkpoint.model.encoder.embeddings.tables().items()
        },
        "heads": {head: options for head, options in head_options.items() if head in names},
    }


def _limits(checkpoint: Checkpoint) -> Limits:
    positions = checkpoint.model.config.max_positions
    late = checkpoint.options.get(multi_vector.HEAD.name)
    lengths = (late.query_tokens, late.document_tokens) if isinstance(late, LateInteraction) else ()
    # Like sentence-transformers and PyLate: the limit of the recipe, and the lengths of queries and
    # documents, take precedence over the tokenizer's.
    tuned = max(
        checkpoint.tokenizer.max_tokens or positions, checkpoint.recipe.max_tokens or 0, *lengths
    )
    return Limits(max_tokens=min(positions, tuned))


def _architecture(checkpoint: Checkpoint) -> manifest.Architecture:
    config = checkpoint.model.config
    names = manifest.Architecture.model_fields.keys() - {"parameters"}
    sizes = {name: getattr(config, name) for name in names}
    parameters = sum(one.numel() for one in checkpoint.model.parameters())  # tied ones once
    return manifest.Architecture(**sizes, parameters=parameters)


def _tokenizer_spec(checkpoint: Checkpoint, file: str) -> manifest.TokenizerSpec:
    tokenizer, special = checkpoint.tokenizer, checkpoint.tokenizer.special
    return manifest.TokenizerSpec(
        file=file,
        vocab_size=tokenizer.size,
        lowercase=tokenizer.lowercase,
        cls_id=special.cls,
        sep_id=special.sep,
        pair_separators=special.separators,
        second_type=special.second_type,
        truncation_side=tokenizer.truncation_side,
        mask_id=special.mask,
        mask_token=tokenizer.mask_token,
    )


def _embedding(checkpoint: Checkpoint, limits: Limits) -> manifest.Embedding:
    recipe = checkpoint.recipe
    return manifest.Embedding(
        dimensions=recipe.dimensions(checkpoint.model.config.hidden_size),
        pooling=recipe.pooling,
        further_poolings=recipe.further_poolings,
        normalize=recipe.normalize,
        max_tokens=min(limits.max_tokens, recipe.max_tokens or limits.max_tokens),
        prompts=recipe.prompts,
        default_prompt=recipe.default_prompt,
        include_prompt=recipe.include_prompt,
        projected=bool(recipe.steps),
    )
