"""Hugging Face folders: what training reads, and what it leaves for the export to read.

What is trained is a model of transformers, from ``from_pretrained`` to ``save_pretrained``. Nothing
is unpickled, and no code of a folder runs.
"""

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub import metadata_load, snapshot_download
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from cloze.export.errors import TrainError
from cloze.model_store.error_lines import first_line
from cloze.model_store.plain_files import sha256_of
from cloze.model_store.sequences import SpecialTokens

CARD: Final = "README.md"

_HUB = "hub:"
_DOWNLOADED: Final = ("*.json", "*.safetensors", "*.txt", "*.model", CARD)
_SKIPPED: Final = ("onnx/*", "openvino/*")
_TOKENIZERS: Final = ("tokenizer.json", "vocab.*", "*.model")
MODULES: Final = "modules.json"


@dataclass(frozen=True)
class Folder:
    """A model of transformers, as a folder or a repository of the hub has it.

    Attributes:
        location: the folder, or the hub id.
        revision: the hub's commit; None for a folder.
        path: the folder with ``config.json``, the weights and the tokenizer.
        card: the folder with the model card, which is another one for a sentence-transformer whose
            encoder has a folder of its own.
    """

    location: str
    revision: str | None
    path: Path
    card: Path

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The sizes and the labels.

        Raises:
            TrainError: ``config.json`` is missing or damaged, or names no class of transformers.
        """
        if not (self.path / "config.json").is_file():
            raise TrainError(f"{self.path} holds no config.json")
        with one_line_errors(self.path):
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                self.path, trust_remote_code=False
            )
        return config

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, to be saved again.

        Raises:
            TrainError: the tokenizer is missing or damaged.
        """
        if not any(file for name in _TOKENIZERS for file in self.path.glob(name)):
            raise TrainError(
                f"{self.path} cannot be loaded: it holds no {' or '.join(_TOKENIZERS)}"
            )
        with one_line_errors(self.path):
            tokenizer = AutoTokenizer.from_pretrained(self.path, trust_remote_code=False)
        if not tokenizer.is_fast:
            raise TrainError(f"{self.path} has no tokenizer that runs without its own code")
        return tokenizer

    @cached_property
    def text(self) -> Tokenizer:
        """The tokenizer that turns texts into ids, without truncation and padding."""
        backend: Tokenizer = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return backend

    @cached_property
    def special(self) -> SpecialTokens:
        """The special tokens and their places around texts.

        Raises:
            TrainError: they do not stand before, between and after the texts.
        """
        pair = self.text.encode("a", "a")
        kinds = pair.sequence_ids
        if kinds[0] is not None or kinds[-1] is not None or kinds[1] != 0 or 1 not in kinds:
            raise TrainError(
                f"{self.path}: the tokenizer puts no special tokens around a text and a pair"
            )
        second = kinds.index(1)
        has_types = "token_type_ids" in self.tokenizer.model_input_names
        return SpecialTokens(
            pair.ids[0],
            pair.ids[-1],
            self.tokenizer.mask_token_id,
            separators=kinds[1:second].count(None),
            second_type=pair.type_ids[second] if has_types else 0,
        )

    @cached_property
    def weights_sha256(self) -> str:
        """The hash of the files of the weights, in the order of their names."""
        return sha256_of(*self.weights)

    @property
    def weights(self) -> list[Path]:
        """The files of the weights: one file, or the shards of an index.

        Raises:
            TrainError: there are none in the format safetensors, or a shard is missing.
        """
        file = self.path / "model.safetensors"
        index = file.with_name(f"{file.name}.index.json")
        if file.is_file() or not index.is_file():
            files = [file]
        else:
            with one_line_errors(index):
                names = set(json.loads(index.read_bytes())["weight_map"].values())
                files = [self.path / name for name in sorted(names)]
        missing = next((each for each in files if not each.is_file()), None)
        if missing == file:
            is_pickled = any(self.path.glob("pytorch_model*.bin"))
            why = "pytorch_model.bin is never loaded, since it can run code: " if is_pickled else ""
            raise TrainError(f"{self.path} holds no weights: {why}it needs model.safetensors")
        if missing:
            raise TrainError(
                f"{self.path} cannot be loaded: {index.name} names {missing.name}, which is missing"
            )
        return files

    def has_tensor(self, part: str) -> bool:
        """Return whether the name of a tensor contains a part."""
        names: list[str] = []
        for file in self.weights:
            with one_line_errors(self.path), safe_open(file, "pt") as tensors:
                names += tensors.keys()
        return any(part in name for name in names)

    @cached_property
    def license(self) -> str | None:
        """The licence that the model card names; None: it names none."""
        if not (self.card / CARD).is_file():
            return None
        with one_line_errors(self.card):
            name = (metadata_load(self.card / CARD) or {}).get("license")
        return name if isinstance(name, str) else None

    def load(
        self, auto_class: Any, *, seed: int, dropout: float | None = None, **settings: Any
    ) -> tuple[PreTrainedModel, set[str]]:
        """Return the model of a class in float32, and the names of its weights that are new.

        Args:
            auto_class: a class such as `AutoModelForMaskedLM`.
            seed: seed of the weights that the folder lacks: those of a new head.
            dropout: replaces all probabilities of dropout of the config; None: they stay.
            settings: fields of the config, such as ``id2label``.

        Raises:
            TrainError: the weights are missing, damaged or not finite, or an encoder's weight is
                missing or has another size.
        """
        assert self.config
        assert self.weights
        torch.manual_seed(seed)
        with one_line_errors(self.path):
            config = AutoConfig.from_pretrained(self.path, trust_remote_code=False, **settings)
            if dropout is not None:
                set_dropout(config, dropout)
            model, info = auto_class.from_pretrained(
                self.path,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # a head of other labels has new weights
                output_loading_info=True,
            )
        return model, _new_weights(model, info, self.path)


def open_folder(source: str) -> Folder:
    """Return the model that a run starts from: a folder, or a repository of the hub.

    Raises:
        TrainError: there is no such folder or repository.
    """
    path = Path(source)
    if path.is_dir():
        return Folder(source, None, _encoder_folder(path), path)
    if path.exists():
        raise TrainError(
            f"{source} is a file; give the directory that holds config.json and the weights"
        )
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise TrainError(f"no directory {source}")
    repository = source.removeprefix(_HUB)
    try:
        downloaded = snapshot_download(
            repository, allow_patterns=list(_DOWNLOADED), ignore_patterns=list(_SKIPPED)
        )
    # The hub client raises errors of its own, of its HTTP library and of the system.
    except Exception as error:
        raise TrainError(
            f"cannot load {repository} from the hub (and no directory has that name): "
            f"{first_line(error)}"
        ) from error
    path = Path(downloaded)
    return Folder(repository, path.name, _encoder_folder(path), path)


def _encoder_folder(path: Path) -> Path:
    """Return the folder of a sentence-transformer's encoder; others are returned as they are."""
    if (path / "config.json").is_file() or not (path / MODULES).is_file():
        return path
    with one_line_errors(path):
        return path / str(json.loads((path / MODULES).read_bytes())[0]["path"])


@contextmanager
def one_line_errors(path: Path) -> Iterator[None]:
    """Turn what transformers raises for a folder into one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except TrainError:
        raise
    # transformers, tokenizers and safetensors raise any error for damaged files.
    except Exception as error:
        raise TrainError(f"{path} cannot be loaded: {first_line(error)}") from error


def _new_weights(model: PreTrainedModel, info: dict[str, Any], path: Path) -> set[str]:
    """Return the names of new weights: those of a head. Raise if the encoder is not whole."""
    encoder = {f"{model.base_model_prefix}.{name}" for name in model.base_model.state_dict()}
    if model.base_model is model:
        encoder = set(model.state_dict())
    mismatched = {name for name, *_ in info["mismatched_keys"]}
    new = set(info["missing_keys"]) | mismatched
    for name in sorted(new & encoder):
        if ".pooler." not in f".{name}":
            how = "is of another size than config.json says" if name in mismatched else "is missing"
            raise TrainError(f"{path} cannot be loaded: {name} {how}")
    for name, tensor in model.named_parameters():
        if not bool(torch.isfinite(tensor).all()):
            raise TrainError(f"{path} cannot be loaded: {name} holds NaN or infinity")
    return new


_WITHOUT_DROPOUT = re.compile("att|classif|cls|pooler|qa|summary")
"""Parts of the names of settings of the attention's and the heads' dropout."""


def set_dropout(config: PreTrainedConfig, dropout: float) -> None:
    """Set the dropout of hidden states in a config, whatever its family calls it.

    Attention and heads have none: docs/decisions/0025 has the measurements.
    """
    for name, value in config.to_dict().items():
        if "dropout" in name and (value is None or isinstance(value, int | float)):
            setattr(config, name, 0.0 if _WITHOUT_DROPOUT.search(name) else dropout)


def max_tokens(model: PreTrainedModel) -> int:
    """Return the longest sequence that a model has positions for."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - unused
    return int(model.config.max_position_embeddings)


def has_token_types(config: PreTrainedConfig) -> bool:
    """Return whether a model reads the types of tokens."""
    return int(getattr(config, "type_vocab_size", 0) or 0) > 1


def save(
    model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path, card: str, **settings: Any
) -> None:
    """Write a model, its tokenizer and its card as a folder; replace a folder of that name.

    Args:
        model: a model of transformers, sentence-transformers or peft.
        settings: further arguments of ``save_pretrained``.

    Raises:
        TrainError: the folder cannot be written.
    """
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    if isinstance(model, nn.Sequential):  # a model of sentence-transformers
        settings["create_model_card"] = False
    try:
        model.save_pretrained(new, **settings)
        tokenizer.save_pretrained(new)
        (new / CARD).write_text(card, encoding="utf-8")
    except SafetensorError as error:
        raise TrainError(f"{folder} cannot be written: {first_line(error)}") from error
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


logging.set_verbosity_error()  # type: ignore[no-untyped-call]
logging.disable_progress_bar()  # type: ignore[no-untyped-call]
