"""Runs of `cloze train` on random checkpoints: started, stopped halfway, refused."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling
from transformers import PreTrainedTokenizerFast

from cloze.export.measure.evaluate import open_subject
from cloze.export.measure.scorer import unit_embeddings
from cloze.export.train.progress import read_log
from cloze.model_store import Store
from cloze.train import train
from tests.support.family_checkpoints import OFFSET, TOKENIZERS, save
from tests.support.tokenizer_kinds import wordpiece

LORA = (
    '[lora]\nlearning_rate = 2e-2\ntargets = ["query", "key", "value", "attention-output", '
    '"feed-forward-in", "feed-forward-out"]\n'
)


def slow_but(names: Iterable[object], *fast: object) -> list[Any]:
    """Return parameters of which all but some belong to slow tests."""
    return [pytest.param(each, marks=[] if each in fast else pytest.mark.slow) for each in names]


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(train, [str(each) for each in arguments], catch_exceptions=False)


def held_out(checkpoint: Path) -> dict[str, float]:
    """Return the last held-out figures of the run that left a checkpoint."""
    last = read_log(checkpoint.parent)[-1]
    return {name[9:]: value for name, value in last.items() if name.startswith("held_out_")}


def save_source(family: str, folder: Path, **settings: Any) -> Path:
    """Save a random checkpoint with a tokenizer that names its special tokens."""
    save(family, "masked_lm", folder, max_position_embeddings=66, **settings)
    tokenizer = TOKENIZERS.get(family, wordpiece)()
    vocabulary = tokenizer.get_vocab()
    special = {
        f"{token}_token": form
        for token in ("pad", "unk", "cls", "sep", "mask")
        for form in (f"<{token}>", f"[{token.upper()}]")
        if form in vocabulary
    }
    if family in OFFSET and "cls_token" not in special:
        special |= {"cls_token": "<s>", "sep_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def as_sentences(source: Path, folder: Path, pooling: Any, layers: Sequence[str] = ()) -> Path:
    """Save an encoder as a sentence-transformer with a pooling and with layers after it."""
    model = SentenceTransformer(str(source), device="cpu")
    model[1] = Pooling(model[0].get_embedding_dimension(), pooling)
    size = model[1].get_embedding_dimension()
    torch.manual_seed(7)
    modules = {"dense": Dense(size, 10), "normalize": Normalize()}
    for name in layers:
        model.append(modules[name])
    model.prompts = {"query": "who : "}
    model.save(str(folder), create_model_card=False)
    return folder


def exported(source: str | Path, store: Path, texts: Sequence[str]) -> Any:
    """Return the unit vectors that Cloze computes: of a folder, or of a bundle's graph."""
    subject = open_subject(str(source), Store(store), torch.device("cpu"))
    ids = [each.ids for each in subject.tokenizer.tokenizer.encode_batch(texts)]
    return unit_embeddings(subject.scorer, ids)


class Stop(Exception):
    """The end of a run that a test kills."""


@contextmanager
def stopped_after(steps: int) -> Iterator[None]:
    """Stop a run after so many steps, as a kill does: what is in no checkpoint is lost."""
    left = iter(range(steps))

    def advance(*_: object) -> None:
        if next(left, None) is None:
            raise Stop

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr("cloze.export.train.loop.Progress.advance", advance)
        yield


def check_refused(folder: Path, arguments: list[Any], recipe: str, message: str) -> None:
    """Check that a command ends with one line, and leaves no folder."""
    (folder / "recipe.toml").write_text(recipe)
    run = folder / "run"
    ran = invoke(*arguments, "--recipe", folder / "recipe.toml", "--out", run, "--device", "cpu")
    assert ran.exit_code == 1
    assert re.search(message, ran.output.splitlines()[-1]), ran.output
    assert not run.exists()
