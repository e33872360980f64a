"""Smaller models that learn from the whole one: pruning, and word embeddings of a lower rank.

Sources: Michel et al. 2019, section 4 (heads by importance); Lan et al. 2020, "ALBERT", section 3.1
(factorised embeddings); Sanh et al. 2019 (the losses of distillation).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cloze.export.blocks.config import EncoderConfig
from cloze.export.check.verify import measure_gate
from cloze.export.errors import TrainError
from cloze.export.evaluation.texts import GateTexts
from cloze.export.families import FAMILIES
from cloze.export.load.checkpoint import Checkpoint, load_checkpoint
from cloze.export.model import Model, TorchScorer, head_module
from cloze.export.train.batches import TextBatch
from cloze.export.train.card import Run, finish_run
from cloze.export.train.corpus import PreparedCorpus
from cloze.export.train.distill import check_lengths, learn_from
from cloze.export.train.documents import fingerprint
from cloze.export.train.examples import SentenceObjective
from cloze.export.train.factors import fit_masked_lm, with_rank
from cloze.export.train.importance import choose, importance, without_others
from cloze.export.train.recipe import DistillRecipe, FactoriseRecipe, PruneRecipe
from cloze.export.train.run_dir import acquire_run_dir
from cloze.export.train.run_options import RunOptions
from cloze.export.train.start import check_kept_embeddings, kept_recipe
from cloze.export.train.text_objective import (
    run_corpus,
    text_batches,
)


@dataclass(frozen=True, slots=True)
class _Job:
    """A run that makes a checkpoint smaller."""

    source: str
    whole: Checkpoint
    files: list[Path]
    corpus: PreparedCorpus
    recipe: DistillRecipe
    options: RunOptions

    def first_batches(self, count: int) -> Iterator[TextBatch]:
        """Yield batches of the training text that no step learns from."""
        seed = (self.recipe.seed + 1) % 2**32
        phase = self.recipe.phases[0].model_copy(update={"steps": count})
        recipe = self.recipe.model_copy(update={"seed": seed, "phases": [phase]})
        batches = text_batches(self.corpus.train, recipe, self.whole.tokenizer)
        for step in range(count):
            yield batches(step, 0).to(self.options.device)

    def learn(self, smaller: Model, title: str, options: RunOptions) -> Path:
        """Distil the whole model into the smaller one, and write its checkpoint."""
        checkpoint, recipe = self.whole, self.recipe
        options.report(
            f"a {smaller.config.family} of {smaller.parameter_count():,} parameters "
            f"from one of {checkpoint.model.parameter_count():,}"
        )
        learn_from(checkpoint, smaller, self.corpus, recipe, options)
        run = Run(title, self.source, [checkpoint], self.files, recipe, options)
        return finish_run(smaller, checkpoint.tokenizer, run, kept_recipe(checkpoint))

    def report_gate(self, smaller: Model) -> None:
        """Report the figures of the export's gate, and by how much each misses its limit."""
        whole, tokenizer, device = self.whole, self.whole.tokenizer, self.options.device
        texts = GateTexts(
            tokenizer.tokenizer,
            type_vocab_size=whole.model.config.type_vocab_size,
            mask_id=tokenizer.mask_id,
            max_tokens=smaller.config.max_positions,
        )
        heads = [
            head
            for head in whole.default_heads
            if head_module(smaller, whole.recipe, head.name) is not None
        ]
        before, after = (
            TorchScorer(model, device, whole.recipe) for model in (whole.model, smaller)
        )
        measured, limits = measure_gate(before, after, heads, texts)
        for name, value in measured.items():
            missing = limits[name] - value
            verdict = "within the gate" if missing <= 0 else f"misses the gate by {missing:.4f}"
            self.options.report(f"{name}: {value:.4f} of {limits[name]}, {verdict}")


def _open(source: str, files: list[Path], recipe: DistillRecipe, options: RunOptions) -> _Job:
    """Load the whole model and the text.

    Raises:
        TrainError: the model has no masked-LM head, or the recipe or an input is unsuitable.
    """
    whole = load_checkpoint(source)
    if whole.model.masked_lm is None:
        raise TrainError(
            f"{source} has no masked-language-model head, through which the smaller model learns"
        )
    check_lengths(recipe, whole.model.config.max_positions)
    check_kept_embeddings(recipe.pretraining, whole)
    inputs = {"checkpoint": whole.source.weights_sha256, "text": fingerprint(files)}
    acquire_run_dir(options.run_dir, recipe, inputs)
    if not kept_recipe(whole):
        options.report("the dense layers after the checkpoint's pooling are not kept")
    corpus = run_corpus(files, whole.tokenizer, recipe.held_out, options)
    whole.model.to(options.device)
    return _Job(source, whole, files, corpus, recipe, options)


def prune(source: str, files: list[Path], recipe: PruneRecipe, options: RunOptions) -> Path:
    """Remove the least important heads and neurons of a checkpoint, in one or more rounds.

    A round before the last is a run of its own, in a folder in that of the run.

    Returns:
        The folder of the smaller checkpoint.

    Raises:
        TrainError: the checkpoint cannot be pruned, or an input is unsuitable, or the run fails.
        ExportError: the checkpoint cannot be loaded.
    """
    job = _open(source, files, recipe, options)
    if recipe.next_sentence and job.whole.model.next_sentence is not None:
        pairs = recipe.pretraining.model_copy(update={"sentence": SentenceObjective.NSP})
        job = replace(job, recipe=recipe.model_copy(update={"pretraining": pairs}))
    sizes = job.whole.model.config
    if not FAMILIES[sizes.family].is_prunable:
        raise TrainError(f"a {sizes.family} cannot be pruned: its layers do not have own sizes")
    all_heads = sum(sizes.heads_of(layer) for layer in range(sizes.layers))
    all_neurons = sum(sizes.intermediate_size_of(layer) for layer in range(sizes.layers))
    model, folder = job.whole.model, options.run_dir
    for number in range(1, recipe.rounds + 1):
        done = number / recipe.rounds
        scores = importance(model, job.first_batches(recipe.importance_batches))
        heads = round(all_heads * (1 - done * (1 - recipe.heads)))
        neurons = round(all_neurons * (1 - done * (1 - recipe.neurons)))
        model = without_others(model.cpu(), choose(scores, heads, neurons), recipe.dropout)
        job.whole.model.to(options.device)
        options.report(f"round {number} of {recipe.rounds}: {describe_sizes(model.config)}")
        round_dir = options.run_dir
        if number < recipe.rounds:
            round_dir = options.run_dir / f"round-{number}"
        folder = job.learn(model, "A pruned encoder", replace(options, run_dir=round_dir))
    job.report_gate(model)
    return folder


def describe_sizes(config: EncoderConfig) -> str:
    """Return the numbers of heads and neurons of each layer in words."""
    layers = range(config.layers)
    heads = ", ".join(str(config.heads_of(layer)) for layer in layers)
    neurons = ", ".join(str(config.intermediate_size_of(layer)) for layer in layers)
    return f"heads per layer: {heads}; neurons per layer: {neurons}"


def factorise(source: str, files: list[Path], recipe: FactoriseRecipe, options: RunOptions) -> Path:
    """Replace the embeddings of a checkpoint by narrow ones and a projection.

    Returns:
        The folder of the smaller checkpoint, in ELECTRA's layout.

    Raises:
        TrainError: the checkpoint cannot be factorised, or an input is unsuitable, or the run
            fails.
        ExportError: the checkpoint cannot be loaded.
    """
    job = _open(source, files, recipe, options)
    smaller, lost = with_rank(job.whole.model, recipe.rank, recipe.dropout)
    if lost:
        options.report(
            f"not kept, because {smaller.config.family} has no such heads: {', '.join(lost)}"
        )
    fit_masked_lm(smaller, job.whole.model, job.first_batches(recipe.fit_batches))
    folder = job.learn(smaller, "An encoder with factorised embeddings", options)
    job.report_gate(smaller)
    return folder
