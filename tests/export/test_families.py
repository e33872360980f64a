"""Families beside BERT, from their checkpoints to a server's answers, and whose merges they read.

`tests/export/families` compares all families and heads with transformers.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer
from transformers import RobertaTokenizer

from cloze.export.errors import ExportError
from cloze.export.families import FAMILIES
from cloze.export.load.tokenizer import load_tokenizer
from cloze.export.publish import export
from cloze.model_store import Store
from tests.support.family_checkpoints import save, theirs
from tests.support.serving import Server, running_server
from tests.support.sources import file_of, name_of
from tests.support.tokenizer_kinds import byte_level

TEXTS = ["The harbour was quiet.", "A café\u0301 - in  Zürich, isn't it?", "🙂 pay"]
PAIRS = [("Where is the bank?", "The bank charges a fee."), (TEXTS[1], TEXTS[0])]
HEADS = ("masked_lm", "span")


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Return a RoBERTa of each head, and the folder of their checkpoints."""
    root = tmp_path_factory.mktemp("families")
    made = {name: save("roberta", name, root / name, max_position_embeddings=130) for name in HEADS}
    return made, root


@pytest.fixture(scope="module")
def tokenizer(networks: tuple[dict[str, Any], Path]) -> Tokenizer:
    """The file as it is: transformers' classes rebuild parts of it from their defaults."""
    return Tokenizer.from_file(str(networks[1] / "span" / "tokenizer.json"))


@pytest.fixture(scope="module")
def server(networks: tuple[dict[str, Any], Path]) -> Iterator[Server]:
    root = networks[1]
    for name in HEADS:
        export(str(root / name), name, Store(root / "store"))
    with running_server(root / "store", "--precision", "fp32") as server:
        yield server


def ask(server: Server, route: str, model: str, inputs: Any, **parameters: Any) -> Any:
    body = {"inputs": inputs, "model": model, "parameters": parameters}
    response = httpx.post(f"{server.url}{route}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_masks_are_filled_as_by_transformers(
    server: Server, networks: Any, tokenizer: Tokenizer
) -> None:
    for text in ("The <mask> was quiet.", "Pay the fee at the <mask>"):
        ids = torch.tensor([tokenizer.encode(text).ids])
        logits = theirs(networks[0]["masked_lm"], "masked_lm", ids)
        [place] = (ids[0] == tokenizer.token_to_id("<mask>")).nonzero()[0].tolist()
        best = logits[0, place].softmax(0).topk(3)
        ours = ask(server, "/fill-mask", "masked_lm", text, top_k=3)
        assert [row["token"] for row in ours] == best.indices.tolist()
        scores = [row["score"] for row in ours]
        assert scores == pytest.approx(best.values.tolist(), rel=1e-4)


def test_white_space_that_has_tokens_is_no_answer(server: Server) -> None:
    """In byte-level BPE, "tabs\\tand" has a token for the tab."""
    for context in ("tabs\tand\t\t pay  ", "\n\n The bank\t"):
        question = {"question": "Where?", "context": context}
        answers = ask(server, "/qa", "span", question, top_k=50, align_to_words=False)
        assert answers
        assert all(answer["answer"].strip() for answer in answers)
    body = {"inputs": {"question": "Where?", "context": "\t \t\n"}, "model": "span"}
    refused = httpx.post(f"{server.url}/qa", json=body)
    assert refused.status_code == 422
    assert "inputs.context" in refused.json()["error"]


def save_merges(folder: Path, config: dict[str, str], settings: dict[str, str]) -> None:
    """Save a byte-level tokenizer as ``vocab.json`` and ``merges.txt``."""
    byte_level().model.save(str(folder))
    added = {"<mask>": byte_level().token_to_id("<mask>")}
    vocabulary = json.loads((folder / "vocab.json").read_text()) | added
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"} | config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({"tokenizer_class": "RobertaTokenizer"}, {}),
        ({}, {"tokenizer_class": "RobertaTokenizerFast"}),
        ({"tokenizer_class": "X"}, {"tokenizer_class": "RobertaTokenizer"}),
    ],
    ids=str,
)
def test_a_class_of_byte_level_bpe_decides_and_not_the_architecture(
    config: dict[str, str], settings: dict[str, str], tmp_path: Path
) -> None:
    save_merges(tmp_path, config, settings)
    loaded, expected = load_tokenizer(tmp_path), RobertaTokenizer.from_pretrained(tmp_path)
    for texts in (*((text,) for text in TEXTS), *PAIRS):
        assert loaded.tokenizer.encode(*texts).ids == expected(*texts)["input_ids"]


@pytest.mark.parametrize("kind", ["HerbertTokenizerFast", "CLIPTokenizer", None])
def test_merges_of_another_class_are_refused(kind: str | None, tmp_path: Path) -> None:
    """As allegro/herbert-base-cased, a BERT whose BPE is of characters."""
    save_merges(tmp_path, {} if kind is None else {"tokenizer_class": kind}, {})
    message = f"is a {kind}, which vocab.json" if kind else "nothing says which class"
    with pytest.raises(ExportError, match=message):
        load_tokenizer(tmp_path)


NO_FAMILY = re.compile(
    r"Bert(Normalizer|(Pre|WordPiece)Tokenizer)|RobertaProcessing"  # of the tokenizers library
    r"|sentence_[a-z-]+_config\.json|[Cc]ol(BERT|bert)|sbert_ce"  # files of sentence-transformers
    r"|cloze-bert|cloze-distilbert|SpanBERT|the BERT paper"  # bundles of the project, citations
    r"|SIGTERM|LongText"  # words that hold the three letters of a family by chance
)


def words_of(file: Path) -> Iterator[str]:
    """Yield each name and each string of a source file, but not docstrings."""
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    prose = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        for field in ("value", "id", "attr", "name", "arg", "module"):
            if isinstance(word := getattr(node, field, None), str) and node not in prose:
                yield word


def places(without: tuple[str, ...], pattern: str) -> list[str]:
    """Return where what serves and exports models matches; training uses transformers' classes."""
    return [
        f"{name}: {word}"
        for package in ("export", "model_store", "service")
        for file in sorted(file_of(package).rglob("*.py"))
        if not (name := name_of(file)).startswith(("export/train/", *without))
        for word in words_of(file)
        if re.search(pattern, NO_FAMILY.sub("", word), re.IGNORECASE)
    ]


def test_only_families_name_families() -> None:
    """A name of a family elsewhere, or its mark of words, is a place that a new one would miss."""
    stems = {"bert", *FAMILIES, *(family.class_prefix.lower() for family in FAMILIES.values())}
    assert places((), "|".join(stems)), "families themselves are found"
    # GLiNER's tensors have the name `bert_layer` for an encoder of any family.
    assert not places(("export/families/", "export/load/gliner.py"), "|".join(stems))
    assert not places(("export/load/tokenizer", "export/measure/masking.py"), r"##(?! )|Ġ|▁")
