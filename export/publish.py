"""The way of a checkpoint on one screen: load, build, verify, publish."""

from collections.abc import Callable, Sequence

from export.checkpoint import Checkpoint, load_checkpoint
from export.errors import ExportError
from export.graph import round_to_fp16, write_graph
from export.verify import verify
from model_store.manifest import Architecture, Embedding, Facts, Limits, Task, TokenizerFacts, Weights
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
    weights: Weights = Weights.FP32,
    say: Callable[[str], None] = lambda _: None,
) -> Bundle:
    """Turn a checkpoint into a published bundle, or raise and leave the store as it was.

    Args:
        source: a directory or a hub id.
        name: the bundle's name.
        store: where to publish.
        tasks: what to export it for; everything its heads allow if not given.
        revision: the hub's branch, tag or commit.
        weights: how matrices lie on disk; fp16 rounds them, and torch is compared with the same rounded ones.
        say: is told what happens, a line each.

    Raises:
        ExportError: the checkpoint cannot be loaded, lacks a head, or its graph does not agree with torch.
        StoreError: the store cannot be written.
    """
    say(f"loading {source}")
    checkpoint = load_checkpoint(source, revision)
    for note in checkpoint.notes:
        say(f"  note: {note}")
    chosen = _choose_tasks(checkpoint, tasks)
    if weights is Weights.FP16:
        round_to_fp16(checkpoint.model)
        for projection in checkpoint.recipe.projections:
            round_to_fp16(projection)
    with store.staging() as folder:
        say(f"writing the graph for {', '.join(chosen)}")
        graph = write_graph(checkpoint.model, checkpoint.recipe, chosen, folder, weights)
        checkpoint.tokenizer.tokenizer.save(str(folder / TOKENIZER_FILE), pretty=False)
        if checkpoint.card is not None:
            (folder / CARD_FILE).write_text(checkpoint.card, encoding="utf-8")
        limits = _limits(checkpoint)
        say("comparing it with torch")
        parity = verify(folder, graph, checkpoint, chosen, limits.max_tokens)
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
        )
        return store.publish(folder, facts)


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
