"""Distillation: a DistilBERT learns from a BERT teacher, starting from every second of its layers.

Source: Sanh et al. 2019, "DistilBERT", sections 2 and 3: soft targets with a temperature, masked tokens, and the cosine of the
last hidden states. The student has neither token types nor a pooler.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from export.checkpoint import load_checkpoint
from export.heads import MASKED_LM
from export.models import Model
from export.sentence import EmbeddingRecipe
from export.train.batches import TextBatch
from export.train.card import write_card
from export.train.corpus import fingerprint, prepare_corpus
from export.train.errors import TrainError
from export.train.loop import Schedule, train
from export.train.objectives import masked_loss
from export.train.pairs import Sentence
from export.train.pretrain import CHECKPOINT, TextObjective, held_out_batches, text_batches
from export.train.recipe import DistillRecipe
from export.train.run_folder import claim
from export.train.save import save_checkpoint


def make_student(teacher: Model, dropout: float) -> Model:
    """A DistilBERT of half the layers: embeddings, every second layer from the first, and the masked-LM head copied.

    The teacher's embedding of token type 0, which it adds to every token of a single text, goes into the positions.
    """
    if teacher.masked_lm is None:
        raise TrainError("the teacher has no masked-language-model head, which distillation needs")
    layers = max(1, teacher.config.layers // 2)
    config = replace(
        teacher.config,
        family="distilbert",
        layers=layers,
        type_vocab_size=0,
        layer_norm_eps=1e-12,
        dropout=dropout,
    )
    student = Model(config, [MASKED_LM])
    taken = dict(teacher.state_dict())
    state = {}
    for name in student.state_dict():
        if name.startswith("encoder.layers."):
            number, rest = name.removeprefix("encoder.layers.").split(".", 1)
            state[name] = taken[f"encoder.layers.{2 * int(number)}.{rest}"].clone()
        else:
            state[name] = taken[name].clone()
    if teacher.encoder.embeddings.token_type is not None:
        state["encoder.embeddings.position.weight"] += teacher.encoder.embeddings.token_type.weight[
            0
        ].detach()
    student.load_state_dict(state)
    return student


class Distillation(nn.Module):
    """The student's three losses. The teacher is no part of what is trained or saved."""

    def __init__(self, student: Model, teacher: Model, recipe: DistillRecipe) -> None:
        super().__init__()
        self.model = student
        self._recipe = recipe
        self._teacher = [teacher.eval().requires_grad_(False)]  # in a list: not a submodule

    def forward(self, batch: TextBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Soft targets on the chosen tokens, masked tokens, and the direction of every real token's hidden state."""
        teacher, recipe = self._teacher[0], self._recipe
        assert self.model.masked_lm is not None
        assert teacher.masked_lm is not None
        with torch.no_grad():
            theirs = teacher(batch.input_ids, batch.token_type_ids, batch.attention_mask)
            soft = teacher.masked_lm(theirs.flatten(0, 1)[batch.positions]).float()
        ours = self.model(batch.input_ids, None, batch.attention_mask)
        logits = self.model.masked_lm(ours.flatten(0, 1)[batch.positions]).float()
        masked, figures = masked_loss(logits, batch.labels)
        heat = recipe.temperature
        soft_loss = F.kl_div(
            (logits / heat).log_softmax(-1),
            (soft / heat).log_softmax(-1),
            reduction="batchmean",
            log_target=True,
        )
        real = batch.attention_mask
        cosine = 1 - F.cosine_similarity(ours[real].float(), theirs[real].float(), dim=-1).mean()
        loss = (
            recipe.soft_weight * heat**2 * soft_loss
            + recipe.masked_weight * masked
            + recipe.cosine_weight * cosine
        )
        agreement = (logits.argmax(1) == soft.argmax(1)).float().mean()
        return loss, figures | {
            "soft_loss": soft_loss,
            "cosine_loss": cosine,
            "agreement": agreement,
        }


def distill(
    teacher: str,
    files: list[Path],
    recipe: DistillRecipe,
    folder: Path,
    *,
    device: torch.device,
    schedule: Schedule,
    say: Callable[[str], None],
) -> Path:
    """Distil a checkpoint on text; returns the folder of the student's.

    Raises:
        TrainError: the teacher has no masked-LM head, the sequences are longer than it takes, or see the parts.
        ExportError: the teacher cannot be loaded.
    """
    loaded = load_checkpoint(teacher)
    claim(folder, recipe, {"teacher": loaded.source.weights_sha256, "text": fingerprint(files)})
    limit = loaded.model.config.max_positions
    if longest := next((phase.tokens for phase in recipe.phases if phase.tokens > limit), None):
        raise TrainError(f"a phase of {longest} tokens exceeds the teacher's {limit} positions")
    if recipe.pretraining.sentence is not Sentence.NONE or recipe.pretraining.method != "mlm":
        raise TrainError(
            'distillation learns from single texts with masked tokens: set method = "mlm" and sentence = "none"'
        )
    tokenizer = loaded.tokenizer.tokenizer
    corpus = prepare_corpus(files, tokenizer, folder / "corpus", held_out=recipe.held_out, say=say)
    student = make_student(loaded.model, recipe.dropout)
    say(
        f"a distilbert of {student.parameter_count():,} parameters from a teacher of {loaded.model.parameter_count():,}"
    )
    objective = TextObjective(
        Distillation(student, loaded.model.to(device), recipe),
        text_batches(corpus.train, recipe, tokenizer),
        held_out_batches(corpus.held_out, recipe, tokenizer, say),
        device,
    )
    train(
        objective,
        recipe.seed,
        recipe.optimisation,
        folder,
        device=device,
        schedule=schedule,
        say=say,
    )
    save_checkpoint(
        student, tokenizer, folder / CHECKPOINT, embedding=EmbeddingRecipe(max_tokens=limit)
    )
    title = "A DistilBERT distilled from a BERT"
    write_card(
        folder / CHECKPOINT, title=title, source=teacher, files=files, recipe=recipe, device=device
    )
    return folder / CHECKPOINT
