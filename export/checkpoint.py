"""Loads what exists: a Hugging Face or sentence-transformers directory, or a hub id, becomes a torch `Model`.

Every tensor of ours is filled from exactly one of the checkpoint's, in shape, finite; otherwise nothing is loaded.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from export.errors import ExportError
from export.models import FAMILIES, EncoderConfig, Family, Head, Model
from export.models.activations import ACTIVATIONS
from export.sentence import EmbeddingRecipe, encoder_folder, read_recipe
from export.settings_files import read_settings
from export.source import locate
from export.tensors import read_tensors, sha256_of, weight_files
from export.tokenizer import CheckpointTokenizer, load_tokenizer
from model_store.manifest import Source, Task

TASK_OF_HEAD = {Head.MASKED_LM: Task.FILL_MASK, Head.NEXT_SENTENCE: Task.NSP, Head.SPAN: Task.QA}

_ENCODER_PREFIXES = ("embeddings.", "encoder.", "transformer.")
"""How the names of an encoder's tensors begin, its family's prefix removed."""

_PADDING_ROWS = 127
"""How many rows an embedding may have beyond the vocabulary: it is often padded to a multiple of up to 128."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        model: in evaluation mode, float32, with the heads the checkpoint has.
        tasks: what it can be exported for.
        default_tasks: what it is exported for unless asked otherwise.
        license: as the model card's front matter names it.
        card: the model card, if there is one.
        notes: what its user should know (missing heads, guesses), a line each.
    """

    model: Model
    tokenizer: CheckpointTokenizer
    recipe: EmbeddingRecipe
    tasks: tuple[Task, ...]
    default_tasks: tuple[Task, ...]
    source: Source
    license: str | None
    card: str | None
    notes: tuple[str, ...]


def load_checkpoint(source: str, revision: str | None = None) -> Checkpoint:
    """Load a checkpoint.

    Args:
        source: a directory, or a hub id.
        revision: the hub's branch, tag or commit.

    Raises:
        ExportError: it cannot be loaded, or not wholly.
    """
    files = locate(source, revision)
    recipe = read_recipe(files.folder)
    folder = encoder_folder(files.folder)
    family, config = _read_config(folder)
    weights = weight_files(folder)
    tokenizer = load_tokenizer(folder)
    _check_vocabulary(tokenizer, config)

    model, notes = _fill(read_tensors(weights), family, config)
    if model.masked_lm is not None:
        if tokenizer.mask_id is None:
            raise ExportError("the checkpoint has a masked-language-model head, but its tokenizer has no [MASK] token")
        # Rows beyond the vocabulary stand for no token: they must never be predicted.
        model.masked_lm.decoder.bias.data[tokenizer.size :] = torch.finfo(torch.float32).min / 2
    if tokenizer.note:
        notes.append(tokenizer.note)

    card_file = files.folder / "README.md"
    card = card_file.read_text(encoding="utf-8", errors="replace") if card_file.is_file() else None
    heads = [task for head, task in TASK_OF_HEAD.items() if getattr(model, head) is not None]
    return Checkpoint(
        model=model.eval(),
        tokenizer=tokenizer,
        recipe=recipe or EmbeddingRecipe(),
        tasks=(*heads, Task.EMBED),
        # An encoder tuned for answers is not one for embeddings, unless it says so.
        default_tasks=(Task.QA,) if heads == [Task.QA] and recipe is None else (*heads, Task.EMBED),
        source=Source(kind=files.kind, location=files.location, revision=files.revision, weights_sha256=sha256_of(weights)),
        license=_license(card),
        card=card,
        notes=tuple(notes),
    )


def _read_config(folder: Path) -> tuple[Family, EncoderConfig]:
    settings = read_settings(folder / "config.json")
    if not settings:
        raise ExportError(f"{folder} holds no config.json")
    kind = settings.get("model_type")
    if kind not in FAMILIES:
        raise ExportError(f"architecture {kind!r} is not supported (config.json's model_type: {', '.join(FAMILIES)})")
    if settings.get("quantization_config"):
        raise ExportError("the checkpoint is quantised (config.json's quantization_config); export the original weights")
    try:
        config = FAMILIES[kind].read_config(settings)
    except KeyError as error:
        raise ExportError(f"config.json does not give {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        at = f"{first['loc'][0]}: {first['msg']}, got {first['input']!r}" if first["loc"] else first["msg"]
        raise ExportError(f"config.json: {at}") from error
    except ValueError as error:
        raise ExportError(f"config.json: {error}") from error
    if config.activation not in ACTIVATIONS:
        raise ExportError(f"activation {config.activation!r} is not supported ({', '.join(ACTIVATIONS)})")
    return FAMILIES[kind], config


def _check_vocabulary(tokenizer: CheckpointTokenizer, config: EncoderConfig) -> None:
    rows, size = config.vocab_size, tokenizer.size
    if size > rows or rows - size > _PADDING_ROWS:
        raise ExportError(f"the tokenizer has {size} tokens, but the embedding has {rows} rows: they do not belong together")


def _fill(tensors: Mapping[str, Tensor], family: Family, config: EncoderConfig) -> tuple[Model, list[str]]:
    """Build the model with the heads whose tensors are there, and fill it."""
    found: dict[str, tuple[str, Tensor]] = {}
    unknown: list[str] = []
    for theirs, tensor in tensors.items():
        ours = family.rename(theirs)
        if ours is None:
            if not theirs.endswith("position_ids"):
                unknown.append(theirs)
        elif ours in found and not torch.equal(found[ours][1], tensor):
            raise ExportError(f"{theirs} and {found[ours][0]} should be one tensor, but differ")
        else:
            found[ours] = (theirs, tensor)

    notes = []
    heads = []
    for head in Head:
        there, note = _look_for_head(head, found, family)
        if there:
            heads.append(head)
        if note:
            notes.append(note)
    with torch.device("meta"):
        model = Model(config, heads)
    wanted = dict(model.named_parameters())  # tied weights appear once, under the encoder's name
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ExportError(_describe_missing(missing, unknown, family))
    state = {name: _checked(name, *found[name], parameter.shape) for name, parameter in wanted.items()}
    if Head.MASKED_LM in heads:
        _check_tied(found)
    if foreign := [name for name in unknown if name.removeprefix(family.prefix).startswith(_ENCODER_PREFIXES)]:
        raise ExportError(f"{foreign[0]} is part of the encoder, but no {family.name} has it: it would be left out silently")
    extra_layers = [
        theirs for ours, (theirs, _) in found.items() if re.match(r"encoder\.layers\.\d+\.", ours) and ours not in wanted
    ]
    if extra_layers:
        raise ExportError(f"the checkpoint has {extra_layers[0]}, but config.json names only {config.layers} layers")
    model.load_state_dict(state, strict=False, assign=True)
    if model.masked_lm is not None:
        model.masked_lm.decoder.weight = model.encoder.embeddings.word.weight
    if ignored := sorted({name.split(".")[0] for name in unknown}):
        notes.append(f"ignored tensors of no known head: {', '.join(ignored)}")
    return model, notes


_HEAD_TENSORS = {
    Head.MASKED_LM: ("transform.weight", "transform.bias", "norm.weight", "norm.bias", "decoder.bias"),
    Head.NEXT_SENTENCE: ("pooler.weight", "pooler.bias", "classifier.weight", "classifier.bias"),
    Head.SPAN: ("classifier.weight", "classifier.bias"),
}


def _look_for_head(head: Head, found: Mapping[str, tuple[str, Tensor]], family: Family) -> tuple[bool, str | None]:
    """Whether the checkpoint has this head, and what to say if it has it only in part."""
    there = [name for name in _HEAD_TENSORS[head] if f"{head}.{name}" in found]
    task = TASK_OF_HEAD[head]
    if len(there) == len(_HEAD_TENSORS[head]):
        return True, None
    if not there:
        return False, f"{task} is not offered: the checkpoint has no tensors for it"
    if head is Head.NEXT_SENTENCE and all(name.startswith("pooler") for name in there):
        return False, f"{task} is not offered: the checkpoint has a pooler but no next-sentence classifier"
    if head is Head.NEXT_SENTENCE and all(name.startswith("classifier") for name in there):
        return False, f"{task} is not offered: the checkpoint has a next-sentence classifier but no pooler"
    absent = [name for name in _HEAD_TENSORS[head] if name not in there]
    raise ExportError(f"the {family.name} checkpoint's {task} head lacks {', '.join(absent)}: a tensor is missing or renamed")


def _describe_missing(missing: list[str], unknown: list[str], family: Family) -> str:
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    if len(unknown) > 3:
        seen = f"; it has {', '.join(sorted(unknown)[:3])} and {len(unknown) - 3} more that no {family.name} has"
    else:
        seen = f"; it has {', '.join(sorted(unknown))}, which no {family.name} has" if unknown else ""
    return f"the checkpoint lacks {missing[0]}{more}: a tensor is missing or renamed{seen}"


def _checked(ours: str, theirs: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    if tensor.shape != shape:
        raise ExportError(f"{theirs} has shape {list(tensor.shape)}, but config.json's sizes ask for {list(shape)}")
    if not tensor.is_floating_point():
        raise ExportError(f"{theirs} holds {tensor.dtype}, not floating-point weights")
    tensor = tensor.float().contiguous()
    if not torch.isfinite(tensor).all():
        raise ExportError(f"{theirs} (our {ours}) holds NaN or infinity")
    return tensor


def _check_tied(found: Mapping[str, tuple[str, Tensor]]) -> None:
    decoder = found.get("masked_lm.decoder.weight")
    if decoder is not None and not torch.equal(decoder[1], found["encoder.embeddings.word.weight"][1]):
        raise ExportError(f"{decoder[0]} differs from the word embeddings; only tied decoders are supported")


def _license(card: str | None) -> str | None:
    """``license:`` of the model card's front matter."""
    front = re.match(r"---\n(.*?)\n---", card or "", re.DOTALL)
    found = re.search(r"^license:[ \t]+([\w.+-]*\w)[ \t]*$", front[1], re.MULTILINE) if front else None
    return found[1] if found else None
