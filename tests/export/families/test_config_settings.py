"""Each setting of ``config.json`` gives the numbers of transformers, is named in a note, or refused.

Every setting that transformers writes is changed, one at a time, in a checkpoint of each family.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cloze.export.errors import ExportError
from cloze.export.families import FAMILIES
from cloze.export.load.checkpoint import load_checkpoint
from tests.support.family_checkpoints import CLASSES, ids_of, ours, same, save, theirs

pytestmark = pytest.mark.filterwarnings("ignore")

VALUES: dict[str, list[Any]] = {
    "hidden_act": ["relu", "gelu_new", "silu", "tanh", "mish"],
    "activation": ["relu", "gelu_new"],
    "hidden_activation": ["relu", "gelu_new"],
    "classifier_activation": ["relu", False, True],
    "pooler_hidden_act": ["relu"],
    "conv_act": ["gelu"],
    "problem_type": ["regression", "multi_label_classification"],
    "position_embedding_type": ["relative_key", "rope", None],
    "classifier_pooling": ["mean", "cls"],
    "norm_rel_ebd": ["none"],
    "pos_att_type": [["c2p"], "p2c|c2p"],
    "layer_types": [["full_attention"] * 3, ["sliding_attention"] * 3],
    "normalization_type": ["layer_norm"],
    "dtype": ["float16"],
    "torch_dtype": ["float16"],
    "pad_token_id": [0, 1, 5],
    "chunk_size_feed_forward": [1],
}
"""Other values of settings than those that `changes` finds."""


def changes(value: Any) -> list[Any]:
    """Return other values of a setting."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, value * 2]
        case float():
            return [value / 2 or 0.5, value * 1000 or 0.5]
        case str():
            return ["other"]
        case None:
            return [1, True, 0.5]
        case dict():
            return [{**value, key: other} for key, one in value.items() for other in changes(one)]
    return [None]


def oracle(folder: Path, head: str) -> Any:
    """Return transformers' module; None if it refuses the settings, or fills weights at random."""
    try:
        network, loading = CLASSES[head].from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        theirs(network.eval(), head, ids_of(network, 9))
    except Exception:  # of many classes
        return None
    return None if loading["missing_keys"] else network


def outcome(folder: Path, head: str, key: str) -> str:
    """Return what became of a setting; raise AssertionError if it is ignored silently."""
    try:
        checkpoint = load_checkpoint(str(folder))
    except ExportError:
        return "refused"
    if key in (notes := " ".join(checkpoint.notes)):
        return f"note: {notes}"
    if (network := oracle(folder, head)) is None:
        return "no oracle"
    ids = ids_of(network, 9)
    assert same(ours(checkpoint, head, ids), theirs(network, head, ids)), f"{key}: {notes}"
    if head == "sequence_classification":
        labels = checkpoint.options[head].labels  # type: ignore[attr-defined]
        assert labels == tuple(network.config.id2label.values())
    return "same"


FAST = {
    ("bert", "masked_lm"),
    ("deberta-v2", "masked_lm"),
    ("mobilebert", "sequence_classification"),
    ("modernbert", "sequence_classification"),
}
"""Cases that run with the other tests; each takes seconds."""

each_case = pytest.mark.parametrize(
    ("family", "head"),
    [
        pytest.param(*case, marks=[] if case in FAST else [pytest.mark.slow])
        for case in product(FAMILIES, ("masked_lm", "sequence_classification"))
    ],
)


@each_case
def test_every_setting_is_honoured_named_or_refused(family: str, head: str, copied: Any) -> None:
    _, folder = copied(family, head)
    file = folder / "config.json"
    base = json.loads(file.read_text())
    known = transformers.CONFIG_MAPPING[family].from_pretrained(folder).to_dict() | base
    assert outcome(folder, head, "no setting") == "same"
    outcomes = set()
    for key in known:
        for value in VALUES.get(key) or changes(known[key]):
            file.write_text(json.dumps(base | {key: value}))
            outcomes.add(outcome(folder, head, key).partition(":")[0])
    assert outcomes >= {"same", "refused"}


class Read(dict[str, Any]):
    """Settings that note which of them are read."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


@each_case
def test_each_setting_may_be_left_out_or_is_demanded(
    family: str, head: str, built: Any, tmp_path: Path
) -> None:
    """A checkpoint that lacks a setting has what transformers takes for that setting."""
    described = FAMILIES[family]
    base = json.loads((built(family, head)[2] / "config.json").read_text())
    given = Read(base)
    parsed = described.read_config(given)
    kept = transformers.CONFIG_MAPPING[family]().to_dict()
    names = set()
    for name in sorted(given.names - {"architectures", "auto_map"}):
        left = {key: value for key, value in base.items() if key != name}
        try:
            other = described.read_config(dict(described.defaults) | left)
        except (KeyError, ValueError):  # it is demanded
            continue
        names.add(name)
        if name in base and base[name] == kept.get(name):
            assert other == parsed, name
        else:
            check_without(family, head, tmp_path / name, name)
    assert names


def check_without(family: str, head: str, folder: Path, name: str) -> None:
    """Compare a checkpoint that was made, and is read, without a setting."""
    save(family, head, folder, **{name: ...})
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({key: one for key, one in settings.items() if key != name}))
    network = oracle(folder, head)
    assert network is not None, name
    ids = ids_of(network, 9)
    assert same(ours(load_checkpoint(str(folder)), head, ids), theirs(network, head, ids)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_setting_has_the_default_of_transformers_or_is_demanded(
    family: str, tmp_path: Path
) -> None:
    described = FAMILIES[family]
    defaults, head = dict(described.defaults), "sequence_classification"
    kind = transformers.CONFIG_MAPPING[family]()
    assert {name: getattr(kind, name) for name in defaults} == defaults
    save(family, head, tmp_path, **defaults)
    file = tmp_path / "config.json"
    base = json.loads(file.read_text())
    assert defaults.keys() | described.wrong_defaults
    for name, value in defaults.items():
        file.write_text(json.dumps({key: one for key, one in base.items() if key != name}))
        assert outcome(tmp_path, head, "no setting") == "same"
        expected = f"config.json does not give {name}: {value} is taken, the default of"
        assert expected in outcome(tmp_path, head, name)
    for name in described.wrong_defaults & {"layer_norm_eps", "max_position_embeddings"}:
        file.write_text(json.dumps({key: one for key, one in base.items() if key != name}))
        with pytest.raises(ExportError, match=f"does not give '{name}', whose default .* is wrong"):
            load_checkpoint(str(tmp_path))
