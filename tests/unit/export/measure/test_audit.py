"""The audit's figures, beside the papers' formulas and a direct computation with transformers."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoTokenizer, BertForMaskedLM

from cloze.cli import cli
from cloze.export.measure.audit import (
    SentencePair,
    associate,
    preferences,
    read_stereotypes,
    shared_tokens,
)
from cloze.export.measure.evaluate import open_subject
from cloze.export.measure.scorer import Subject
from cloze.model_store.store import Store
from tests.support import tiny

CPU = torch.device("cpu")
CLS, SEP = 2, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("model"), "bert")


@pytest.fixture(scope="module")
def subject(folder: Path) -> Subject:
    return open_subject(str(folder), Store(Path()), CPU)


PAIRS = [
    SentencePair(f"{more} was {word} .", f"{less} was {word} .", "age")
    for more, less in (("he", "she"), ("the man", "the woman"), ("king", "an owl"))
    for word in ("old", "red", "the capital of france", "in the house")
]


@torch.no_grad()
def shared_score(folder: Path, text: str, shared: set[str]) -> float:
    """The log probabilities of the tokens of ``shared``, each at a mask in its place."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertForMaskedLM.from_pretrained(folder).eval()
    ids, total = tokenizer(text, return_tensors="pt").input_ids, 0.0
    for position, token in enumerate(tokenizer.convert_ids_to_tokens(ids[0])):
        if token in shared:
            masked = ids.clone()
            masked[0, position] = tokenizer.mask_token_id
            total += float(model(masked).logits[0, position].log_softmax(-1)[ids[0, position]])
    return total


def test_preferences_are_those_of_transformers(folder: Path, subject: Subject) -> None:
    expected = []
    for pair in PAIRS:
        tokens = [
            set(AutoTokenizer.from_pretrained(folder).tokenize(t)) for t in (pair.more, pair.less)
        ]
        more, less = (
            shared_score(folder, t, tokens[0] & tokens[1]) for t in (pair.more, pair.less)
        )
        expected.append(float(more > less))
    assert set(expected) == {0.0, 1.0}
    assert preferences(subject, PAIRS).tolist() == expected
    assert preferences(subject, [SentencePair("he", "he")]).tolist() == [0.5]
    assert preferences(subject, [SentencePair("he", "she")]).tolist() == [0.5], "nothing is shared"


def test_only_shared_tokens_are_scored_and_not_the_special_ones() -> None:
    more, less = [CLS, 5, 9, 6, SEP], [CLS, 5, 6, SEP]
    assert shared_tokens(more, less) == ([1, 3], [1, 2])
    # The matcher of the standard library leaves out frequent elements unless told otherwise.
    more, less = [CLS, *[7] * 250, SEP], [CLS, *[7] * 250, 8, SEP]
    assert [len(each) for each in shared_tokens(more, less)] == [250, 250]


def test_pairs_of_stereotypes(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text("id,sent_more,sent_less\n1,a b,a c\n2,d,e\n")
    assert read_stereotypes(file) == [SentencePair("a b", "a c"), SentencePair("d", "e")]


def unit(rng: np.random.Generator, words: int) -> np.ndarray:
    vectors = rng.normal(size=(words, 6))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_the_effect_and_the_p_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(7)
    x, y, a, b = (unit(rng, words) for words in (4, 4, 3, 3))
    # s(w, A, B) of Caliskan et al. 2017
    values = np.array([np.mean([w @ v for v in a]) - np.mean([w @ v for v in b]) for w in (*x, *y)])
    effect = (values[:4].mean() - values[4:].mean()) / values.std(ddof=1)
    statistic = values[:4].sum() - values[4:].sum()
    at_least = [
        values[list(chosen)].sum() - np.delete(values, chosen).sum() >= statistic - 1e-12
        for chosen in combinations(range(8), 4)
    ]
    assert len(at_least) == 70
    figure = associate("", x, y, a, b)
    assert figure.value == pytest.approx(effect)
    assert figure.p == pytest.approx(np.mean(at_least))
    assert figure.low < figure.value < figure.high
    assert associate("", y, x, a, b).value == pytest.approx(-effect)


def test_the_command_prints_the_figures_and_writes_them_into_the_card(
    folder: Path, tmp_path: Path
) -> None:
    def run(*options: str) -> str:
        result = CliRunner().invoke(cli, ["audit", str(folder), "--device", "cpu", *options])
        assert result.exit_code == 0, result.output
        return result.stdout

    card = folder / "README.md"
    card.write_text(
        "---\nlicense: mit\n---\n\n# A model\n\n## Audit\n\nearlier figures\n\n## Use\n\nAs it is.\n"
    )
    figures = [json.loads(line) for line in run("--json").splitlines()]
    assert {"measure", "value", "low", "high", "p", "count"} <= figures[0].keys()
    table, once = run().splitlines(), card.read_text()
    assert len(table) == 1 + len(figures) == 9
    first = figures[0]
    shown = f"{first['value']:.3f} | {first['low']:.3f} to {first['high']:.3f} | {first['p']:.4f}"
    assert f"| weat | {first['group']} | {shown} | 50 |" in once
    assert once.startswith("---\nlicense: mit\n---\n\n# A model\n\n## Audit\n\n| measure |")
    assert once.endswith("| 16 |\n\n## Use\n\nAs it is.\n")
    assert "earlier" not in once
    run()
    assert card.read_text() == once
    refused = CliRunner().invoke(cli, ["audit", str(folder), "--crows-pairs", str(card)])
    assert refused.exit_code == 1
    assert "not in CrowS-Pairs' format" in refused.stderr
