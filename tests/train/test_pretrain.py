"""Pre-training and distillation: a run learns, goes on, and leaves what transformers reads."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from pydantic import ValidationError
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertForMaskedLM, BertForPreTraining

from cloze.export.errors import TrainError
from cloze.export.families import FAMILIES
from cloze.export.measure.examples import UNPAIRED
from cloze.export.publish import export
from cloze.export.train.batches import TextBatch
from cloze.export.train.distill import Distillation, distill, kept_layers, make_student
from cloze.export.train.folder import open_folder
from cloze.export.train.kept_embeddings import KeptEmbeddings, open_sentences, unmasked_texts
from cloze.export.train.objectives import MaskedText, ReplacedTokens, run_masked
from cloze.export.train.pretrain import pretrain
from cloze.export.train.progress import read_log
from cloze.export.train.recipe import (
    DistillRecipe,
    Optimisation,
    Phase,
    Pretraining,
    PretrainRecipe,
)
from cloze.export.train.run_options import RunOptions, Schedule
from cloze.model_store import Store
from tests.support.family_checkpoints import ids_of, save
from tests.support.fine_tuning import as_sentences, save_source, slow_but, stopped_after
from tests.support.training import quietly, run_options, tiny_recipe

pytestmark = pytest.mark.usefixtures("one_thread")

WEIGHTS = "model.safetensors"
CPU = torch.device("cpu")
RATES = Optimisation(learning_rate=3e-3, precision="fp32")
STILL = Optimisation(learning_rate=1e-9, weight_decay=0.0, precision="fp32")
CHOSEN = torch.tensor([2, 3, 4, 11, 16])
SPANS = torch.tensor([[2, 4], [2, 4], [2, 4], [11, 11], [16, 16]])


def phases(steps: int, tokens: int = 32) -> list[Phase]:
    return [Phase(tokens=tokens, sequences=8, steps=steps)]


def short(steps: int) -> dict[str, Any]:
    rates = RATES if steps > 3 else STILL
    return {"optimisation": rates, "phases": phases(steps), "held_out": 0.1}


def further(steps: int, **pretraining: Any) -> PretrainRecipe:
    given = {"pretraining": {"sentence": "none", **pretraining}, **short(steps)}
    return PretrainRecipe.model_validate(given)


def student_recipe(steps: int, **pretraining: Any) -> DistillRecipe:
    given = {"pretraining": pretraining, "dropout": 0.0, **short(steps)}
    return DistillRecipe.model_validate(given)


def go_on(
    run: str, source: Path, text: Path, out: Path, steps: int, licence: str = "", **more: Any
) -> Path:
    """Train a model further, or a student of it."""
    given, options = (
        open_folder(str(source)),
        RunOptions(out, CPU, quietly, license=licence or None),
    )
    if run == "further":
        return pretrain([text], further(steps, **more), options, source=given)
    return distill(given, [text], student_recipe(steps, **more), options)


@pytest.fixture(scope="module")
def trained(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of a run long enough to learn words of the stories."""
    folder = tmp_path_factory.mktemp("trained")
    return pretrain([stories], tiny_recipe(steps=150), run_options(folder))


def bert(kind: Any = BertForPreTraining, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(
        **sizes, intermediate_size=64, max_position_embeddings=66, vocab_size=60
    )
    network = kind(config).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return network


def batch_of(ids: Tensor, next_labels: tuple[int, ...] = ()) -> TextBatch:
    """Three sequences of nine tokens, of which five are chosen."""
    torch.manual_seed(1)
    return TextBatch(
        input_ids=ids,
        token_type_ids=torch.zeros_like(ids),
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        first_tokens=torch.tensor([9, 7, 9]),
        positions=CHOSEN,
        labels=torch.randint(5, 60, (len(CHOSEN),)),
        next_labels=torch.tensor(next_labels, dtype=torch.int64),
    )


def tokens() -> Tensor:
    return torch.randint(5, 60, (3, 9), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_product_with_the_vocabulary_is_of_chosen_tokens(family: str, tmp_path: Path) -> None:
    network = save(family, "masked_lm", tmp_path, max_position_embeddings=66)
    ids, shapes = ids_of(network, 9), []
    expected = network(ids).logits
    counting = network.get_output_embeddings().register_forward_hook(
        lambda _, __, output: shapes.append(tuple(output.shape[:-1]))
    )
    output = run_masked(network, batch_of(ids))
    counting.remove()
    assert shapes == ([] if family == "mobilebert" else [(5,)])
    torch.testing.assert_close(output.logits, expected.flatten(0, 1)[CHOSEN])
    torch.testing.assert_close(output.hidden, network.base_model(ids)[0])
    assert torch.equal(network(ids).logits, expected), "nothing of it stays"


@torch.no_grad()
@pytest.mark.parametrize("labels", [(0, 1, 1), (0, UNPAIRED, 1)])
def test_masked_tokens_and_next_sentence(labels: tuple[int, ...]) -> None:
    """A batch with few pairs has little weight: the loss of a pair counts per sequence."""
    network, batch = bert(), batch_of(tokens(), labels)
    loss, figures = MaskedText(network, Pretraining(sentence_weight=3.0))(batch)
    masked = torch.full((27,), -100)
    masked[CHOSEN] = batch.labels
    given = {"labels": masked.view(3, 9), "next_sentence_label": batch.next_labels}
    whole = network(batch.input_ids, **given)
    logits = whole.prediction_logits.flatten(0, 1)
    pairs = whole.loss - F.cross_entropy(logits, masked, ignore_index=-100)
    share = sum(label != UNPAIRED for label in labels) / 3
    torch.testing.assert_close(figures["sentence_loss"], share * pairs)
    torch.testing.assert_close(loss, figures["masked_loss"] + 3 * share * pairs)


@torch.no_grad()
def test_span_boundary() -> None:
    """Joshi et al. 2020, section 3.2: y = LN(GELU(W2 LN(GELU(W1 [left; right; place]))))."""
    network, batch = bert(BertForMaskedLM), batch_of(tokens())
    module = MaskedText(network, Pretraining(unit="span", span_boundary=True, sentence="none"))
    module.eval()
    hidden = network.bert(batch.input_ids)[0].flatten(0, 1)
    weights = module.boundary.state_dict()
    losses = []
    for position, (first, last), label in zip(CHOSEN, SPANS, batch.labels, strict=True):
        place = weights["place.weight"][position - first]
        row = torch.cat([hidden[first - 1], hidden[last + 1], place])
        for n in (0, 3):
            row = F.linear(row, weights[f"layers.{n}.weight"], weights[f"layers.{n}.bias"])
            norm = (weights[f"layers.{n + 2}.{name}"] for name in ("weight", "bias"))
            row = F.layer_norm(F.gelu(row), row.shape, *norm, eps=1e-12)
        logits = network.bert.embeddings.word_embeddings.weight @ row + weights["decoder.bias"]
        losses.append(-logits.log_softmax(0)[label])
    loss, figures = module(batch)
    torch.testing.assert_close(figures["boundary_loss"], torch.stack(losses).mean())
    torch.testing.assert_close(loss, figures["masked_loss"] + figures["boundary_loss"])


@torch.no_grad()
def test_replaced_tokens() -> None:
    """Clark et al. 2020, section 2, with a generator that is sure of one token."""
    sure = 17
    generator, encoder = bert(BertForMaskedLM), bert(transformers.BertModel, seed=5)
    generator.cls.predictions.bias[sure] = 1e4
    batch = batch_of(tokens())
    batch.labels[1] = sure  # a right guess is no replacement
    module = ReplacedTokens(encoder, generator)
    corrupted = batch.input_ids.flatten().clone()
    corrupted[CHOSEN] = sure
    replaced = torch.zeros(27)
    replaced[CHOSEN] = (batch.labels != sure).float()
    scores = module.finder(encoder(corrupted.view(3, 9))[0]).flatten()
    found = F.binary_cross_entropy_with_logits(scores, replaced)
    guessed = F.cross_entropy(generator(batch.input_ids).logits.flatten(0, 1)[CHOSEN], batch.labels)
    torch.testing.assert_close(module(batch)[0], guessed + 50 * found)


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["mean", ("cls", "mean")])
def test_kept_embeddings(trained: Path, tmp_path: Path, pooling: Any) -> None:
    """The cosine of sentence-transformers' own embeddings of the first, unmasked texts."""
    source = as_sentences(trained, tmp_path / "sentences", pooling, ["dense"])
    original, changed = (open_sentences(open_folder(str(source))) for _ in range(2))
    for parameter in changed[0].model.parameters():
        parameter += 0.02 * torch.randn_like(parameter)
    batch = batch_of(tokens())
    ids, mask = unmasked_texts(batch, 1000, 9)
    assert ids[1].tolist()[7:] == [0, 0], "the second text is cut off"
    features = {"input_ids": ids, "attention_mask": mask.long()}
    ours, theirs = (model({**features})["sentence_embedding"] for model in (changed, original))
    recipe = Pretraining(keep_embeddings=True, embedding_weight=7.0, embedding_tokens=1000)
    kept = KeptEmbeddings(original, recipe)
    cosine = kept.cosine(changed[0].model.eval(), batch)
    torch.testing.assert_close(cosine, F.cosine_similarity(ours, theirs).mean())
    network = AutoModelForMaskedLM.from_pretrained(trained).eval()
    module = MaskedText(network, recipe, kept)
    loss, figures = module(batch)
    torch.testing.assert_close(loss, figures["masked_loss"] + 7 * (1 - figures["embedding_cosine"]))


@torch.no_grad()
def test_distillation_is_the_sum_of_three_losses() -> None:
    """Sanh et al. 2019, section 3, by transformers' own full logits."""
    teacher, batch = bert(BertForMaskedLM), batch_of(tokens())
    student = make_student(teacher, dropout=0.0).eval()
    recipe = DistillRecipe(
        phases=phases(1), temperature=2.0, soft_weight=5.0, masked_weight=2.0, cosine_weight=3.0
    )
    given = {"input_ids": batch.input_ids, "output_hidden_states": True}
    outputs = [network(**given) for network in (student, teacher)]
    logits, targets = (output.logits.flatten(0, 1)[CHOSEN] for output in outputs)
    hidden = [output.hidden_states[-1].flatten(0, 1) for output in outputs]
    soft = F.kl_div((logits / 2).log_softmax(1), (targets / 2).softmax(1), reduction="batchmean")
    cosine = torch.nn.CosineEmbeddingLoss()(*hidden, torch.ones(27))
    expected = 5 * 4 * soft + 2 * F.cross_entropy(logits, batch.labels) + 3 * cosine
    torch.testing.assert_close(Distillation(student, teacher, recipe)(batch)[0], expected)


SPANS_OF_WORDS = {"unit": "span", "span_boundary": True, "sentence": "none", "dynamic": False}
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "masked": ({}, BertForPreTraining),
    "order": ({"unit": "whole-word", "sentence": "sop"}, BertForMaskedLM),
    "spans": (SPANS_OF_WORDS, BertForMaskedLM),
    "replaced": ({"method": "rtd", "sentence": "none"}, transformers.BertModel),
}
"""Kinds of runs from nothing, and the class of the result in transformers."""


@pytest.mark.parametrize("name", slow_but(KINDS, "masked"))
def test_it_learns_and_transformers_reads_it(name: str, stories: Path, tmp_path: Path) -> None:
    pretraining, kind = KINDS[name]
    recipe = tiny_recipe(steps=80, **pretraining)
    folder = pretrain([stories], recipe, run_options(tmp_path / "run"))
    log = read_log(folder.parent)
    for loss in ("masked_loss", "boundary_loss")[: 1 + (name == "spans")]:
        assert log[-1][loss] < 0.9 * log[0][loss], loss
    assert log[-1]["step"] == 160
    assert log[-1]["tokens_seen"] > log[0]["tokens_seen"] > 0
    assert (folder.parent / "curves.png").read_bytes().startswith(b"\x89PNG")
    card = (folder / "README.md").read_text()
    assert "stories.txt" in card
    assert '"seed": 1' in card
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [kind.__name__]
    _, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not [name for name in info["missing_keys"] if "pooler" not in name]
    assert not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 64
    assert tokenizer("The OLD king.").input_ids[1:4] == tokenizer("the old king").input_ids[1:4]
    positions = load_file(folder / WEIGHTS)
    (table,) = (positions[name] for name in positions if "position_embeddings" in name)
    assert torch.equal(table[40:64], table[1:25]), "no phase reads them: they are copies"


EVERYTHING = {"accumulation": 2, "average": 0.6, "decay": 0.5}
EVERYTHING |= {"embedding_learning_rate": 1e-3, "head_learning_rate": 2e-3}


@pytest.mark.parametrize("name", ["masked", "replaced", "every field", "student"])
def test_going_on_equals_not_stopping(
    name: str, trained: Path, stories: Path, tmp_path: Path
) -> None:
    """Stopped at several steps, between checkpoints and phases; dropout is on."""
    pretraining = KINDS[name][0] if name in KINDS else {"rate": 0.3, "final_rate": 0.15}
    recipe = tiny_recipe(steps=10, **pretraining)
    if name == "every field":
        optimisation = recipe.optimisation.model_copy(update=EVERYTHING)
        recipe = recipe.model_copy(update={"optimisation": optimisation})

    def start(folder: str) -> Path:
        options = RunOptions(tmp_path / folder, CPU, quietly, Schedule(log=5, checkpoint=7))
        if name == "student":
            return distill(open_folder(str(trained)), [stories], student_recipe(20), options)
        return pretrain([stories], recipe, options)

    straight = load_file(start("straight") / WEIGHTS)
    for after in (3, 8, 9):
        with stopped_after(after):
            start("interrupted")
    resumed = load_file(start("interrupted") / WEIGHTS)
    torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
    steps = [line["step"] for line in read_log(tmp_path / "interrupted")]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize("family", slow_but(FAMILIES, "bert"))
def test_every_family_goes_on_and_has_a_student(family: str, stories: Path, tmp_path: Path) -> None:
    source = save_source(family, tmp_path / "source")
    given = open_folder(str(source))
    fast = Optimisation(learning_rate=1e-2, precision="fp32")
    recipe = further(40).model_copy(update={"optimisation": fast})
    results = {
        "further": pretrain([stories], recipe, run_options(tmp_path / "further"), source=given),
        "student": go_on("student", source, stories, tmp_path / "student", 4),
    }
    log = read_log(tmp_path / "further")
    assert log[-1]["masked_loss"] < 0.95 * log[0]["masked_loss"]
    for name, folder in results.items():
        network, info = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
        assert (list(info["missing_keys"]), list(info["unexpected_keys"])) == ([], [])
        layers, before = network.config.num_hidden_layers, given.config.num_hidden_layers
        assert layers == (before if name == "further" else max(1, before // 2))
        ids = AutoTokenizer.from_pretrained(folder)("an owl").input_ids
        assert ids == given.tokenizer("an owl").input_ids
        assert network(torch.tensor([ids])).logits.isfinite().all()


def test_a_missing_head_is_made_or_refused(trained: Path, stories: Path, tmp_path: Path) -> None:
    said: list[str] = []
    source = tmp_path / "encoder"
    AutoModelForMaskedLM.from_pretrained(trained).bert.save_pretrained(source)
    AutoTokenizer.from_pretrained(trained).save_pretrained(source)
    options = RunOptions(tmp_path / "run", CPU, said.append)
    recipe = further(2, sentence="nsp")
    made = pretrain([stories], recipe, options, source=open_folder(str(source)))
    assert said[0].startswith("the checkpoint lacks a head of the recipe")
    assert not BertForPreTraining.from_pretrained(made, output_loading_info=True)[1]["missing_keys"]
    roberta = save_source("roberta", tmp_path / "roberta")
    with pytest.raises(TrainError, match="a roberta has no head for nsp"):
        go_on("further", roberta, stories, tmp_path / "other", 2, sentence="nsp")


@pytest.mark.parametrize("run", ["further", "student"])
def test_a_sentence_transformer_stays_one(
    run: str, trained: Path, stories: Path, tmp_path: Path
) -> None:
    """Its pooling of two vectors, its layers after the pooling, and its prompts."""
    source, layers = tmp_path / "source", ["dense", "normalize"]
    as_sentences(trained, source, ("cls", "mean"), layers)
    sentences = SentenceTransformer(str(source), device="cpu")
    sentences[0].model = BertForPreTraining.from_pretrained(trained)  # with its heads
    sentences.save(str(source), create_model_card=False)
    folder = go_on(run, source, stories, tmp_path / "run", 2)
    before, after = (SentenceTransformer(str(each), device="cpu") for each in (source, folder))
    assert after.prompts == before.prompts
    assert [type(module) for module in after] == [type(module) for module in before]
    for old, new in zip(list(before)[1:], list(after)[1:], strict=True):
        torch.testing.assert_close(new.state_dict(), old.state_dict(), rtol=0, atol=0)
    texts = ["The old king sang a song.", "an owl"]
    assert after.encode(texts).shape == (2, 10)
    if run == "further":
        np.testing.assert_allclose(after.encode(texts), before.encode(texts), atol=1e-5)
    bundle = export(str(folder), "kept", Store(tmp_path / "store"))
    assert {"fill-mask", "embed"} <= set(bundle.manifest.tasks)


@pytest.mark.parametrize("run", ["further", "student"])
def test_a_licence_goes_from_model_to_model(run: str, stories: Path, tmp_path: Path) -> None:
    source = save_source("bert", tmp_path / "source")

    def license_of(name: str, given: str = "") -> str | None:
        return open_folder(str(go_on(run, source, stories, tmp_path / name, 1, given))).license

    assert license_of("unknown") is None
    (source / "README.md").write_text("---\nlicense: mit\n---\n")
    assert license_of("kept") == "mit"
    assert license_of("named", "cc-by-sa-4.0") == "cc-by-sa-4.0"


@torch.no_grad()
def test_the_student_computes_as_the_kept_layers_of_the_teacher() -> None:
    """A BERT without its other layers gives the numbers of the DistilBERT."""
    assert kept_layers(12, 6) == [0, 2, 4, 7, 9, 11], "half, with the first and the last"
    assert [kept_layers(n, max(1, n // 2)) for n in (4, 2, 1)] == [[0, 3], [1], [0]]
    teacher = bert(BertForMaskedLM)
    student = make_student(teacher, dropout=0.0).eval()
    assert type(student) is transformers.DistilBertForMaskedLM
    teacher.bert.encoder.layer = torch.nn.ModuleList([teacher.bert.encoder.layer[1]])
    ids = tokens()
    torch.testing.assert_close(student(ids).logits, teacher(ids).logits, atol=1e-4, rtol=1e-4)


def test_a_student_agrees(trained: Path, stories: Path, tmp_path: Path) -> None:
    first = go_on("student", trained, stories, tmp_path / "first", 120)
    log = read_log(first.parent)
    assert log[-1]["held_out_soft_loss"] < log[0]["soft_loss"]
    assert log[-1]["held_out_agreement"] > 0.6
    assert "token_type_ids" not in AutoTokenizer.from_pretrained(first)("an owl")


def test_a_field_of_a_recipe_of_distillation_is_used_or_refused() -> None:
    DistillRecipe.model_validate({"pretraining": {"final_rate": 0.1}, "phases": phases(1)})
    for name, value in (("sentence_weight", 1.0), ("span_boundary", False)):
        with pytest.raises(ValidationError, match=f"distillation does not use {name}"):
            DistillRecipe.model_validate({"pretraining": {name: value}, "phases": phases(1)})


def test_a_batch_of_single_sentences_has_no_pair_to_learn_from(
    trained: Path, stories: Path, tmp_path: Path
) -> None:
    single = [Phase(tokens=32, sequences=2, steps=8, single=0.99)]
    recipe = further(8, sentence="nsp").model_copy(update={"phases": single})
    pretrain([stories], recipe, run_options(tmp_path), source=open_folder(str(trained)))
    assert all(math.isfinite(line["loss"]) for line in read_log(tmp_path))
