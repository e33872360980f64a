"""Writes a trained model as a Hugging Face checkpoint, and the model card of a run.

Both `cloze.export.checkpoint` and transformers can read the checkpoint. A card has the licence,
source, data, recipe, hardware and results of a run; a person adds the assessment of the model.
"""

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import models, normalizers

from cloze.export.blocks.config import EncoderConfig
from cloze.export.checkpoint import Checkpoint
from cloze.export.embedding_recipe import POOLING_FLAGS, EmbeddingRecipe
from cloze.export.embedding_steps import Step, UnitLength
from cloze.export.families import FAMILIES
from cloze.export.families.pruned import write_pruned
from cloze.export.heads import EXPORT_HEADS
from cloze.export.model import Model
from cloze.export.model_loading import HEAD_SECTIONS
from cloze.export.tokenizer import CheckpointTokenizer
from cloze.export.train.progress import read_log
from cloze.export.train.recipe import Recipe
from cloze.export.train.run_dir import CHECKPOINT
from cloze.export.train.run_options import RunOptions
from cloze.export.train.vocabulary import save_vocabulary
from cloze.model_store.plain_files import replacing

_AS_SAVED = "PreTrainedTokenizerFast"
"""The class of transformers that reads ``tokenizer.json`` as it is.

Others rebuild the normaliser, the marks and the special tokens of pairs from their own defaults.
"""


def save_checkpoint(
    model: Model,
    tokenizer: CheckpointTokenizer,
    folder: Path,
    *,
    embedding: EmbeddingRecipe | None = None,
) -> None:
    """Write ``config.json``, ``model.safetensors`` and the tokenizer's files.

    Args:
        folder: folder of the checkpoint; files of the same names are replaced.
        embedding: recipe that makes the checkpoint a sentence-transformer; None: it is none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    family, config = FAMILIES[model.config.family], model.config
    _write_json(
        folder / "config.json",
        family.write_config(config)
        | write_pruned(config)
        | _head_settings(model)
        | {"architectures": [_architecture(model)], "dtype": "float32"},
    )
    _write_weights(model, folder)
    save_vocabulary(tokenizer.tokenizer, folder)
    is_wordpiece = isinstance(tokenizer.tokenizer.model, models.WordPiece)
    tokenizer_config = {
        "tokenizer_class": family.wordpiece.name
        if is_wordpiece and family.wordpiece
        else _AS_SAVED,
        "model_max_length": config.max_positions,
    }
    _write_json(
        folder / "tokenizer_config.json",
        tokenizer_config
        | dict(tokenizer.special_tokens)
        | _normaliser_settings(tokenizer.tokenizer.normalizer),
    )
    if embedding is not None:
        _write_sentence_transformer(folder, config, embedding)


def _architecture(model: Model) -> str:
    """Return the class of transformers that has the model's heads, or else that of its encoder.

    A head whose tensors do not say what it is, such as a classifier, always has its class.
    """
    family = FAMILIES[model.config.family]
    heads = _written_heads(model)
    if heads in family.classes:
        return family.classes[heads]
    named = [head.architecture for name, head in EXPORT_HEADS.items() if name in heads]
    return family.class_prefix + next(filter(None, named), "Model")


def _written_heads(model: Model) -> frozenset[str]:
    """Return the names of a model's heads whose tensors are among the family's."""
    return frozenset(
        name
        for name, head in EXPORT_HEADS.items()
        if head.read is None and getattr(model, name, None) is not None
    )


def _head_settings(model: Model) -> dict[str, Any]:
    """Return the settings of ``config.json`` that describe the heads, such as labels.

    transformers' settings describe one head with one set of labels. With more, they describe the
    first head with all its labels, and a section of our own describes each.
    """
    settings: dict[str, Any] = {}
    for name, options in reversed(model.options.items()):
        if (write := EXPORT_HEADS[name].write_options) is not None:
            settings |= write(options)
    has_more = len(settings) and (
        len(model.options) > 1
        or any(options.further for options in model.options.values())
        or any(each.temperature for options in model.options.values() for each in options.sets)
    )
    if has_more:
        settings[HEAD_SECTIONS] = {
            name: options.model_dump(mode="json") for name, options in model.options.items()
        }
    return settings


def _write_weights(model: Model, folder: Path) -> None:
    """Write ``model.safetensors`` atomically, so that a full disk leaves the previous weights."""
    parameters = {
        name: parameter.detach().float().cpu()
        for name, parameter in model.named_parameters()
        if (head := EXPORT_HEADS.get(name.partition(".")[0])) is None or head.read is None
    }
    written = FAMILIES[model.config.family].write(parameters, model.config)
    tensors = {name: tensor.contiguous() for name, tensor in written.items()}
    with replacing(folder / "model.safetensors") as new_file:
        # safetensors' `save_file` would create a file that only its owner can read.
        new_file.write_bytes(save(tensors, metadata={"format": "pt"}))


def _normaliser_settings(normaliser: normalizers.Normalizer | None) -> dict[str, Any]:
    """Return the settings of transformers' normaliser, which overrides ``tokenizer.json``."""
    if not isinstance(normaliser, normalizers.BertNormalizer):
        return {}
    return {
        "do_lower_case": normaliser.lowercase,
        "strip_accents": normaliser.strip_accents,
        "tokenize_chinese_chars": normaliser.handle_chinese_chars,
    }


def _write_sentence_transformer(
    folder: Path, config: EncoderConfig, embedding: EmbeddingRecipe
) -> None:
    """Write the files that `embedding_recipe.read_recipe` and sentence-transformers read."""
    modules = {"": "Transformer", "1_Pooling": "Pooling"}
    steps = [*embedding.steps, *([UnitLength()] if embedding.normalize else [])]
    for number, step in enumerate(steps, 2):
        modules[f"{number}_{step.kind}"] = step.kind
        _write_step(step, folder / f"{number}_{step.kind}")
    entries = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (path, kind) in enumerate(modules.items())
    ]
    _write_json(folder / "modules.json", entries)
    tokens = min(embedding.max_tokens or config.max_positions, config.max_positions)
    _write_json(
        folder / "sentence_bert_config.json", {"max_seq_length": tokens, "do_lower_case": False}
    )
    for path in filter(None, modules):
        (folder / path).mkdir(exist_ok=True)
    # All flags: text-embeddings-inference refuses a file that lacks one.
    flags = {flag: pooling == embedding.pooling for flag, pooling in POOLING_FLAGS.items()}
    _write_json(
        folder / "1_Pooling/config.json", {"word_embedding_dimension": config.hidden_size, **flags}
    )
    if embedding.prompts:
        prompts = {"prompts": embedding.prompts, "default_prompt_name": embedding.default_prompt}
        _write_json(folder / "config_sentence_transformers.json", prompts)


def _write_step(step: Step, folder: Path) -> None:
    """Write the folder of a module after the pooling."""
    folder.mkdir(exist_ok=True)
    settings, tensors = step.saved()
    if tensors:
        _write_json(folder / "config.json", settings)
        plain = {name: tensor.detach().float().cpu() for name, tensor in tensors.items()}
        with replacing(folder / "model.safetensors") as new_file:
            new_file.write_bytes(save({name: t.contiguous() for name, t in plain.items()}))


def _write_json(file: Path, data: Any) -> None:
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


CARD = "README.md"


@dataclass(frozen=True, slots=True)
class Run:
    """What a card says about a run.

    Attributes:
        step: number of steps after which the run had the weights; None: all.
        figures: further rows of the card's table.
    """

    title: str
    source: str | None
    origins: Sequence[Checkpoint]
    files: Sequence[Path]
    recipe: Recipe
    options: RunOptions
    step: int | None = None
    figures: Mapping[str, str] = field(default_factory=dict)


def common_license(checkpoints: Iterable[Checkpoint]) -> str | None:
    """Return the licence that the cards of all checkpoints name; None if they do not agree."""
    licenses = {checkpoint.license for checkpoint in checkpoints}
    return licenses.pop() if len(licenses) == 1 else None


def front_matter(license_name: str | None) -> str:
    """Return the lines before the heading of a card, from which an export reads the licence."""
    return f"---\nlicense: {license_name}\n---\n\n" if license_name else ""


def finish_run(
    model: Model,
    tokenizer: CheckpointTokenizer,
    run: Run,
    embedding: EmbeddingRecipe | None = None,
) -> Path:
    """Write the checkpoint of a run with its card, and return its folder; see `save_checkpoint`."""
    checkpoint = run.options.run_dir / CHECKPOINT
    save_checkpoint(model, tokenizer, checkpoint, embedding=embedding)
    entries = read_log(checkpoint.parent)
    last_entry = [each for each in entries if run.step is None or each["step"] <= run.step][-1]
    figures = {
        name: value
        for name, value in last_entry.items()
        if name.startswith("held_out_") or name in ("loss", "accuracy")
    }
    rows = {
        "from": run.source or "nothing: random weights",
        "data": ", ".join(file.name for file in run.files),
        "seed": str(run.recipe.seed),
        "steps": f"{last_entry['step']:,}",
        "tokens seen": f"{last_entry['tokens_seen']:,}",
        "hours": f"{last_entry['seconds'] / 3600:.2f}",
        "hardware": _hardware(run.options.device),
        "torch": torch.__version__,
    } | {name.replace("_", " "): f"{value:.4f}" for name, value in figures.items()}
    rows |= run.figures
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    recipe_json = run.recipe.model_dump_json(indent=2)
    license_name = run.options.license or common_license(run.origins)
    heading = f"{front_matter(license_name)}# {run.title}"
    (checkpoint / CARD).write_text(
        f"{heading}\n\n| | |\n|---|---|\n{table}\n\nRecipe:\n\n```json\n{recipe_json}\n```\n",
        encoding="utf-8",
    )
    return checkpoint


def _hardware(device: torch.device) -> str:
    """Return the name of the GPU, or the processor's name and the number of cores in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    model = platform.processor() or platform.machine()
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return f"{torch.get_num_threads()} cores of {model}"
