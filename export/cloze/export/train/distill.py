"""Distillation: a DistilBERT learns from a BERT teacher, and starts from half of its layers.

Source: Sanh et al. 2019, "DistilBERT", sections 2 and 3: soft targets with a temperature, masked
tokens, and the cosine of the last hidden states. The student has neither token types nor a pooler.
A recipe with ``keep_embeddings`` adds the cosine of the sentence embeddings.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DistilBertConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from cloze.export.errors import TrainError
from cloze.export.measure.documents import fingerprint
from cloze.export.train.batches import TextBatch, text_objective
from cloze.export.train.card import Run, write_run
from cloze.export.train.folder import Folder, has_token_types, max_tokens, set_dropout
from cloze.export.train.kept_embeddings import KeptEmbeddings, kept_embeddings, with_modules
from cloze.export.train.loop import train
from cloze.export.train.objectives import masked_loss, run_masked
from cloze.export.train.recipe import DistillRecipe
from cloze.export.train.run_dir import acquire_run_dir
from cloze.export.train.run_options import RunOptions

_LAYER = re.compile(r"(.*\.layers?\.)(\d+)(\..*)")
"""The name of a tensor of a layer, with the number of the layer."""

DISTILBERT: Final = (
    ("bert.encoder.layer.", "distilbert.transformer.layer."),
    ("bert.embeddings.", "distilbert.embeddings."),
    (".attention.self.query.", ".attention.q_lin."),
    (".attention.self.key.", ".attention.k_lin."),
    (".attention.self.value.", ".attention.v_lin."),
    (".attention.output.dense.", ".attention.out_lin."),
    (".attention.output.LayerNorm.", ".sa_layer_norm."),
    (".intermediate.dense.", ".ffn.lin1."),
    (".output.dense.", ".ffn.lin2."),
    (".output.LayerNorm.", ".output_layer_norm."),
    ("cls.predictions.transform.dense.", "vocab_transform."),
    ("cls.predictions.transform.LayerNorm.", "vocab_layer_norm."),
    ("cls.predictions.decoder.", "vocab_projector."),
)
"""Parts of the names of a BERT's tensors, and what a DistilBERT calls them."""


def kept_layers(layers: int, kept: int) -> list[int]:
    """Return the numbers of the layers that a student keeps, evenly spread from first to last.

    The last layer is among them, because the heads read its output. 6 of 12 layers are those of
    DistilBERT (huggingface/transformers-research-projects, ``distillation/scripts/extract.py``).
    """
    if kept == 1:
        return [layers - 1]
    return [round(number * (layers - 1) / (kept - 1)) for number in range(kept)]


def make_student(teacher: PreTrainedModel, dropout: float) -> PreTrainedModel:
    """Build a student with half of the teacher's layers: a DistilBERT, or the teacher's family.

    The embeddings, half of the layers (see `kept_layers`), and the masked-LM head are copied. A
    BERT adds its embedding of token type 0 to every token of a single text, so this embedding is
    added to the position embeddings of a DistilBERT, which has no token types.
    """
    layers = teacher.config.num_hidden_layers
    kept = kept_layers(layers, max(1, layers // 2))
    kind: Any = AutoModelForMaskedLM
    student: PreTrainedModel = kind.from_config(_student_config(teacher.config, kept, dropout))
    weights = {}
    for name, tensor in teacher.state_dict().items():
        if (match := _LAYER.fullmatch(name)) is not None:
            if int(match[2]) not in kept:
                continue
            name = f"{match[1]}{kept.index(int(match[2]))}{match[3]}"
        weights[name] = tensor
    if isinstance(student.config, DistilBertConfig) and teacher.config.model_type == "bert":
        types = weights["bert.embeddings.token_type_embeddings.weight"]
        positions = "bert.embeddings.position_embeddings.weight"
        weights[positions] = weights[positions] + types[0]
        weights = {_distilbert_name(name): tensor for name, tensor in weights.items()}
    student.load_state_dict({name: weights[name] for name in student.state_dict()})
    return student


def _distilbert_name(name: str) -> str:
    for theirs, own in DISTILBERT:
        name = name.replace(theirs, own)
    return name


def _student_config(teacher: PreTrainedConfig, kept: list[int], dropout: float) -> PreTrainedConfig:
    """Return the sizes of a student: a BERT's is a DistilBERT (Sanh et al. 2019, section 3)."""
    if teacher.model_type == "bert":
        return DistilBertConfig(
            vocab_size=teacher.vocab_size,
            dim=teacher.hidden_size,
            hidden_dim=teacher.intermediate_size,
            n_layers=len(kept),
            n_heads=teacher.num_attention_heads,
            activation=teacher.hidden_act,
            max_position_embeddings=teacher.max_position_embeddings,
            pad_token_id=teacher.pad_token_id,
            dropout=dropout,
            attention_dropout=dropout,
        )
    config = deepcopy(teacher)
    if (types := getattr(config, "layer_types", None)) is not None:
        config.layer_types = [types[number] for number in kept]
    config.num_hidden_layers = len(kept)
    set_dropout(config, dropout)
    return config


class Distillation(nn.Module):
    """The student's losses. The teacher is neither trained nor saved."""

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: Any,
        recipe: DistillRecipe,
        kept: KeptEmbeddings | None = None,
    ) -> None:
        super().__init__()
        self.network = student
        self._recipe = recipe
        self._teacher = [teacher.eval().requires_grad_(False)]  # in a list: not a submodule
        self._kept = kept

    def forward(self, batch: TextBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the weighted sum of the losses, and figures.

        The losses are: soft targets at the chosen tokens, masked tokens, the cosine distance of
        every real token's hidden states and, if the recipe asks, the cosine distance of the
        sentence embeddings.
        """
        recipe = self._recipe
        with torch.no_grad():
            teacher = run_masked(self._teacher[0], batch)
        student = run_masked(self.network, batch)
        targets, logits = teacher.logits.float(), student.logits.float()
        mlm_loss, figures = masked_loss(logits, batch.labels)
        soft_loss = F.kl_div(
            (logits / recipe.temperature).log_softmax(-1),
            (targets / recipe.temperature).log_softmax(-1),
            reduction="batchmean",
            log_target=True,
        )
        cosines = F.cosine_similarity(student.hidden.float(), teacher.hidden.float(), dim=-1)
        cosine_loss = 1 - (cosines * batch.attention_mask).sum() / batch.attention_mask.sum()
        loss = (
            recipe.soft_weight * recipe.temperature**2 * soft_loss
            + recipe.masked_weight * mlm_loss
            + recipe.cosine_weight * cosine_loss
        )
        agreement = (logits.argmax(1) == targets.argmax(1)).float().mean()
        figures |= {"soft_loss": soft_loss, "cosine_loss": cosine_loss, "agreement": agreement}
        if self._kept is not None:
            loss = loss + self._kept.loss(self.network.base_model, batch, figures)
        return loss, figures


def distill(teacher: Folder, files: list[Path], recipe: DistillRecipe, options: RunOptions) -> Path:
    """Distil a model on text, and return the folder of the student.

    Raises:
        TrainError: the teacher has no masked-LM head, the recipe does not suit the teacher, an
            input is unsuitable, or the run fails, see `train`.
    """
    network: Any
    network, new = teacher.load(AutoModelForMaskedLM, seed=recipe.seed)
    if new:
        raise TrainError("the teacher has no masked-language-model head, which distillation needs")
    longest, limit = max(phase.tokens for phase in recipe.phases), max_tokens(network)
    if longest > limit:
        raise TrainError(f"a phase of {longest} tokens exceeds the teacher's {limit} positions")
    inputs = {"teacher": teacher.weights_sha256, "text": fingerprint(files)}
    acquire_run_dir(options.run_dir, recipe, inputs)
    student = make_student(network, recipe.dropout)
    options.report(
        f"a {student.config.model_type} of {student.num_parameters():,} parameters "
        f"from a teacher of {network.num_parameters():,}"
    )
    kept = kept_embeddings(teacher, recipe.pretraining, options.device)
    module = Distillation(student, network.to(options.device), recipe, kept)
    objective = text_objective(module, files, recipe, teacher, options)
    train(objective, options, recipe)
    tokenizer = teacher.tokenizer
    if not has_token_types(student.config):
        names = ["input_ids", "attention_mask"]
        tokenizer = AutoTokenizer.from_pretrained(teacher.path, model_input_names=names)
    title = "An encoder distilled from one of twice its layers"
    run = Run(title, teacher, files, recipe, options)
    return write_run(with_modules(student, teacher), tokenizer, run)
