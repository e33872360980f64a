"""Adapters: folders of peft, which an export merges; heads alone.

test_finetune has the adapters of labels, tags and answers, test_finetune_embed those of embeddings.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSequenceClassification

from cloze.cli import cli
from cloze.export.errors import ExportError
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.publish import export
from cloze.model_store import Store
from tests.support.family_checkpoints import ids_of, ours, same, save, theirs

pytestmark = pytest.mark.usefixtures("one_thread")

PREFIX, HEAD = "base_model.model.", "sequence_classification"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    save("bert", "masked_lm", folder, max_position_embeddings=66)
    return folder


def save_adapter(base: Path, folder: Path, kind: Any = AutoModel, **settings: Any) -> Any:
    """Save random matrices of rank 2, and return peft's network."""
    network = kind.from_pretrained(base, attn_implementation="eager")
    config = LoraConfig(r=2, lora_alpha=16, target_modules=["query", "value"], **settings)
    adapted = get_peft_model(network, config)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_foreign_folder_is_merged_with_the_usual_labels(use_rslora: bool, tmp_path: Path) -> None:
    network = save("bert", HEAD, tmp_path / "base")
    kept = {"modules_to_save": ["classifier", "pooler"], "task_type": "SEQ_CLS"}
    folder, kind = tmp_path / "adapter", AutoModelForSequenceClassification
    adapted = save_adapter(tmp_path / "base", folder, kind, use_rslora=use_rslora, **kept)
    merged, ids = load_checkpoint(str(folder)), ids_of(network, 9)
    assert merged.options[HEAD].labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert same(ours(merged, HEAD, ids), theirs(adapted, HEAD, ids))
    assert not same(ours(merged, HEAD, ids), theirs(network, HEAD, ids))


def test_a_head_shares_the_encoder_of_a_bundle(bert: Path, tmp_path: Path) -> None:
    base = load_checkpoint(str(bert))
    torch.manual_seed(5)
    tuned = AutoModelForSequenceClassification.from_pretrained(bert)
    tuned.save_pretrained(tmp_path / "tuned")
    shutil.copy(bert / "tokenizer.json", tmp_path / "tuned")
    arguments = ["export", str(tmp_path / "tuned"), "--share", "auto"]
    arguments += ["--out", str(tmp_path / "head"), "--model-store", str(tmp_path / "store")]
    ran = CliRunner().invoke(cli, arguments)
    assert "no bundle has the encoder of tuned" in ran.output
    export(str(bert), "base", Store(tmp_path / "store"))
    ran = CliRunner().invoke(cli, arguments)
    assert ran.exit_code == 0, ran.output
    assert "the encoder is that of base@1, which saves" in ran.output
    named = ["another" if one == "auto" else one for one in arguments]
    assert "another" in CliRunner().invoke(cli, named).output, "no such bundle"
    config = json.loads((tmp_path / "head/adapter_config.json").read_text())
    assert config["target_modules"] == "dummy-target-modules"
    assert set(config["modules_to_save"]) == {"classifier", "pooler"}
    assert {*load_file(tmp_path / "head/adapter_model.safetensors")} == {
        f"{PREFIX}{name}.{kind}"
        for name in ("classifier", "bert.pooler.dense")
        for kind in ("weight", "bias")
    }
    head, whole = (load_checkpoint(str(tmp_path / name)) for name in ("head", "tuned"))
    ids = torch.tensor([[9, 10, 11]])
    weights = whole.model.state_dict()
    assert weights.keys() == head.model.state_dict().keys()
    assert all(torch.equal(one, weights[name]) for name, one in head.model.state_dict().items())
    # A product of equal weights may round otherwise where they lie elsewhere in memory.
    torch.testing.assert_close(ours(head, HEAD, ids), ours(whole, HEAD, ids), atol=1e-6, rtol=0)
    assert head.options == whole.options
    assert head.source.encoder_sha256 == base.source.encoder_sha256


@pytest.fixture
def adapter(bert: Path, tmp_path: Path) -> Path:
    save_adapter(bert, tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_of_another_encoder_is_refused(adapter: Path) -> None:
    """The metadata may have the digest of the encoder that the adapter was trained on."""
    file = adapter / "adapter_model.safetensors"
    save_file(load_file(file), file, {"cloze_encoder_sha256": "0" * 64})
    with pytest.raises(ExportError, match="adapter of another encoder"):
        load_checkpoint(str(adapter))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"r": 0}, "its rank is 0"),
        ({"base_model_name_or_path": "/nowhere"}, "no directory /nowhere"),
    ],
)
def test_what_is_unsupported_is_named(
    settings: dict[str, Any], message: str, adapter: Path
) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(ExportError, match=message):
        load_checkpoint(str(adapter))


def test_tensors_that_do_not_fit_are_named(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    query, tensors = f"{PREFIX}encoder.layer.0.attention.self.query", load_file(file)
    for name, tensor, message in (
        (f"{query}.lora_A.weight", torch.full((2, 24), torch.nan), "not finite"),
        (f"{query}.lora_B.weight", torch.zeros(48, 2), r"the base has \[24, 24\]"),
        (f"{query}.lora_magnitude_vector", torch.zeros(24), "lora_magnitude_vector' is not"),
        ("encoder.layer.0.lora_A.weight", torch.zeros(2, 24), "does not begin with"),
    ):
        save_file({**tensors, name: tensor}, file)
        with pytest.raises(ExportError, match=message):
            load_checkpoint(str(adapter))
