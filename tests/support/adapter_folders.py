"""Adapters as folders of PEFT, with random numbers, and their results by transformers."""

import copy
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import nn
from transformers import BertForPreTraining

LABELS = ("bad", "good", "unknown")


@dataclass
class Recipe:
    """An adapter to write.

    Attributes:
        targets: ends of the names of layers with low-rank matrices.
        head: names of modules of the head with the sizes of their weights, which are saved.
    """

    seed: int
    rank: int = 4
    targets: tuple[str, ...] = ("query", "value")
    task: str = "FEATURE_EXTRACTION"
    head: dict[str, tuple[int, int]] = field(default_factory=dict)
    labels: tuple[str, ...] = LABELS
    config: dict[str, Any] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)


def classifier(seed: int, size: int = 64, **others: Any) -> Recipe:
    """Return the recipe of a classifier of texts."""
    return Recipe(seed, task="SEQ_CLS", head={"classifier": (3, size)}, **others)


def write(folder: Path, recipe: Recipe, base: BertForPreTraining) -> Path:
    """Write an adapter of a base; return its folder."""
    rng = np.random.default_rng(recipe.seed)
    tensors = {}
    for name, layer in base.bert.named_modules():
        if isinstance(layer, nn.Linear) and any(name.endswith(t) for t in recipe.targets):
            kind = name.rpartition(".")[2]
            rank = recipe.ranks.get(kind, recipe.rank)
            start = f"base_model.model.bert.{name}.lora_"
            tensors[f"{start}A.weight"] = rng.normal(0, 0.3, (rank, layer.in_features))
            tensors[f"{start}B.weight"] = rng.normal(0, 0.3, (layer.out_features, rank))
    for name, (rows, columns) in recipe.head.items():
        tensors[f"base_model.model.{name}.weight"] = rng.normal(0, 0.3, (rows, columns))
        tensors[f"base_model.model.{name}.bias"] = rng.normal(0, 0.3, rows)
    config = {
        "peft_type": "LORA", "task_type": recipe.task, "base_model_name_or_path": "base",
        "r": recipe.rank, "lora_alpha": 8, "target_modules": list(recipe.targets),
        "modules_to_save": list(recipe.head) or None, "rank_pattern": recipe.ranks,
        "bias": "none", "use_dora": False,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config | recipe.config))
    floats = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    save_file(floats, folder / "adapter_model.safetensors")
    if recipe.head:
        labels = dict(enumerate(recipe.labels))
        (folder / "config.json").write_text(json.dumps({"id2label": labels}))
    return folder


def merged(folder: Path, base: BertForPreTraining) -> tuple[BertForPreTraining, dict[str, Any]]:
    """Return a copy of the base with the products of an adapter in its weights, and its tensors."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    model = copy.deepcopy(base).eval()
    with torch.no_grad():
        for name, b in tensors.items():
            if not name.endswith(".lora_B.weight"):
                continue
            path = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
            rank = b.shape[1]
            scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
            a = tensors[name.replace("lora_B", "lora_A")]
            model.get_submodule(path).weight += scale * b @ a
    return model, tensors


@torch.no_grad()
def logits(folder: Path, base: BertForPreTraining, ids: np.ndarray, *, tokens: bool) -> np.ndarray:
    """Return the logits of an adapter's head for one sequence: [L], or [S, L] of all tokens."""
    model, tensors = merged(folder, base)
    output = model.bert(torch.from_numpy(ids.astype(np.int64))[None])
    rows = output.last_hidden_state[0] if tokens else output.pooler_output
    weight, bias = (tensors[f"base_model.model.classifier.{p}"] for p in ("weight", "bias"))
    result = (rows @ weight.T + bias).numpy()
    return result if tokens else result[0]


@torch.no_grad()
def embedding(folder: Path | None, base: BertForPreTraining, ids: np.ndarray) -> np.ndarray:
    """Return the mean of the last hidden states of one sequence."""
    model = merged(folder, base)[0] if folder else base.eval()
    hidden = model.bert(torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0]
    return hidden.mean(0).numpy()
