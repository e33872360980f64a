"""The way of a checkpoint on one screen: load, build, verify, publish."""

from collections.abc import Callable, Collection, Sequence
from copy import deepcopy

import torch

from export.checkpoint import Checkpoint, load_checkpoint
from export.errors import ExportError
from export.gate import pass_gate
from export.graph import GraphWriter, round_weights
from export.scorers import GraphScorer, TorchScorer
from export.session import Session, open_session
from export.smoothing import smoothing
from export.train.sentences import ScoredPair
from export.verify import verify
from model_store.manifest import (
    Architecture,
    Embedding,
    Facts,
    Gate,
    Graph,
    Limits,
    LowerPrecision,
    Precision,
    Task,
    TokenizerFacts,
    Weights,
)
from model_store.store import Bundle, Store

TOKENIZER_FILE = "tokenizer.json"
CARD_FILE = "README.md"


def export(
    source: str,
    name: str,
    store: Store,
    *,
    tasks: Sequence[Task] = (),
    revision: str | None = None,
    precisions: Collection[Precision] = (),
    weights: Weights = Weights.FP32,
    pairs: Sequence[ScoredPair] = (),
    cuda: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Bundle:
    """Turn a checkpoint into a published bundle, or raise and leave the store as it was.

    Args:
        source: a directory or a hub id.
        name: the bundle's name.
        store: where to publish.
        tasks: what to export it for; everything its heads allow if not given.
        revision: the hub's branch, tag or commit.
        precisions: of graphs to write beside the fp32 one.
        weights: how matrices lie on disk; fp16 and int8 round them, and torch is compared with the same rounded ones. int8
            keeps the integers of the int8 graph, for both graphs.
        pairs: sentences with scores, which a rounded graph must rank as well as the checkpoint does.
        cuda: compare packed graphs as CUDA's kernels run them, instead of by their reference.
        say: is told what happens, a line each.

    Raises:
        ExportError: the checkpoint cannot be loaded, lacks a head, a graph does not agree with torch, or what was rounded loses
            too much of the checkpoint (`export.gate`).
        StoreError: the store cannot be written.
    """
    say(f"loading {source}")
    checkpoint = load_checkpoint(source, revision)
    for note in checkpoint.notes:
        say(f"  note: {note}")
    chosen = _choose_tasks(checkpoint, tasks)
    _check_choices(chosen, precisions, weights, pairs)
    model, recipe = checkpoint.model, checkpoint.recipe
    smooth = smoothing(model, checkpoint.tokenizer.size) if Precision.INT8 in precisions else {}
    original = TorchScorer(deepcopy(model), torch.device("cpu"), deepcopy(recipe))
    round_weights(model, recipe, weights, smooth)
    limits = _limits(checkpoint)
    with store.staging() as folder:
        say(f"writing the graph for {', '.join(chosen)}")
        writer = GraphWriter(model, recipe, chosen, folder, weights, smooth)
        graph = writer.write()
        checkpoint.tokenizer.tokenizer.save(str(folder / TOKENIZER_FILE), pretty=False)
        if checkpoint.card is not None:
            (folder / CARD_FILE).write_text(checkpoint.card, encoding="utf-8")
        say("comparing it with torch")
        session = open_session(folder / graph.file, graph.layout)
        parity = verify(folder, graph, checkpoint, chosen, limits.max_tokens, session)

        def agreement(of: Graph, session: Session) -> Gate:
            """With the checkpoint as it came."""
            types = model.config.type_vocab_size > 0
            scorer = GraphScorer(session, of.layout, chosen, token_types=types, pooling=recipe.pooling)
            return pass_gate(original, scorer, f"{of.precision} graph", checkpoint, chosen, limits.max_tokens, pairs)

        gate = None if weights is Weights.FP32 else agreement(graph, session)
        lower: dict[Precision, LowerPrecision] = {}
        for precision in sorted(set(precisions) - {Precision.FP32}):
            say(f"writing the {precision} graph and comparing it")
            written = writer.write(precision)
            session = open_session(folder / written.file, written.layout, cuda=cuda)
            parity_of_it = verify(folder, written, checkpoint, chosen, limits.max_tokens, session)
            lower[precision] = LowerPrecision(graph=written, parity=parity_of_it, gate=agreement(written, session))
        facts = Facts(
            name=name,
            tasks=chosen,
            architecture=_architecture(checkpoint),
            source=checkpoint.source,
            license=checkpoint.license,
            tokenizer=_tokenizer_facts(checkpoint),
            limits=limits,
            embedding=_embedding(checkpoint, limits) if Task.EMBED in chosen else None,
            graph=graph,
            parity=parity,
            gate=gate,
            int8=lower.get(Precision.INT8),
            fp16=lower.get(Precision.FP16),
        )
        return store.publish(folder, facts)


def _check_choices(
    tasks: Sequence[Task], precisions: Collection[Precision], weights: Weights, pairs: Sequence[ScoredPair]
) -> None:
    if weights is Weights.INT8 and Precision.INT8 not in precisions:
        raise ExportError("weights int8 are those of the int8 graph: ask for --precision int8 as well")
    if pairs and Task.EMBED not in tasks:
        raise ExportError("scored pairs are ranked by embeddings, which this export has not: leave out --gate-pairs")
    if pairs and not set(precisions) - {Precision.FP32} and weights is Weights.FP32:
        raise ExportError("scored pairs say what a lower precision loses: leave out --gate-pairs, or give --precision int8")


def _choose_tasks(checkpoint: Checkpoint, asked: Sequence[Task]) -> tuple[Task, ...]:
    for task in asked:
        if task not in checkpoint.tasks:
            raise ExportError(f"the checkpoint cannot do {task}: it has heads for {', '.join(checkpoint.tasks)}")
    return tuple(dict.fromkeys(asked)) or checkpoint.default_tasks


def _limits(checkpoint: Checkpoint) -> Limits:
    positions = checkpoint.model.config.max_positions
    # What a sentence-transformer was tuned for wins over what its tokenizer says, as in sentence-transformers.
    return Limits(max_tokens=min(positions, max(checkpoint.tokenizer.max_tokens or positions, checkpoint.recipe.max_tokens or 0)))


def _architecture(checkpoint: Checkpoint) -> Architecture:
    config = checkpoint.model.config
    return Architecture(
        family=config.family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=config.layers,
        heads=config.heads,
        intermediate_size=config.intermediate_size,
        max_positions=config.max_positions,
        type_vocab_size=config.type_vocab_size,
        activation=config.activation,
        layer_norm_eps=config.layer_norm_eps,
        parameters=checkpoint.model.parameter_count(),
    )


def _tokenizer_facts(checkpoint: Checkpoint) -> TokenizerFacts:
    tokenizer = checkpoint.tokenizer
    return TokenizerFacts(
        file=TOKENIZER_FILE,
        vocab_size=tokenizer.size,
        lowercase=tokenizer.lowercase,
        cls_id=tokenizer.cls_id,
        sep_id=tokenizer.sep_id,
        mask_id=tokenizer.mask_id,
        mask_token=tokenizer.mask_token,
    )


def _embedding(checkpoint: Checkpoint, limits: Limits) -> Embedding:
    recipe = checkpoint.recipe
    return Embedding(
        dimensions=recipe.dimensions(checkpoint.model.config.hidden_size),
        pooling=recipe.pooling,
        normalize=recipe.normalize,
        max_tokens=min(limits.max_tokens, recipe.max_tokens or limits.max_tokens),
        prompts=recipe.prompts,
        default_prompt=recipe.default_prompt,
    )
