"""Distillation: a DistilBERT learns from a BERT teacher, and starts from half of its layers.

Source: Sanh et al. 2019, "DistilBERT", sections 2 and 3: soft targets with a temperature, masked
tokens, and the cosine of the last hidden states. The student has neither token types nor a pooler.
A recipe with ``keep_embeddings`` adds the cosine of the sentence embeddings.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cloze.export.errors import TrainError
from cloze.export.families import FAMILIES
from cloze.export.heads import MASKED_LM
from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.load.checkpoint import Checkpoint, load_checkpoint
from cloze.export.model import Model
from cloze.export.train.batches import TextBatch, TextBatches
from cloze.export.train.card import Run, finish_run
from cloze.export.train.documents import fingerprint
from cloze.export.train.embeddings import KeptEmbeddings
from cloze.export.train.loop import train
from cloze.export.train.objectives import masked_loss
from cloze.export.train.recipe import DistillRecipe
from cloze.export.train.run_dir import acquire_run_dir
from cloze.export.train.run_options import RunOptions
from cloze.export.train.start import check_kept_embeddings, check_vocabulary
from cloze.export.train.text_objective import (
    TextObjective,
    held_out_batches,
    run_corpus,
)


def kept_layers(layers: int, kept: int) -> list[int]:
    """Return the numbers of the layers that a student keeps, evenly spread from first to last.

    The last layer is among them, because the heads read its output. 6 of 12 layers are those of
    DistilBERT (huggingface/transformers-research-projects, ``distillation/scripts/extract.py``).
    """
    if kept == 1:
        return [layers - 1]
    return [round(number * (layers - 1) / (kept - 1)) for number in range(kept)]


def make_student(teacher: Model, dropout: float) -> Model:
    """Build a student with half of the teacher's layers: a DistilBERT, or the teacher's family.

    The embeddings, half of the layers (see `kept_layers`), and the masked-LM head are copied. The
    teacher adds its embedding of token type 0 to every token of a single text, so this embedding
    is added to the position embeddings of a student without token types.

    Raises:
        TrainError: the teacher has no masked-LM head.
    """
    if teacher.masked_lm is None:
        raise TrainError("the teacher has no masked-language-model head, which distillation needs")
    sizes = FAMILIES[teacher.config.family].student(teacher.config)
    passes = max(1, sizes.layers // sizes.group_layers // 2)
    kept = kept_layers(teacher.config.layers, passes * sizes.group_layers)
    config = replace(
        sizes,
        layers=len(kept),
        local_layers=tuple(sizes.local_layers[number] for number in kept if sizes.local_layers),
        layer_groups=min(sizes.layer_groups, passes) if sizes.layer_groups else None,
        dropout=dropout,
    )
    student = Model(config, [MASKED_LM])
    teacher_weights = teacher.state_dict()
    weights = {}
    for name in student.state_dict():
        teacher_name = name
        if name.startswith("encoder.layers."):
            number, rest = name.removeprefix("encoder.layers.").split(".", 1)
            teacher_name = f"encoder.layers.{kept[int(number)]}.{rest}"
        weights[name] = teacher_weights[teacher_name].clone()
    token_type = teacher.encoder.embeddings.token_type
    if token_type is not None and not config.type_vocab_size:
        weights["encoder.embeddings.position.weight"] += token_type.weight[0].detach()
    student.load_state_dict(weights)
    return student


def copy_student(source: Checkpoint, name: str, student: Model, teacher: Checkpoint) -> None:
    """Replace a new student's weights by those of a student that was distilled before.

    Raises:
        TrainError: the vocabularies or the sizes differ, or the earlier student has no masked-LM
            head.
    """
    check_vocabulary(source.tokenizer, teacher, name, "--from")
    needed, given = asdict(student.config), asdict(source.model.config)
    for size in sorted(needed.keys() - {"dropout"}):
        if given[size] != needed[size]:
            raise TrainError(
                f"{name} is no student of this teacher: its {size} is {given[size]}, "
                f"not {needed[size]}"
            )
    if source.model.masked_lm is None:
        raise TrainError(f"{name} is no student: it has no masked-language-model head")
    weights = source.model.state_dict()
    student.load_state_dict({key: weights[key] for key in student.state_dict()})


class Distillation(nn.Module):
    """The student's losses. The teacher is neither trained nor saved."""

    def __init__(self, student: Model, teacher: Model, recipe: DistillRecipe) -> None:
        super().__init__()
        self.model = student
        self._recipe = recipe
        self._teacher = [teacher.eval().requires_grad_(False)]  # in a list: not a submodule
        self._kept_embeddings = None
        if recipe.pretraining.keep_embeddings:
            self._kept_embeddings = KeptEmbeddings(teacher, recipe.pretraining.embedding_tokens)

    def forward(self, batch: TextBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the weighted sum of the losses, and figures.

        The losses are: soft targets at the chosen tokens, masked tokens, the cosine distance of
        every real token's hidden states and, if the recipe asks, the cosine distance of the
        sentence embeddings.
        """
        teacher, recipe = self._teacher[0], self._recipe
        assert self.model.masked_lm is not None
        assert teacher.masked_lm is not None
        with torch.no_grad():
            teacher_hidden = teacher(batch.input_ids, batch.token_type_ids, batch.attention_mask)
            teacher_rows = teacher_hidden.flatten(0, 1)[batch.positions]
            teacher_logits = teacher.masked_lm(teacher_rows).float()
        hidden = self.model(batch.input_ids, batch.token_type_ids, batch.attention_mask)
        logits = self.model.masked_lm(hidden.flatten(0, 1)[batch.positions]).float()
        mlm_loss, figures = masked_loss(logits, batch.labels)
        temperature = recipe.temperature
        soft_loss = F.kl_div(
            (logits / temperature).log_softmax(-1),
            (teacher_logits / temperature).log_softmax(-1),
            reduction="batchmean",
            log_target=True,
        )
        real = batch.attention_mask
        cosines = F.cosine_similarity(hidden[real].float(), teacher_hidden[real].float(), dim=-1)
        cosine_loss = 1 - cosines.mean()
        loss = (
            recipe.soft_weight * temperature**2 * soft_loss
            + recipe.masked_weight * mlm_loss
            + recipe.cosine_weight * cosine_loss
        )
        agreement = (logits.argmax(1) == teacher_logits.argmax(1)).float().mean()
        figures |= {"soft_loss": soft_loss, "cosine_loss": cosine_loss, "agreement": agreement}
        if self._kept_embeddings is not None:
            cosine = figures["embedding_cosine"] = self._kept_embeddings.cosine(self.model, batch)
            loss = loss + recipe.pretraining.embedding_weight * (1 - cosine)
        return loss, figures


def distill(
    teacher: str,
    files: list[Path],
    recipe: DistillRecipe,
    options: RunOptions,
    student_source: str | None = None,
) -> Path:
    """Distil a checkpoint on text.

    Args:
        student_source: folder or hub id of a student that was distilled before, to continue; None
            starts from layers of the teacher.

    Returns:
        The folder of the student's checkpoint.

    Raises:
        TrainError: the teacher has no masked-LM head, the recipe or the earlier student does not
            suit the teacher, an input is unsuitable, or the run fails, see `train`.
        ExportError: the teacher or the earlier student cannot be loaded.
    """
    checkpoint = load_checkpoint(teacher)
    student = make_student(checkpoint.model, recipe.dropout)
    inputs = {"teacher": checkpoint.source.weights_sha256, "text": fingerprint(files)}
    origins = [checkpoint]
    if student_source is not None:
        earlier = load_checkpoint(student_source)
        origins.append(earlier)
        copy_student(earlier, student_source, student, checkpoint)
        inputs["student"] = earlier.source.weights_sha256
    acquire_run_dir(options.run_dir, recipe, inputs)
    max_positions = checkpoint.model.config.max_positions
    check_lengths(recipe, max_positions)
    check_kept_embeddings(recipe.pretraining, checkpoint)
    tokenizer = checkpoint.tokenizer
    corpus = run_corpus(files, tokenizer, recipe.held_out, options)
    options.report(
        f"a {student.config.family} of {student.parameter_count():,} parameters "
        f"from a teacher of {checkpoint.model.parameter_count():,}"
    )
    objective = TextObjective(
        Distillation(student, checkpoint.model.to(options.device), recipe),
        TextBatches(corpus.train, recipe, tokenizer),
        held_out_batches(corpus.held_out, recipe, tokenizer, options.report),
        options.device,
    )
    train(objective, options, seed=recipe.seed, optimisation=recipe.optimisation)
    embedding = EmbeddingRecipe(max_tokens=max_positions)
    if recipe.pretraining.keep_embeddings:
        embedding = checkpoint.recipe
    title = "An encoder distilled from one of twice its layers"
    run = Run(title, teacher, origins, files, recipe, options)
    return finish_run(student, tokenizer, run, embedding)


def check_lengths(recipe: DistillRecipe, max_positions: int) -> None:
    """Raise if a phase is longer than the teacher reads."""
    longest = max(phase.tokens for phase in recipe.phases)
    if longest > max_positions:
        raise TrainError(
            f"a phase of {longest} tokens exceeds the teacher's {max_positions} positions"
        )
