"""The digest of an encoder says which heads and adapters fit it."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from cloze.export.load.checkpoint import encoder_sha256, load_checkpoint
from cloze.export.model import Model
from tests.support.family_checkpoints import save


def test_heads_and_the_dtype_of_the_file_are_no_part_of_an_encoder(tmp_path: Path) -> None:
    save("bert", "masked_lm", tmp_path / "one")
    first = load_checkpoint(str(tmp_path / "one"))
    settings = {"pooler": False, "head_activation": "relu", "classifier_pooling": "mean"}
    relabelled = Model(replace(first.model.config, **settings), ["span"])
    relabelled.encoder = first.model.encoder
    assert first.source.encoder_sha256 == encoder_sha256(relabelled)
    file = tmp_path / "one/model.safetensors"
    halves = {name: tensor.half() for name, tensor in load_file(file).items()}
    save_file(halves, file, {"format": "pt"})
    in_fp16 = load_checkpoint(str(tmp_path / "one")).source.encoder_sha256
    floats = {name: tensor.float() for name, tensor in halves.items()}
    save_file(floats, file, {"format": "pt"})
    assert load_checkpoint(str(tmp_path / "one")).source.encoder_sha256 == in_fp16
    assert in_fp16 != first.source.encoder_sha256


def test_every_weight_and_size_of_an_encoder_counts(tmp_path: Path) -> None:
    save("bert", "masked_lm", tmp_path)
    model = load_checkpoint(str(tmp_path)).model
    before = encoder_sha256(model)
    other_heads = Model(replace(model.config, heads=2))
    other_heads.encoder.load_state_dict(model.encoder.state_dict())
    assert encoder_sha256(other_heads) != before, "12 times 2 has the shapes of 8 times 3"
    for name, weight in model.encoder.named_parameters():
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.view(-1)[-1] += 1e-3
            assert encoder_sha256(model) != before, name
            weight.copy_(kept)
    assert encoder_sha256(model) == before
