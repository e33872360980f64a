"""Loading: every form of a checkpoint gives the same model, and every damage one clear line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cloze.export.errors import ExportError
from cloze.export.heads import NEXT_SENTENCE
from cloze.export.load.checkpoint import Checkpoint, load_checkpoint
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.heads import Head
from cloze.source_records import files_to_export
from tests.support import tiny
from tests.support.tiny import save_checkpoint
from tests.support.vocabulary import vocabulary

IDS = torch.arange(5, 25)[None]


def tasks(heads: tuple[Head, ...]) -> list[str]:
    return [head.task for head in heads]


def hidden(checkpoint: Checkpoint) -> torch.Tensor:
    with torch.no_grad():
        return checkpoint.model(IDS)


@pytest.fixture
def folder(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the tiny BERT that a test may damage."""
    return Path(shutil.copytree(checkpoints["bert"], tmp_path / "bert"))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def in_files(suffix: str, parts: int) -> Callable[[Path], None]:
    """Return a change of the file of weights: to another format, or to some shards."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        names = sorted(tensors)
        (folder / "model.safetensors").unlink()
        stem = "model" if suffix == "safetensors" else "pytorch_model"
        files = [f"{stem}{f'-{n}' if parts > 1 else ''}.{suffix}" for n in range(parts)]
        for number, file in enumerate(files):
            part = {name: tensors[name] for name in names[number::parts]}
            if suffix == "bin":
                torch.save(part, folder / file)
            else:
                save_file(part, folder / file)
        if parts > 1:
            index = {name: files[number % parts] for number, name in enumerate(names)}
            written = json.dumps({"weight_map": index})
            (folder / f"{stem}.{suffix}.index.json").write_text(written)

    return change


def with_buffers_and_tied_copies(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["bert.embeddings.position_ids"] = torch.arange(160)[None]
        tensors[UNTIED] = tensors[WORD].clone()
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()

    edit_tensors(folder, edit)


FORMS = {"pytorch": in_files("bin", 1), "shards": in_files("safetensors", 2)}
FORMS |= {"pytorch-shards": in_files("bin", 2), "copies": with_buffers_and_tied_copies}


@pytest.mark.parametrize("transform", FORMS.values(), ids=FORMS)
def test_every_form_gives_the_same_model(
    checkpoints: dict[str, Path], folder: Path, transform: Callable[[Path], None]
) -> None:
    expected = load_checkpoint(str(checkpoints["bert"]))
    transform(folder)
    loaded = load_checkpoint(str(folder))
    offered = ["fill-mask", "nsp", "embed", "embed-all"]
    assert tasks(loaded.default_heads) == tasks(expected.default_heads) == offered
    assert torch.equal(hidden(loaded), hidden(expected))
    assert not [note for note in loaded.notes if "ignored" in note]


@pytest.mark.parametrize(
    ("kind", "offered", "default", "note"),
    [
        ("bert", "fill-mask nsp embed embed-all sparse embed-layers", 4, "qa is not offered"),
        ("bert-plain", "embed embed-all embed-layers", 2, "nsp is not offered: the checkpoint has"),
        ("bert-qa", "qa embed embed-all embed-layers", 1, "fill-mask is not offered"),
        ("distilbert", "fill-mask embed embed-all sparse embed-layers", 3, "nsp is not offered"),
    ],
)
def test_a_checkpoint_offers_what_it_has_heads_for(
    checkpoints: dict[str, Path], kind: str, offered: str, default: int, note: str
) -> None:
    loaded = load_checkpoint(str(checkpoints[kind]))
    assert tasks(loaded.heads) == offered.split()
    assert tasks(loaded.default_heads) == offered.split()[:default]
    assert any(line.startswith(note) for line in loaded.notes)


def test_a_missing_pooler_takes_nsp_away_and_says_so(folder: Path) -> None:
    edit_tensors(folder, lambda t: [t.pop(name) for name in list(t) if "pooler" in name])
    loaded = load_checkpoint(str(folder))
    assert NEXT_SENTENCE not in {head.name for head in loaded.heads}
    assert any("classifier but no pooler" in note for note in loaded.notes)


@pytest.mark.parametrize("spare", [127, 128, len(vocabulary()) - 1])
def test_rows_beyond_the_vocabulary_are_never_read(spare: int, tmp_path: Path) -> None:
    """As a checkpoint with 32,102 rows for 31,102 tokens."""
    rows = len(vocabulary()) + spare
    folder = save_checkpoint(tmp_path / "padded", "bert", vocab_size=rows)
    checkpoint = load_checkpoint(str(folder))
    note = f"{spare} of the {rows} rows of the embeddings belong to no token"
    assert (note in str(checkpoint.notes)) == (spare >= 128)
    network = transformers.BertForPreTraining.from_pretrained(folder)
    with torch.no_grad():
        expected = network(IDS).prediction_logits
        logits = checkpoint.model.masked_lm(checkpoint.model(IDS))
    torch.testing.assert_close(logits[..., :-spare], expected[..., :-spare], atol=1e-4, rtol=1e-4)
    assert (logits[..., -spare:] < -1e30).all()


def test_foreign_heads_are_named_and_ignored(folder: Path) -> None:
    foreign = {f"{name}.weight": torch.zeros(3, 64) for name in ("classifier", "projector")}
    edit_tensors(folder, lambda tensors: tensors.update(foreign))
    notes = load_checkpoint(str(folder)).notes
    assert "ignored tensors of no known head: projector" in notes
    assert (
        "text-classification is not offered: the checkpoint has classifier.weight, but "
        "config.json's architectures names BertForPreTraining, not BertForSequenceClassification"
    ) in notes
    with pytest.raises(ExportError, match=r"cannot do text-classification: .* has classifier.weig"):
        export(str(folder), "x", Store(folder / "store"), ExportOptions(("text-classification",)))


@pytest.mark.parametrize("task", ["text-classification", "token-classification"])
def test_without_a_class_the_task_says_which_head_the_tensors_are(
    task: str, tmp_path: Path
) -> None:
    is_of_texts = task.startswith("text")
    name = "sequence_classification" if is_of_texts else "token_classification"
    kind = getattr(transformers, f"BertFor{name.title().replace('_', '')}")
    tiny.CLASSES["bert-unnamed"] = kind
    folder = save_checkpoint(tmp_path / "unnamed", "bert-unnamed", num_labels=3)
    edit_config(folder, architectures=None)
    loaded = load_checkpoint(str(folder))
    assert tasks(loaded.heads) == ["embed", "embed-all", "embed-layers"]
    assert f"names no class, not {kind.__name__}; --task {task} takes them" in str(loaded.notes)
    bundle = export(str(folder), "x", Store(tmp_path / "store"), ExportOptions(tasks=(task,)))
    assert bundle.manifest.heads[name].labels == ("LABEL_0", "LABEL_1", "LABEL_2")  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = kind.from_pretrained(folder)(IDS).logits
        model = load_checkpoint(str(folder), tasks=(task,)).model
        states = model(IDS)
        logits = getattr(model, name)(states[:, 0] if is_of_texts else states)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def in_a_cache(folder: Path, root: Path) -> Path:
    """Move a folder to a snapshot of the hub's cache, which has links, also to folders."""
    blobs, snapshot = root / "models--tiny--bert/blobs", root / "models--tiny--bert/snapshots/86b5"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.move(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return snapshot


def with_modules(folder: Path) -> None:
    """Add the files of sentence-transformers."""
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode": "cls"}')
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [{"path": path, "type": f"x.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))


def test_links_of_a_snapshot_are_followed(folder: Path, tmp_path: Path) -> None:
    with_modules(folder)
    expected = load_checkpoint(str(folder))
    snapshot = in_a_cache(folder, tmp_path / "cache")
    for source in (snapshot, snapshot.parent.parent):
        loaded = load_checkpoint(str(source))
        assert loaded.recipe == expected.recipe
        assert loaded.source.weights_sha256 == expected.source.weights_sha256
        assert torch.equal(hidden(loaded), hidden(expected))
    assert snapshot / "model.safetensors" in files_to_export(snapshot.parent.parent)
    bundle = export(str(snapshot), "linked", Store(tmp_path / "store"))
    assert not any(file.is_symlink() for file in bundle.path.iterdir())
    (snapshot.parent / "86b6").mkdir()
    with pytest.raises(ExportError, match=r"give one of its snapshots: .*86b5, .*86b6"):
        load_checkpoint(str(snapshot.parent.parent))
    shutil.rmtree(snapshot.parent)
    snapshot.parent.mkdir()
    with pytest.raises(ExportError, match="give one of its snapshots: it has none"):
        load_checkpoint(str(snapshot.parent.parent))


@pytest.mark.parametrize("name", ["model.safetensors", "1_Pooling", "1_Pooling/config.json"])
@pytest.mark.parametrize("cached", [False, True])
def test_no_link_leads_out_of_a_checkpoint(
    folder: Path, tmp_path: Path, name: str, cached: bool
) -> None:
    with_modules(folder)
    outside = tmp_path / "outside"
    shutil.move(folder / name, outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(ExportError, match=r"leads to .*outside, outside the checkpoint's folder"):
        load_checkpoint(str(in_a_cache(folder, tmp_path / "cache") if cached else folder))


@pytest.mark.parametrize("front", ["license:\n- mit\n- other", "license:\ntags: x", "lang: en"])
def test_a_license_that_is_not_one_name_is_not_guessed(folder: Path, front: str) -> None:
    (folder / "README.md").write_bytes(f"---\n{front}\n---\n".encode() + b"\xff")
    assert load_checkpoint(str(folder)).license is None
    (folder / "README.md").write_text("---\nlicense: mit\n---\nlicense: none\n")
    assert load_checkpoint(str(folder)).license == "mit"


def cut(name: str, size: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:size] if size > 0 else data[: len(data) + size])

    return damage


def tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, edit)


def config(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **changes)


def evil_pickle(folder: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (folder / "executed",)  # type: ignore[return-value]

    torch.save({"x": Evil()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def numbers_in_a_pickle(folder: Path) -> None:
    torch.save({WORD: [1.0, 2.0]}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def with_file(name: str, text: str, remove: str = "model.safetensors") -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_text(text)
        (folder / remove).unlink(missing_ok=True)

    return damage


WORD = "bert.embeddings.word_embeddings.weight"
DOWN = "bert.encoder.layer.1.output.dense.weight"
UNTIED = "cls.predictions.decoder.weight"

DAMAGES = {
    "no config": (lambda f: (f / "config.json").unlink(), "holds no config.json"),
    "config is not JSON": (with_file("config.json", "{", remove="x"), "config.json is not JSON"),
    "activation": (config(hidden_act="mish"), "config.json: hidden_act 'mish' is not supported"),
    "heads do not divide": (config(num_attention_heads=5), "not a multiple of the 5 attention heads"),
    "word for a size": (config(model_type="roberta", pad_token_id=1, max_position_embeddings="x"), "max_position_embeddings cannot be 'x'"),
    "no activation of a head": (config(model_type="modernbert", norm_eps=1e-5, pad_token_id=0, global_rope_theta=9.0, local_rope_theta=9.0, classifier_activation=None), "classifier_activation must be an activation, got None"),
    "layers without number": (config(model_type="modernbert", norm_eps=1e-5, pad_token_id=0, global_rope_theta=9.0, local_rope_theta=9.0, num_hidden_layers=10**12), "num_hidden_layers: Input should be less than or equal to 128, got 1000000000000"),
    "no token types": (config(type_vocab_size=0), "has bert.embeddings.token_type_embeddings.weight, but config.json's type_vocab_size is 0"),
    "adapter": (tensors(lambda t: t.update({"bert.encoder.layer.0.adapter.weight": torch.zeros(1)})), "adapter.weight is part of the encoder"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
    "truncated file": (cut("model.safetensors", -1000), "model.safetensors is damaged"),
    "renamed tensor": (tensors(lambda t: t.update({"bert.encoder.layer.1.out.weight": t.pop(DOWN)})), r"lacks encoder.layers.1.down.weight.*bert.encoder.layer.1.out.weight"),
    "missing tensor": (tensors(lambda t: t.pop(DOWN)), "lacks encoder.layers.1.down.weight: a tensor is missing"),
    "truncated tensor": (tensors(lambda t: t.update({DOWN: t[DOWN][:5].clone()})), r"has shape \[5, 128\], but config.json's sizes ask for \[64, 128\]"),
    "integer tensor": (tensors(lambda t: t.update({DOWN: t[DOWN].int()})), "not floating-point"),
    "NaN": (tensors(lambda t: t[DOWN].fill_(float("nan"))), "holds NaN"),
    "half a head": (tensors(lambda t: t.pop("cls.predictions.transform.dense.bias")), "fill-mask head lacks transform.bias"),
    "more layers than the config": (config(num_hidden_layers=1), "config.json names only 1 layers"),
    "untied decoder": (tensors(lambda t: t.update({UNTIED: t[WORD] + 1})), "only tied decoders"),
    "other vocabulary": (lambda f: (f / "vocab.txt").write_text("\n".join(vocabulary()[:20])), "do not belong together"),
    "no mask token": (lambda f: (f / "vocab.txt").write_text("\n".join(vocabulary()).replace("[MASK]", "[NONE]")), "no mask token"),
    "code in a pickle": (evil_pickle, "more than tensors"),
    "numbers in a pickle": (numbers_in_a_pickle, "pytorch_model.bin is not a table of tensors"),
    "index names no file": (with_file("model.safetensors.index.json", '{"weight_map": {"x": "gone.safetensors"}}'), "gone.safetensors, which is missing"),
    "index climbs out": (with_file("model.safetensors.index.json", '{"weight_map": {"x": "../model.safetensors"}}'), "not a file beside it"),
    "index is no index": (with_file("model.safetensors.index.json", "[]"), "not an index of shards"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_gets_one_clear_line(
    folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder)
    with pytest.raises(ExportError, match=message) as caught:
        load_checkpoint(str(folder))
    assert "\n" not in str(caught.value)
    assert not (folder / "executed").exists()


def test_a_head_that_the_config_promises_must_be_there(tmp_path: Path) -> None:
    for kind, promised, task in (
        ("bert-mlm", "BertForPreTraining", "nsp"),
        ("distilbert", "DistilBertForQuestionAnswering", "qa"),
    ):
        folder, store = save_checkpoint(tmp_path / kind, kind), Store(tmp_path / "store")
        edit_config(folder, architectures=[promised])
        message = f"names {promised}, but the checkpoint has no {task};"
        with pytest.raises(ExportError, match=message):
            export(str(folder), kind, store)
        options = ExportOptions(tasks=("embed",))
        assert export(str(folder), kind, store, options).manifest.tasks == ("embed",)
