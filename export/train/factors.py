"""Word embeddings of a lower rank: a BERT as an ELECTRA, whose embeddings are projected.

Sources: Lan et al. 2020, "ALBERT", section 3.1; Eckart & Young 1936 (the SVD is the best
approximation of a rank); Clark et al. 2020 (the layout).
Shapes: V rows of a table, H hidden size, E embedding size, M chosen tokens.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from cloze.export.errors import TrainError
from cloze.export.families import FAMILIES
from cloze.export.heads import MASKED_LM
from cloze.export.model import Model
from cloze.export.train.batches import TextBatch
from cloze.model_store.heads import sequence_classification

_LINEAR = 3.0
"""Deviations by which the bias of the head moves its inputs to where GELU is almost linear."""


def with_rank(model: Model, rank: int, dropout: float) -> tuple[Model, list[str]]:
    """Return a model with embeddings of a rank, and the heads that it lost.

    BERT normalises the sum x of three embeddings: LN(x) = gamma * x / sd(x) + beta, if each row has
    mean 0, which LN permits. The rows become their ``rank - 1`` coordinates of largest singular
    value, turned so that each row has mean 0 again. The projection turns them back, and has gamma
    and beta. So nothing is lost but the small singular values.

    Raises:
        TrainError: the family is another, the embeddings are factorised, or the rank is not less
            than the hidden size.
    """
    config = model.config
    if (factorised := FAMILIES[config.family].factorised) is None:
        able = ", ".join(name for name, each in FAMILIES.items() if each.factorised)
        raise TrainError(f"a {config.family} cannot be factorised, only a {able}")
    if not 2 <= rank < config.hidden_size:
        raise TrainError(
            f"the rank is {rank}; it must be 2 to {config.hidden_size - 1}, less than the hidden "
            "size"
        )
    narrow = replace(config, family=factorised, embedding_size=rank, dropout=dropout)
    heads = {name for name, module in model.named_children() if name != "encoder"}
    kept = heads & (FAMILIES[factorised].heads.keys() - {sequence_classification.HEAD.name})
    smaller = Model(narrow, kept, model.options)
    unchanged = ("encoder.layers.", *(f"{head}." for head in kept - {MASKED_LM}))
    weights = {
        name: tensor.clone()
        for name, tensor in model.state_dict().items()
        if name.startswith(unchanged)
    }
    smaller.load_state_dict(weights | _narrow_embeddings(model, rank), strict=False)
    return smaller, sorted(heads - kept)


@torch.no_grad()
def _narrow_embeddings(model: Model, rank: int) -> dict[str, Tensor]:
    """Return the tensors of the narrow embeddings and of their projection."""
    embeddings = model.encoder.embeddings
    tables = embeddings.tables()
    wide = [
        (table.weight - table.weight.mean(1, keepdim=True)).double() for table in tables.values()
    ]
    basis = main_directions(torch.cat(wide), rank - 1) @ turned_from_mean(rank)  # [H, E]
    modules = {id(module): name for name, module in embeddings.named_children()}
    weights = {
        f"encoder.embeddings.{modules[id(table)]}.weight": (rows @ basis).float()
        for table, rows in zip(tables.values(), wide, strict=True)
    }
    norm, size = embeddings.norm, model.config.hidden_size
    scale = (size / rank) ** 0.5  # of the deviations over H and over E numbers
    weights["encoder.embeddings.norm.weight"] = torch.ones(rank)
    weights["encoder.embeddings.norm.bias"] = torch.zeros(rank)
    projection = norm.weight[:, None] * basis.float() * scale
    weights["encoder.embeddings.projection.weight"] = projection
    weights["encoder.embeddings.projection.bias"] = norm.bias.clone()
    return weights


def main_directions(rows: Tensor, rank: int) -> Tensor:
    """Return the right singular vectors [H, rank] of the largest singular values."""
    vectors: Tensor = torch.linalg.eigh(rows.T @ rows).eigenvectors  # the largest last
    return vectors.flip(1)[:, :rank]


def turned_from_mean(size: int) -> Tensor:
    """Return orthonormal rows [size - 1, size] that each have mean 0 (Helmert's matrix)."""
    rows = torch.tril(torch.ones(size - 1, size, dtype=torch.float64))
    numbers = torch.arange(1, size, dtype=torch.float64)
    rows[torch.arange(size - 1), torch.arange(1, size)] = -numbers
    turned: Tensor = rows / (numbers * (numbers + 1)).sqrt()[:, None]
    return turned


@torch.no_grad()
def fit_masked_lm(smaller: Model, whole: Model, batches: Iterable[TextBatch]) -> None:
    """Set the first weights of the narrow masked-LM head by least squares.

    The logits of the whole model are products with the wide embeddings. The head starts as the
    linear map whose products with the narrow ones are closest, without the activation: a bias
    moves its inputs to where the activation is almost linear. Training brings the activation back.
    """
    new, old = smaller.masked_lm, whole.masked_lm
    assert new is not None
    assert old is not None
    inputs, targets = [], []
    narrow, wide = new.decoder.weight.double(), old.decoder.weight.double().cpu()
    gram = narrow.T @ narrow
    ridge = 1e-6 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    to_narrow = torch.linalg.solve(gram + ridge, narrow.T @ wide)  # [E, H]
    for batch in batches:
        hidden = whole(batch.input_ids, batch.token_type_ids, batch.attention_mask)
        rows = hidden.flatten(0, 1)[batch.positions]
        inputs.append(rows.double().cpu())
        transformed = old.norm(old.activation.forward(old.transform(rows)))
        targets.append(transformed.double().cpu() @ to_narrow.T)
    x, y = torch.cat(inputs), torch.cat(targets)
    x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    penalty = 1e-3 * (x.T @ x).diagonal().mean() * torch.eye(x.shape[1], dtype=x.dtype)
    linear = torch.linalg.solve(x.T @ x + penalty, x.T @ y).T  # [E, H + 1]
    fitted = x @ linear.T
    size, mean = fitted.std(), fitted.mean(0)
    new.transform.weight.copy_(linear[:, :-1] / size)
    new.transform.bias.copy_((linear[:, -1] - mean) / size + _LINEAR)
    new.norm.weight.fill_(float((fitted - mean).std()))
    new.norm.bias.copy_(mean)
    new.decoder.bias.copy_(old.decoder.bias)
