"""Folders of PEFT: the scale of each layer's product, and the files that a digest covers."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cloze.model_store.peft import AdapterError, read_files

LAYERS = ("encoder.query", "encoder.pos_query")


def write(folder: Path, number: float = 1.0, rank: int = 2, **config: Any) -> Path:
    tensors = {}
    for layer in LAYERS:
        tensors[f"base_model.model.{layer}.lora_A.weight"] = np.ones((rank, 3), np.float32)
        tensors[f"base_model.model.{layer}.lora_B.weight"] = np.full((4, rank), number, np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({}, (4.0, 4.0)),  # alpha is 8 by default
        ({"lora_alpha": 3}, (1.5, 1.5)),
        ({"use_rslora": True}, (8 / math.sqrt(2),) * 2),
        ({"alpha_pattern": {"query": 3}}, (1.5, 4.0)),
        ({"alpha_pattern": {"encoder.query": 3, "query": 5}}, (1.5, 4.0)),
        ({"alpha_pattern": {"pos_query": 6}, "lora_alpha": 1}, (0.5, 3.0)),
    ],
)
def test_the_scale_is_alpha_by_rank(
    config: dict[str, Any], scales: tuple[float, float], tmp_path: Path
) -> None:
    layers = read_files(write(tmp_path, **config)).layers
    for layer, scale in zip(LAYERS, scales, strict=True):
        np.testing.assert_allclose(layers[layer].b, np.full((2, 4), scale), rtol=1e-6)
        np.testing.assert_array_equal(layers[layer].a, np.ones((2, 3)))


def test_every_file_counts_in_the_digest(tmp_path: Path) -> None:
    digests = [read_files(write(tmp_path)).digest, read_files(write(tmp_path, 2.0)).digest]
    digests.append(read_files(write(tmp_path, inference_mode=True)).digest)
    (tmp_path / "config.json").write_text('{"id2label": {"0": "a"}}')
    digests.append(read_files(tmp_path).digest)
    assert len(set(digests)) == 4
    (tmp_path / "config.json").unlink()
    assert read_files(write(tmp_path)).digest == digests[0]


def test_ranks_have_a_limit(tmp_path: Path) -> None:
    assert read_files(write(tmp_path, rank=512)).layers
    with pytest.raises(AdapterError, match="r is 513; allowed are 0 to 512"):
        read_files(write(tmp_path, rank=513))


USUAL = {
    "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "bert", "bias": "none",
    "corda_config": None, "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False,
    "inference_mode": True, "init_lora_weights": True, "layer_replication": None,
    "layers_pattern": None, "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 8,
    "lora_bias": False, "lora_dropout": 0.1, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": ["classifier"], "peft_type": "LORA",
    "qalora_group_size": 16, "rank_pattern": {}, "revision": None,
    "target_modules": ["query", "value"], "target_parameters": None, "task_type": "SEQ_CLS",
    "trainable_token_indices": None, "use_dora": False, "use_qalora": False, "use_rslora": False,
}  # fmt: skip
"""The settings of a folder that PEFT writes."""


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "orthogonal", "eva"])
def test_the_settings_that_peft_writes_are_accepted(start: object, tmp_path: Path) -> None:
    layers = read_files(write(tmp_path, **USUAL | {"init_lora_weights": start})).layers
    assert layers.keys() == set(LAYERS)


def test_what_would_change_a_result_is_refused_by_name(tmp_path: Path) -> None:
    for name, value in (
        ("init_lora_weights", "olora"),
        ("use_dora", True),
        ("lora_bias", True),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [3]),
        ("unheard_of", 1),
    ):
        with pytest.raises(AdapterError, match=f"{name} is "):
            read_files(write(tmp_path, **USUAL | {name: value}))
