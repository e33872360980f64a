"""NomicBERT and GTE as the code of their hub repositories computes them.

transformers has no such settings, so the oracle is written here in plain torch, from the names of
the hub's tensors.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from cloze.export.errors import ExportError
from cloze.export.load.checkpoint import load_checkpoint
from tests.support.family_checkpoints import ours, same
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


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def drawn(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """Return random tensors; no bias is 0, no scale of a norm is 1."""
    generator = torch.Generator().manual_seed(7)
    made = {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}
    return {
        name: one + 1 if ("norm" in name.lower() or "ln" in name) and "weight" in name else one
        for name, one in made.items()
    }


def layer_shapes(prefix: str, names: Mapping[str, tuple[int, ...]], biased: str) -> Any:
    """Return the shapes of the tensors of all layers; norms and ``biased`` have biases."""
    return {
        f"{prefix}.{number}.{name}.{part}": shape if part == "weight" else shape[:1]
        for number in range(LAYERS)
        for name, shape in names.items()
        for part in ("weight", "bias")
        if part == "weight" or len(shape) == 1 or name in biased.split()
    }


def nomic(biased: str = "") -> Tensors:
    vocabulary = wordpiece().get_vocab_size()
    names = {
        "attn.Wqkv": (3 * H, H), "attn.out_proj": (H, H), "mlp.fc11": (INNER, H),
        "mlp.fc12": (INNER, H), "mlp.fc2": (H, INNER), "norm1": (H,), "norm2": (H,),
    }  # fmt: skip
    return drawn(
        {
            "embeddings.word_embeddings.weight": (vocabulary, H),
            "embeddings.token_type_embeddings.weight": (2, H),
            "emb_ln.weight": (H,),
            "emb_ln.bias": (H,),
            "cls.predictions.transform.dense.weight": (H, H),
            "cls.predictions.transform.layer_norm.weight": (H,),
            "cls.predictions.transform.layer_norm.bias": (H,),
            **layer_shapes("encoder.layers", names, biased),
        }
    )


def gte(types: int = 2) -> Tensors:
    vocabulary = wordpiece().get_vocab_size()
    names = {
        "attention.qkv_proj": (3 * H, H), "attention.o_proj": (H, H),
        "mlp.up_gate_proj": (2 * INNER, H), "mlp.down_proj": (H, INNER), "attn_ln": (H,),
        "mlp_ln": (H,),
    }  # fmt: skip
    biased = "attention.qkv_proj attention.o_proj mlp.down_proj"
    table = {"embeddings.token_type_embeddings.weight": (types, H)} if types else {}
    return drawn(
        {
            "embeddings.word_embeddings.weight": (vocabulary, H),
            **table,
            "embeddings.LayerNorm.weight": (H,),
            "embeddings.LayerNorm.bias": (H,),
            "lm_head.dense.weight": (H, H),
            "lm_head.dense.bias": (H,),
            "lm_head.norm.weight": (H,),
            "lm_head.norm.bias": (H,),
            "lm_head.decoder.bias": (vocabulary,),
            **layer_shapes("encoder.layer", names, biased),
        }
    )


def rotated(x: Tensor, frequencies: Tensor) -> Tensor:
    """Turn [B, N, S, d] as complex numbers, whose parts are the halves of a head."""
    half = x.shape[-1] // 2
    numbers = torch.complex(x[..., :half].double(), x[..., half:].double())
    angles = torch.arange(x.shape[2]).double()[:, None] * frequencies
    turned = numbers * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def oracle(
    tensors: Tensors,
    ids: Tensor,
    names: Mapping[str, str],
    feed_forward: Callable[[Callable[[str, Tensor], Tensor], Tensor], Tensor],
    frequencies: Tensor,
) -> Tensor:
    """Return the hidden states [B, S, H] in fp64.

    Args:
        names: our words for the parts -> the hub's names.
        feed_forward: (linear layer of a name, input) -> output.
    """
    t = {name: one.double() for name, one in tensors.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (H,), t[f"{name}.weight"], t[f"{name}.bias"], EPS)

    x = t["embeddings.word_embeddings.weight"][ids]
    if "embeddings.token_type_embeddings.weight" in t:
        x = x + t["embeddings.token_type_embeddings.weight"][TYPES[:, : ids.shape[1]]]
    x = norm(x, names["embedding_norm"])
    for number in range(LAYERS):
        layer = f"{names['layers']}.{number}"

        def linear(name: str, x: Tensor, layer: str = layer) -> Tensor:
            return F.linear(x, t[f"{layer}.{name}.weight"], t.get(f"{layer}.{name}.bias"))

        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in linear(names["packed"], x).chunk(3, -1)
        )
        q, k = rotated(q, frequencies), rotated(k, frequencies)
        weights = (q @ k.transpose(2, 3) / (H // HEADS) ** 0.5).softmax(-1)
        context = (weights @ v).transpose(1, 2).flatten(2)
        x = norm(x + linear(names["output"], context), f"{layer}.{names['norm_1']}")
        x = norm(x + feed_forward(linear, x), f"{layer}.{names['norm_2']}")
    return x


def nomic_states(tensors: Tensors, ids: Tensor, base: float = 30.0, act: Any = F.silu) -> Tensor:
    names = {
        "embedding_norm": "emb_ln", "layers": "encoder.layers", "packed": "attn.Wqkv",
        "output": "attn.out_proj", "norm_1": "norm1", "norm_2": "norm2",
    }  # fmt: skip
    frequencies = base ** (-torch.arange(0, 8, 2).double() / 8)

    def feed_forward(linear: Any, x: Tensor) -> Tensor:
        result: Tensor = linear("mlp.fc2", act(linear("mlp.fc12", x)) * linear("mlp.fc11", x))
        return result

    return oracle(tensors, ids, names, feed_forward, frequencies)


def gte_states(tensors: Tensors, ids: Tensor, base: float = 50.0, factor: float = 4.0) -> Tensor:
    names = {
        "embedding_norm": "embeddings.LayerNorm", "layers": "encoder.layer",
        "packed": "attention.qkv_proj", "output": "attention.o_proj", "norm_1": "attn_ln",
        "norm_2": "mlp_ln",
    }  # fmt: skip
    frequencies = (base * factor) ** (-torch.arange(0, 8, 2).double() / 8) / factor ** (2 / 8)

    def feed_forward(linear: Any, x: Tensor) -> Tensor:
        up, gate = linear("mlp.up_gate_proj", x).chunk(2, -1)
        result: Tensor = linear("mlp.down_proj", F.gelu(gate) * up)
        return result

    return oracle(tensors, ids, names, feed_forward, frequencies)


def write(folder: Path, settings: Mapping[str, Any], tensors: Tensors) -> None:
    tokenizer = wordpiece()
    folder.mkdir(exist_ok=True)
    size = {"vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(dict(settings) | size))
    contiguous = {name: one.contiguous() for name, one in tensors.items()}
    save_file(contiguous, str(folder / "model.safetensors"), {"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))


def states(folder: Path, ids: Tensor) -> Tensor:
    types = TYPES[:, : ids.shape[1]].expand_as(ids)
    hidden: Tensor = load_checkpoint(str(folder)).model(ids, types)
    return hidden.double()


def random_ids(tokens: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(8, 200, (2, tokens), generator=generator)


@pytest.mark.parametrize("prefix", ["", "bert.", "nomic_bert."])
def test_a_nomic_checkpoint_of_the_hub_gives_the_numbers_of_its_code(
    prefix: str, tmp_path: Path
) -> None:
    tensors = nomic()
    named = {name if "cls." in name else prefix + name: one for name, one in tensors.items()}
    write(tmp_path, NOMIC, named)
    checkpoint = load_checkpoint(str(tmp_path))
    assert checkpoint.model.config.max_positions == 2048
    assert checkpoint.model.config.intermediate_size == 256
    for tokens in (1, 2, 7):
        assert same(states(tmp_path, random_ids(tokens)), nomic_states(tensors, random_ids(tokens)))
    hidden = checkpoint.model(random_ids())
    t = {name.removeprefix("cls.predictions."): one for name, one in tensors.items()}
    rows = F.silu(hidden @ t["transform.dense.weight"].t())
    scale, shift = t["transform.layer_norm.weight"], t["transform.layer_norm.bias"]
    rows = F.layer_norm(rows, (H,), scale, shift, EPS)
    logits = rows @ tensors["embeddings.word_embeddings.weight"].t()
    assert checkpoint.model.masked_lm is not None
    assert same(checkpoint.model.masked_lm(hidden), logits)


def test_biases_of_a_nomic_checkpoint_count(tmp_path: Path) -> None:
    """Those of keys too: under rotary positions they do not cancel."""
    tensors = nomic("attn.Wqkv attn.out_proj mlp.fc11 mlp.fc12 mlp.fc2")
    with_biases = NOMIC | {"qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True}
    write(tmp_path, with_biases | {"activation_function": "geglu"}, tensors)
    expected = nomic_states(tensors, random_ids(), act=F.gelu)
    assert same(states(tmp_path, random_ids()), expected)
    for number in range(LAYERS):
        tensors[f"encoder.layers.{number}.attn.Wqkv.bias"][H : 2 * H] = 0
    assert not same(nomic_states(tensors, random_ids(), act=F.gelu), expected)


@pytest.mark.parametrize(
    ("settings", "limit"),
    [({"max_trained_positions": None}, 2048), ({"n_positions": 512}, 512)],
)
def test_the_limit_of_a_nomic_checkpoint_is_that_of_its_training(
    settings: dict[str, Any], limit: int, tmp_path: Path
) -> None:
    write(tmp_path, NOMIC | settings, nomic())
    assert load_checkpoint(str(tmp_path)).model.config.max_positions == limit


def unpacked(tensors: Tensors) -> Tensors:
    """Return the tensors as with ``pack_qkv`` false."""
    result = {}
    for name, one in tensors.items():
        if ".qkv_proj." not in name:
            result[name] = one
            continue
        for part, rows in zip("qkv", one.chunk(3), strict=True):
            result[name.replace("qkv_proj", f"{part}_proj")] = rows
    return result


@pytest.mark.parametrize("prefix", ["", "new.", "gte."])
@pytest.mark.parametrize("packed", [True, False])
def test_a_gte_checkpoint_of_the_hub_gives_the_numbers_of_its_code(
    prefix: str, packed: bool, tmp_path: Path
) -> None:
    tensors = gte()
    stored = tensors if packed else unpacked(tensors)
    named = {name if "lm_head" in name else prefix + name: one for name, one in stored.items()}
    write(tmp_path, GTE | {"pack_qkv": packed}, named)
    for tokens in (1, 2, 7):
        assert same(states(tmp_path, random_ids(tokens)), gte_states(tensors, random_ids(tokens)))
    checkpoint = load_checkpoint(str(tmp_path))
    hidden = checkpoint.model(random_ids())
    rows = F.gelu(F.linear(hidden, tensors["lm_head.dense.weight"], tensors["lm_head.dense.bias"]))
    rows = F.layer_norm(
        rows, (H,), tensors["lm_head.norm.weight"], tensors["lm_head.norm.bias"], EPS
    )
    words, bias = tensors["embeddings.word_embeddings.weight"], tensors["lm_head.decoder.bias"]
    assert checkpoint.model.masked_lm is not None
    assert same(checkpoint.model.masked_lm(hidden), F.linear(rows, words, bias))


def test_a_gte_without_types_and_without_scaling(tmp_path: Path) -> None:
    tensors = gte(types=0)
    write(tmp_path, GTE | {"type_vocab_size": 0, "rope_scaling": None}, tensors)
    assert load_checkpoint(str(tmp_path)).model.encoder.embeddings.token_type is None
    assert same(states(tmp_path, random_ids()), gte_states(tensors, random_ids(), factor=1.0))


@pytest.mark.parametrize(
    ("settings", "tensors", "kind"), [(NOMIC, nomic(), "NomicBert"), (GTE, gte(), "New")]
)
def test_questions_are_answered_with_the_heads_of_the_hub(
    settings: dict[str, Any], tensors: Tensors, kind: str, tmp_path: Path
) -> None:
    head = {"qa_outputs.weight": torch.randn(2, H), "qa_outputs.bias": torch.randn(2)}
    named = {name: one for name, one in tensors.items() if not name.startswith(("cls", "lm_"))}
    classes = {"architectures": [f"{kind}ForQuestionAnswering"]}
    write(tmp_path, settings | classes, named | head)
    checkpoint, ids = load_checkpoint(str(tmp_path)), random_ids()
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
    write(tmp_path, settings, gte() if settings["model_type"] == "new" else nomic())
    with pytest.raises(ExportError, match=message):
        load_checkpoint(str(tmp_path))


@pytest.mark.parametrize("rows", [7, 6, None])
def test_packed_weights_of_another_shape_are_refused(rows: int | None, tmp_path: Path) -> None:
    tensors, name = gte(), "encoder.layer.0.attention.qkv_proj.weight"
    del tensors[name]
    if rows is not None:
        tensors[name] = torch.zeros(rows, H)
    write(tmp_path, GTE, tensors)
    message = {7: "3 equal parts", 6: "has shape", None: "lacks encoder.layers.0.attention.query"}
    with pytest.raises(ExportError, match=message[rows]):
        load_checkpoint(str(tmp_path))
