"""NomicBERT and GTE as the code of their hub repositories stores and computes them.

The oracle is transformers, whose networks get what only the hub's code has: biases, and scaled
positions. Their tensors get the hub's names.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from cloze.export.errors import ExportError
from cloze.export.load.checkpoint import load_checkpoint
from tests.support.family_checkpoints import ids_of, ours, same, save, theirs
from tests.support.tokenizer_kinds import wordpiece

H, HEADS, INNER, LAYERS, EPS = 24, 3, 256, 2, 1e-6
TYPES = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])

NOMIC: dict[str, Any] = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertForPreTraining"],
    "auto_map": {"AutoModel": "x/y--modeling_hf_nomic_bert.NomicBertModel"},
    "activation_function": "swiglu",
    "n_embd": H, "n_head": HEADS, "n_layer": LAYERS, "n_inner": 200, "n_positions": 8192,
    "layer_norm_epsilon": EPS, "rotary_emb_base": 30, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "rotary_scaling_factor": None, "max_trained_positions": 2048,
    "type_vocab_size": 2, "prenorm": False, "qkv_proj_bias": False, "mlp_fc1_bias": False,
    "mlp_fc2_bias": False, "resid_pdrop": 0.0,
}  # fmt: skip
GTE: dict[str, Any] = {
    "model_type": "new",
    "architectures": ["NewForMaskedLM"],
    "auto_map": {"AutoModel": "x/y--modeling.NewModel"},
    "hidden_size": H, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
    "intermediate_size": INNER, "hidden_act": "gelu", "layer_norm_eps": EPS,
    "layer_norm_type": "layer_norm", "max_position_embeddings": 40, "type_vocab_size": 2,
    "position_embedding_type": "rope", "rope_theta": 50.0, "pack_qkv": True,
    "rope_scaling": {"type": "ntk", "factor": 4.0}, "logn_attention_scale": False,
}  # fmt: skip

Tensors = dict[str, Tensor]

NAMES = {
    "nomic_bert": {
        "layers.": "encoder.layers.", "embeddings.LayerNorm": "emb_ln",
        "self_attn.qkv_proj": "attn.Wqkv", "self_attn.o_proj": "attn.out_proj",
        "mlp.up_proj": "mlp.fc11", "mlp.gate_proj": "mlp.fc12", "mlp.down_proj": "mlp.fc2",
        "post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2",
    },
    "gte": {
        "layers.": "encoder.layer.", "self_attn": "attention", "lm_head.layer_norm": "lm_head.norm",
        "post_attention_layernorm": "attn_ln", "post_mlp_layernorm": "mlp_ln",
    },
}  # fmt: skip
"""Parts of transformers' names, and those of the hub."""

LEFT_OUT = {
    "nomic_bert": ("decoder.weight", "predictions.bias", "decoder.bias", "transform.dense.bias"),
    "gte": ("decoder.weight",),
}
"""What the hub's files do not have: a tied matrix, and biases."""


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def network_of(family: str, folder: Path, **settings: Any) -> Any:
    """Return a random network of transformers with the sizes of `NOMIC` and `GTE`."""
    sizes = {"intermediate_size": INNER, "layer_norm_eps": EPS} | settings
    network = save(family, "masked_lm", folder / "theirs", **sizes)
    for name, parameter in network.named_parameters():
        if name.endswith(LEFT_OUT[family]) and name.endswith("bias"):
            parameter.zero_()
    return network


def scaled(network: Any, factor: float) -> Any:
    """Give a GTE the frequencies of NTK's scaling."""
    powers = -torch.arange(0, 8, 2) / 8
    network.gte.rotary_emb.inv_freq = (50 * factor) ** powers / factor ** (2 / 8)
    return network


def joined(tensors: Tensors, whole: str, parts: tuple[str, ...]) -> Tensors:
    """Return tensors of which some are stored in one."""
    made = {}
    for name, one in tensors.items():
        part = next((part for part in parts if f".{part}." in name), "")
        if part == parts[0]:
            together = [tensors[name.replace(part, other)] for other in parts]
            made[name.replace(part, whole)] = torch.cat(together)
        elif not part:
            made[name] = one
    return made


def of_hub(network: Any, packed: bool = True) -> Tensors:
    """Return the tensors of a network as the hub's code names and packs them."""
    family = network.config.model_type
    tensors = {
        name.removeprefix(f"{family}."): one
        for name, one in network.state_dict().items()
        if not name.endswith(LEFT_OUT[family])
    }
    if packed:
        tensors = joined(tensors, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
    if family == "gte":
        tensors = joined(tensors, "up_gate_proj", ("up_proj", "gate_proj"))
    for theirs_, hubs in NAMES[family].items():
        tensors = {name.replace(theirs_, hubs): one for name, one in tensors.items()}
    return tensors


def write(folder: Path, settings: Mapping[str, Any], tensors: Tensors) -> None:
    tokenizer = wordpiece()
    folder.mkdir(exist_ok=True)
    size = {"vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(dict(settings) | size))
    contiguous = {name: one.contiguous() for name, one in tensors.items()}
    save_file(contiguous, str(folder / "model.safetensors"), {"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))


def states(folder: Path, ids: Tensor) -> Tensor:
    hidden: Tensor = load_checkpoint(str(folder)).model(ids, types_of(ids))
    return hidden


def states_of(network: Any, ids: Tensor) -> Tensor:
    hidden: Tensor = network.base_model(ids, token_type_ids=types_of(ids)).last_hidden_state
    return hidden


def types_of(ids: Tensor) -> Tensor:
    return TYPES[:, : ids.shape[1]].expand_as(ids)


def check_equal(folder: Path, network: Any) -> None:
    """Compare the states of texts with token types, and the logits of masks."""
    for tokens in (1, 2, 7):
        ids = ids_of(network, tokens)
        assert same(states(folder, ids), states_of(network, ids))
    logits = ours(load_checkpoint(str(folder)), "masked_lm", ids)
    assert same(logits, theirs(network, "masked_lm", ids))


@pytest.mark.parametrize("prefix", ["", "bert.", "nomic_bert."])
def test_a_nomic_checkpoint_of_the_hub_gives_the_numbers_of_its_code(
    prefix: str, tmp_path: Path
) -> None:
    network = network_of("nomic_bert", tmp_path)
    tensors = of_hub(network).items()
    write(tmp_path, NOMIC, {n if "cls." in n else prefix + n: one for n, one in tensors})
    checkpoint = load_checkpoint(str(tmp_path))
    assert checkpoint.model.config.max_positions == 2048
    assert checkpoint.model.config.intermediate_size == 256
    check_equal(tmp_path, network)


def test_biases_of_a_nomic_checkpoint_count(tmp_path: Path) -> None:
    """Those of keys too: under rotary positions they do not cancel."""
    network = network_of("nomic_bert", tmp_path, hidden_act="gelu")
    for module in network.base_model.modules():
        if isinstance(module, torch.nn.Linear):
            module.bias = torch.nn.Parameter(torch.randn(module.out_features) / 4)
    with_biases = NOMIC | {"qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True}
    write(tmp_path, with_biases | {"activation_function": "geglu"}, of_hub(network))
    ids = ids_of(network, 7)
    mine = states(tmp_path, ids)
    assert same(mine, states_of(network, ids))
    for layer in network.base_model.layers:
        layer.self_attn.k_proj.bias.zero_()
    assert not same(mine, states_of(network, ids))


@pytest.mark.parametrize(
    ("settings", "limit"),
    [({"max_trained_positions": None}, 2048), ({"n_positions": 512}, 512)],
)
def test_the_limit_of_a_nomic_checkpoint_is_that_of_its_training(
    settings: dict[str, Any], limit: int, tmp_path: Path
) -> None:
    write(tmp_path, NOMIC | settings, of_hub(network_of("nomic_bert", tmp_path)))
    assert load_checkpoint(str(tmp_path)).model.config.max_positions == limit


@pytest.mark.parametrize("prefix", ["", "new.", "gte."])
@pytest.mark.parametrize("packed", [True, False])
def test_a_gte_checkpoint_of_the_hub_gives_the_numbers_of_its_code(
    prefix: str, packed: bool, tmp_path: Path
) -> None:
    network = scaled(network_of("gte", tmp_path), 4.0)
    tensors = of_hub(network, packed).items()
    named = {name if "lm_head" in name else prefix + name: one for name, one in tensors}
    write(tmp_path, GTE | {"pack_qkv": packed}, named)
    check_equal(tmp_path, network)


def test_a_gte_without_types_and_without_scaling(tmp_path: Path) -> None:
    network, table = network_of("gte", tmp_path), "embeddings.token_type_embeddings.weight"
    network.gte.embeddings.token_type_embeddings.weight.zero_()
    tensors = {name: one for name, one in of_hub(network).items() if name != table}
    write(tmp_path, GTE | {"type_vocab_size": 0, "rope_scaling": None}, tensors)
    assert load_checkpoint(str(tmp_path)).model.encoder.embeddings.token_type is None
    check_equal(tmp_path, network)


@pytest.mark.parametrize(
    ("family", "settings", "kind"), [("nomic_bert", NOMIC, "NomicBert"), ("gte", GTE, "New")]
)
def test_questions_are_answered_with_the_heads_of_the_hub(
    family: str, settings: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    tensors = of_hub(network_of(family, tmp_path))
    head = {"qa_outputs.weight": torch.randn(2, H), "qa_outputs.bias": torch.randn(2)}
    named = {name: one for name, one in tensors.items() if not name.startswith(("cls", "lm_"))}
    classes = {"architectures": [f"{kind}ForQuestionAnswering"]}
    write(tmp_path, settings | classes, named | head)
    checkpoint, ids = load_checkpoint(str(tmp_path)), torch.arange(9, 16)[None]
    expected = F.linear(checkpoint.model(ids), head["qa_outputs.weight"], head["qa_outputs.bias"])
    assert same(ours(checkpoint, "span", ids), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (NOMIC | {"architectures": ["NomicVisionModel"]}, "class NomicVisionModel"),
        (NOMIC | {"prenorm": True}, "prenorm True"),
        (NOMIC | {"rotary_emb_fraction": 0.5}, r"rotary_emb_fraction 0\.5"),
        (NOMIC | {"activation_function": "gelu"}, "activation_function 'gelu'"),
        (NOMIC | {"rope_parameters": {"rope_theta": 1000.0}}, r"bases \[30\.0, 1000\.0\] differ"),
        (GTE | {"position_embedding_type": "absolute"}, "position_embedding_type 'absolute'"),
        (GTE | {"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_type 'yarn'"),
        (GTE | {"logn_attention_clip1": True}, "logn_attention_clip1 True"),
        (GTE | {"rope_scaling": {"type": "ntk", "factor": 2, "mixed_b": 0.5}}, r"mixed_b 0\.5"),
        (
            GTE | {"model_type": "bert", "position_embedding_type": "absolute"},
            r"code of its own \(auto_map",
        ),
    ],
)
def test_what_the_hub_s_code_can_do_beside_is_refused_by_name(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    family = "gte" if settings["model_type"] == "new" else "nomic_bert"
    write(tmp_path, settings, of_hub(network_of(family, tmp_path)))
    with pytest.raises(ExportError, match=message):
        load_checkpoint(str(tmp_path))


@pytest.mark.parametrize("rows", [7, 6, None])
def test_packed_weights_of_another_shape_are_refused(rows: int | None, tmp_path: Path) -> None:
    tensors = of_hub(network_of("gte", tmp_path))
    name = "encoder.layer.0.attention.qkv_proj.weight"
    del tensors[name]
    if rows is not None:
        tensors[name] = torch.zeros(rows, H)
    write(tmp_path, GTE, tensors)
    message = {7: "3 equal parts", 6: "has shape", None: "lacks encoder.layers.0.attention.query"}
    with pytest.raises(ExportError, match=message[rows]):
        load_checkpoint(str(tmp_path))
