"""Each family gives the numbers of transformers, from its checkpoint to a server's answers."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForPreTraining,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForQuestionAnswering,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    RobertaTokenizer,
)

from cloze.export.errors import ExportError
from cloze.export.families import FAMILIES
from cloze.export.load.tokenizer import load_tokenizer
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.manifest import Precision
from tests.support.serving import Server, running_server
from tests.support.sources import file_of, name_of
from tests.support.tokenizer_kinds import byte_level, unigram

LABELS = {0: "bad", 1: "fair", 2: "good"}
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "attn_implementation": "eager",
}
TEXTS = ["The harbour was quiet.", "A café\u0301 - in  Zürich, isn't it?", "🙂 pay"]
PAIRS = [("Where is the bank?", "The bank charges a fee."), (TEXTS[1], TEXTS[0])]


def roberta(tokenizer: Tokenizer, **settings: Any) -> RobertaConfig:
    return RobertaConfig(
        **SIZES,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=130,
        layer_norm_eps=1e-5,
        type_vocab_size=1,
        **settings,
    )


def save_random(model: type[PreTrainedModel], config: Any, tokenizer: Tokenizer, to: Path) -> Path:
    """Save a checkpoint whose weights, all biases and norms included, are random."""
    network = model(config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(network.named_parameters()):
            is_norm = "norm" in name.lower() and name.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, 0.1)
    network.tie_weights()
    network.save_pretrained(to)
    tokenizer.save(str(to / "tokenizer.json"))
    return to


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, pieces, units = tmp_path_factory.mktemp("families"), byte_level(), unigram()
    labels = {"id2label": LABELS, "num_labels": 3}
    bert = BertConfig(**SIZES, vocab_size=units.get_vocab_size(), max_position_embeddings=130)
    cases: dict[str, tuple[Any, Any, Tokenizer]] = {
        "roberta": (RobertaForMaskedLM, roberta(pieces), pieces),
        "roberta-classes": (RobertaForSequenceClassification, roberta(pieces, **labels), pieces),
        "roberta-entities": (RobertaForTokenClassification, roberta(pieces, **labels), pieces),
        "roberta-qa": (RobertaForQuestionAnswering, roberta(pieces), pieces),
        "bert-unigram": (BertForPreTraining, bert, units),
    }
    return {name: save_random(*case, root / name) for name, case in cases.items()}


def encode(checkpoint: Path, text: str, second: str | None = None) -> torch.Tensor:
    """Return the ids [1, S] as the file says, with special tokens.

    transformers' own tokenizer classes rebuild parts of the file from their defaults.
    """
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    encoding = tokenizer.encode(text) if second is None else tokenizer.encode(text, second)
    return torch.tensor([encoding.ids])


def oracle(model: Any, checkpoint: Path, ids: torch.Tensor) -> Any:
    """Return transformers' outputs: all token types are 0."""
    network = model.from_pretrained(checkpoint, attn_implementation="eager").eval()
    with torch.no_grad():
        return network(ids, output_hidden_states=True)


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]
) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("store")
    options = ExportOptions(precisions=(Precision.INT8,))
    for name, checkpoint in checkpoints.items():
        export(str(checkpoint), name, Store(root), options)
    with running_server(root, "--precision", "fp32") as server:
        yield server


def ask(server: Server, route: str, model: str, inputs: Any, **parameters: Any) -> Any:
    body = {"inputs": inputs, "model": model}
    if route == "/embed":
        body |= parameters
    elif parameters:
        body["parameters"] = parameters
    response = httpx.post(f"{server.url}{route}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("name", ["roberta", "bert-unigram"])
def test_masks_are_filled_as_by_transformers(
    server: Server, checkpoints: dict[str, Path], name: str
) -> None:
    model = RobertaForMaskedLM if name == "roberta" else BertForPreTraining
    tokenizer = Tokenizer.from_file(str(checkpoints[name] / "tokenizer.json"))
    for text in ("The <mask> was quiet.", "Pay the fee at the <mask>"):
        ids = encode(checkpoints[name], text)
        outputs = oracle(model, checkpoints[name], ids)
        logits = outputs.logits if name == "roberta" else outputs.prediction_logits
        [place] = (ids[0] == tokenizer.token_to_id("<mask>")).nonzero()[0].tolist()
        best = logits[0, place].softmax(0).topk(3)
        ours = ask(server, "/fill-mask", name, text, top_k=3)
        assert [row["token"] for row in ours] == best.indices.tolist()
        scores = [row["score"] for row in ours]
        assert scores == pytest.approx(best.values.tolist(), rel=1e-4)


@pytest.mark.parametrize("name", ["roberta", "bert-unigram"])
def test_embeddings_are_those_of_transformers(
    server: Server, checkpoints: dict[str, Path], name: str
) -> None:
    model = RobertaForMaskedLM if name == "roberta" else BertForPreTraining
    ours = ask(server, "/embed", name, TEXTS, normalize=False)
    for text, vector in zip(TEXTS, ours, strict=True):
        outputs = oracle(model, checkpoints[name], encode(checkpoints[name], text))
        theirs = outputs.hidden_states[-1][0].mean(0)
        np.testing.assert_allclose(vector, theirs, atol=1e-4)


def test_pairs_have_the_separators_of_the_tokenizer(
    server: Server, checkpoints: dict[str, Path]
) -> None:
    folder = checkpoints["bert-unigram"]
    for first, second in PAIRS:
        ids = encode(folder, first, second)
        logits = oracle(BertForPreTraining, folder, ids).seq_relationship_logits[0]
        rows = ask(server, "/nsp", "bert-unigram", {"text": first, "next": second})
        is_next = {row["label"]: row["score"] for row in rows}["IsNext"]
        assert is_next == pytest.approx(float(logits.softmax(0)[0]), abs=1e-4)


def test_texts_and_pairs_get_the_classes_of_transformers(
    server: Server, checkpoints: dict[str, Path]
) -> None:
    folder = checkpoints["roberta-classes"]
    inputs: list[Any] = [*TEXTS, *({"text": one, "text_pair": two} for one, two in PAIRS)]
    ours = ask(server, "/classify", "roberta-classes", inputs, function_to_apply="none", top_k=3)
    given: list[tuple[str, ...]] = [*((text,) for text in TEXTS), *PAIRS]
    for texts, rows in zip(given, ours, strict=True):
        logits = oracle(RobertaForSequenceClassification, folder, encode(folder, *texts)).logits[0]
        theirs = {LABELS[number]: float(value) for number, value in enumerate(logits)}
        assert {row["label"]: row["score"] for row in rows} == pytest.approx(theirs, abs=1e-4)


def test_tokens_get_the_labels_of_transformers(
    server: Server, checkpoints: dict[str, Path]
) -> None:
    folder = checkpoints["roberta-entities"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        rows = ask(
            server,
            "/token-classification",
            "roberta-entities",
            text,
            aggregation_strategy="none",
            ignore_labels=[],
        )
        logits = oracle(RobertaForTokenClassification, folder, encode(folder, text)).logits[0]
        scores = logits.softmax(1)[1:-1]
        assert [row["entity"] for row in rows] == [LABELS[int(one.argmax())] for one in scores]
        assert [row["score"] for row in rows] == pytest.approx(scores.amax(1).tolist(), abs=1e-4)
        offsets = tokenizer.encode(text).offsets[1:-1]
        assert [(row["start"], row["end"]) for row in rows] == offsets


def test_answers_are_found_where_transformers_finds_them(
    server: Server, checkpoints: dict[str, Path]
) -> None:
    folder = checkpoints["roberta-qa"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for question, context in PAIRS:
        answer = ask(
            server,
            "/qa",
            "roberta-qa",
            {"question": question, "context": context},
            max_answer_len=100,
            align_to_words=False,
        )
        encoding = tokenizer.encode(question, context)
        outputs = oracle(RobertaForQuestionAnswering, folder, torch.tensor([encoding.ids]))
        rows = [n for n, part in enumerate(encoding.sequence_ids) if part == 1]
        start, end = (one[0, rows] for one in (outputs.start_logits, outputs.end_logits))
        spans = start[:, None] + end[None, :]
        spans[torch.ones_like(spans).tril(-1) > 0] = -torch.inf  # an end before its start
        first, last = divmod(int(spans.argmax()), len(rows))
        offsets = [encoding.offsets[row] for row in rows]
        assert (answer["start"], answer["end"]) == (offsets[first][0], offsets[last][1])


def test_white_space_that_has_tokens_is_no_answer(server: Server) -> None:
    """In byte-level BPE, "tabs\\tand" has a token for the tab."""
    for context in ("tabs\tand\t\t pay  ", "\n\n The bank\t"):
        question = {"question": "Where?", "context": context}
        answers = ask(server, "/qa", "roberta-qa", question, top_k=50, align_to_words=False)
        assert answers
        assert all(answer["answer"].strip() for answer in answers)
    body = {"inputs": {"question": "Where?", "context": "\t \t\n"}, "model": "roberta-qa"}
    refused = httpx.post(f"{server.url}/qa", json=body)
    assert refused.status_code == 422
    assert "inputs.context" in refused.json()["error"]
    assert "white space" in refused.json()["error"]


def save_merges(folder: Path, config: dict[str, str], settings: dict[str, str]) -> None:
    """Save a byte-level tokenizer as ``vocab.json`` and ``merges.txt``."""
    byte_level().model.save(str(folder))
    added = {"<mask>": byte_level().token_to_id("<mask>")}
    vocabulary = json.loads((folder / "vocab.json").read_text()) | added
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({"model_type": "bert", "tokenizer_class": "RobertaTokenizer"}, {}),
        ({"model_type": "bert"}, {"tokenizer_class": "RobertaTokenizerFast"}),
        ({"model_type": "bert", "tokenizer_class": "X"}, {"tokenizer_class": "RobertaTokenizer"}),
    ],
    ids=str,
)
def test_a_class_of_byte_level_bpe_decides_and_not_the_architecture(
    config: dict[str, str], settings: dict[str, str], tmp_path: Path
) -> None:
    save_merges(tmp_path, config, settings)
    loaded, expected = load_tokenizer(tmp_path), RobertaTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert loaded.tokenizer.encode(text).ids == expected(text)["input_ids"]
        pair = expected(text, "a fee")["input_ids"]
        assert loaded.tokenizer.encode(text, "a fee").ids == pair


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ({"tokenizer_class": "HerbertTokenizerFast"}, {}, "is a HerbertTokenizerFast, which vocab"),
        ({}, {"tokenizer_class": "HerbertTokenizer"}, "is a HerbertTokenizer, which vocab.json"),
        ({}, {"tokenizer_class": "CLIPTokenizer"}, "is a CLIPTokenizer, which vocab.json"),
        ({}, {}, "nothing says which class .* no usual bert has: give tokenizer_class"),
    ],
)
def test_merges_of_another_class_are_refused(
    config: dict[str, str], settings: dict[str, str], message: str, tmp_path: Path
) -> None:
    """As allegro/herbert-base-cased, a BERT whose BPE is of characters."""
    save_merges(tmp_path, {"model_type": "bert"} | config, settings)
    with pytest.raises(ExportError, match=message):
        load_tokenizer(tmp_path)


def test_merges_of_words_that_end_in_a_mark_are_refused(tmp_path: Path) -> None:
    """Byte-level BPE marks the start of a word; this kind marks the end, whatever its class is."""
    save_merges(tmp_path, {"model_type": "roberta"}, {})
    learner = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        special_tokens=special, end_of_word_suffix="</w>", show_progress=False
    )
    learner.train_from_iterator(TEXTS, trainer)
    learner.model.save(str(tmp_path))
    with pytest.raises(ExportError, match=r"marks the ends of words, as in .*</w>"):
        load_tokenizer(tmp_path)


ROOT = Path(__file__).parents[2]
NO_FAMILY = re.compile(
    r"Bert(Normalizer|(Pre|WordPiece)Tokenizer)|RobertaProcessing"  # of the tokenizers library
    r"|sentence_[a-z-]+_config\.json"  # files of sentence-transformers
    r"|cloze-bert|cloze-distilbert"  # bundles of the project
    r"|SpanBERT|the BERT paper"  # citations
    r"|[Cc]ol(BERT|bert)|sbert_ce"  # files of late interaction and of sentence-transformers
    r"|SIGTERM|LongText"  # words that hold the three letters of a family by chance
)


def words_of(file: Path) -> Iterator[str]:
    """Yield each name and each string of a source file, but not docstrings."""
    tree = ast.parse(file.read_text())
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value
        for field in ("id", "attr", "name", "arg", "module"):
            if isinstance(word := getattr(node, field, None), str):
                yield word


def places(without: str | tuple[str, ...], pattern: str) -> list[str]:
    """Return where names or strings of what serves and exports models match a pattern.

    Training uses the classes of transformers.
    """
    without = ("export/train/", *((without,) if isinstance(without, str) else without))
    return [
        f"{name}: {word}"
        for package in ("export", "model_store", "service")
        for file in sorted(file_of(package).rglob("*.py"))
        if not (name := name_of(file)).startswith(without)
        for word in words_of(file)
        if re.search(pattern, NO_FAMILY.sub("", word), re.IGNORECASE)
    ]


def test_only_families_name_families() -> None:
    """A name of a family in a string or identifier elsewhere is a place that a new one would miss.

    Also a part of a longer word, such as the name of a class. Only tokenizers know how a word is
    marked, and what masks whole words; `##` before a space is a heading of a page.
    """
    stems = {"bert", *FAMILIES, *(family.class_prefix.lower() for family in FAMILIES.values())}
    assert places("no folder", "|".join(stems)), "families themselves are found"
    assert not places("export/families/", "|".join(sorted(stems)))
    assert not places(("export/load/tokenizer", "export/measure/masking.py"), r"##(?! )|Ġ|▁")


def test_the_page_of_families_is_the_generated_one() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/family-reference", "--check"], timeout=120, check=False
    )
    assert done.returncode == 0, "run scripts/family-reference"
