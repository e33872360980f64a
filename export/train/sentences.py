"""Fine-tuning for embeddings: contrastive on unlabelled sentences, then on scored pairs."""

from dataclasses import dataclass, field
from pathlib import Path

from cloze.export.checkpoint import Checkpoint, load_checkpoint
from cloze.export.errors import TrainError
from cloze.export.evaluation.pairs import read_pairs, similarity, tokenize_pairs
from cloze.export.heads import MASKED_LM, NEXT_SENTENCE
from cloze.export.model import TorchScorer
from cloze.export.sentence import EmbeddingRecipe
from cloze.export.train.batches import BatchPlan, TextBatches
from cloze.export.train.card import Run, write_card
from cloze.export.train.corpus import Corpus, prepare_corpus
from cloze.export.train.documents import fingerprint
from cloze.export.train.embedding_objective import EmbeddingData, EmbeddingObjective
from cloze.export.train.examples import SentenceObjective
from cloze.export.train.loop import train
from cloze.export.train.objectives import MaskedText
from cloze.export.train.recipe import EmbedRecipe, Phase, Pretraining
from cloze.export.train.run_dir import CHECKPOINT, CORPUS, acquire_run_dir
from cloze.export.train.run_options import RunOptions
from cloze.export.train.save import save_checkpoint
from cloze.export.train.start import Start, start_from
from cloze.export.train.text_objective import make_masking

_UNLIMITED_STEPS = 1_000_000_000
"""Steps of masked text: more than any run has."""


@dataclass(frozen=True, slots=True)
class EmbeddingFiles:
    """The input files of fine-tuning for embeddings.

    Attributes:
        text: unlabelled text for the contrastive steps and the checkpoint's heads; may be empty.
    """

    pairs: list[Path] = field(default_factory=list)
    held_out_pairs: list[Path] = field(default_factory=list)
    text: list[Path] = field(default_factory=list)


def finetune_sentences(
    source: str, files: EmbeddingFiles, recipe: EmbedRecipe, options: RunOptions
) -> Path:
    """Fine-tune a checkpoint's mean-pooled embeddings.

    Returns:
        The folder of the new checkpoint, a sentence-transformer.

    Raises:
        TrainError: there is nothing to learn from, the recipe does not suit the inputs, or the
            run fails, see `train`.
        ExportError: the checkpoint cannot be loaded.
    """
    checkpoint = load_checkpoint(source)
    inputs = {
        "checkpoint": checkpoint.source.weights_sha256,
        "file of pairs": fingerprint(files.pairs),
        "text": fingerprint(files.text),
    }
    acquire_run_dir(options.run_dir, recipe, inputs)
    heads = [
        head for head in (MASKED_LM, NEXT_SENTENCE) if getattr(checkpoint.model, head) is not None
    ]
    start = start_from(checkpoint, heads, dropout=recipe.dropout, seed=recipe.seed)
    _check_recipe(recipe, checkpoint, files)
    objective = _make_objective(start, heads, files, recipe, options)
    train(objective, options, seed=recipe.seed, optimisation=recipe.optimisation)
    folder = options.run_dir / CHECKPOINT
    embedding = EmbeddingRecipe(max_tokens=recipe.tokens)
    save_checkpoint(start.model, start.tokenizer, folder, embedding=embedding)
    title, data = "An encoder fine-tuned for embeddings", [*files.pairs, *files.text]
    write_card(folder, Run(title, source, [checkpoint], data, recipe, options))
    return folder


def _check_recipe(recipe: EmbedRecipe, checkpoint: Checkpoint, files: EmbeddingFiles) -> None:
    longest = max(recipe.tokens, recipe.contrastive_tokens if recipe.contrastive_steps else 0)
    max_positions = checkpoint.model.config.max_positions
    if longest > max_positions:
        raise TrainError(
            f"sentences of {longest} tokens exceed the checkpoint's {max_positions} positions"
        )
    if recipe.contrastive_steps and not recipe.dropout:
        raise TrainError(
            "contrastive_steps compare two dropout masks of one sentence, "
            "so dropout = 0 leaves nothing to learn: raise dropout, or set contrastive_steps to 0"
        )
    if recipe.contrastive_steps and not files.text:
        raise TrainError(
            "the recipe has contrastive_steps, which need text (--corpus); or set them to 0"
        )


def _make_objective(
    start: Start,
    heads: list[str],
    files: EmbeddingFiles,
    recipe: EmbedRecipe,
    options: RunOptions,
) -> EmbeddingObjective:
    """Read and tokenize the pairs and the text."""
    tokenizer = start.tokenizer
    pairs = []
    if files.pairs and recipe.epochs:
        pairs = tokenize_pairs(read_pairs(files.pairs), tokenizer.tokenizer, recipe.tokens)
    if not pairs and not recipe.contrastive_steps:
        raise TrainError(
            "there is nothing to learn from: give scored pairs (--pairs), "
            "or contrastive_steps and text (--corpus)"
        )
    sentences, text = None, None
    if files.text:
        sentences = prepare_corpus(
            files.text,
            tokenizer.tokenizer,
            options.run_dir / CORPUS,
            held_out=recipe.held_out,
            report=options.report,
        ).train
        if heads and recipe.text_weight:
            text = _text_batches(sentences, start, heads, recipe)
    held_out_pairs = read_pairs(files.held_out_pairs) if files.held_out_pairs else []
    scorer = TorchScorer(start.model, options.device)

    def held_out_figures() -> dict[str, float]:
        if not held_out_pairs:
            return {}
        return {"spearman": similarity(held_out_pairs, tokenizer.tokenizer, scorer, recipe.tokens)}

    objective = EmbeddingObjective(
        MaskedText(start.model, Pretraining(sentence_weight=recipe.text_sentence_weight)),
        recipe,
        EmbeddingData(sentences, pairs, text, tokenizer.special),
        held_out_figures,
    )
    options.report(
        f"{recipe.contrastive_steps:,} contrastive steps; {len(pairs):,} scored pairs; "
        f"{objective.steps:,} steps in all"
    )
    return objective


def _text_batches(
    corpus: Corpus, start: Start, heads: list[str], recipe: EmbedRecipe
) -> TextBatches:
    """Return batches of masked text that keep the checkpoint's heads accurate."""
    sentence = SentenceObjective.NSP if NEXT_SENTENCE in heads else SentenceObjective.NONE
    pretraining = Pretraining(unit=recipe.text_unit, sentence=sentence)
    phase = Phase(tokens=recipe.tokens, sequences=recipe.text_sequences, steps=_UNLIMITED_STEPS)
    plan = BatchPlan(pretraining, [phase], recipe.seed, recipe.optimisation.accumulation)
    masking = make_masking(start.tokenizer, pretraining)
    return TextBatches(corpus, plan, masking, start.tokenizer.special)
