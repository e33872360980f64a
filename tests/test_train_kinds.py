"""Training with tokenizers that are not WordPiece: byte-level BPE and Unigram.

The oracles are the tokenizers library for ids and characters, and transformers for the numbers of
the checkpoint that a run leaves.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, normalizers
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForPreTraining,
    BertForQuestionAnswering,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForQuestionAnswering,
)

from cloze.export.errors import TrainError
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.load.tokenizer import describe_tokenizer
from cloze.export.measure.evaluate import EvaluationData, evaluate, open_subject
from cloze.export.measure.squad import Question
from cloze.export.publish import export
from cloze.export.train.answers import make_windows
from cloze.export.train.batches import TextBatches, make_masking
from cloze.export.train.corpus import prepare_corpus
from cloze.export.train.embedding import EmbeddingFiles, finetune_embedding
from cloze.export.train.embeddings import unmasked_texts
from cloze.export.train.examples import SentenceObjective
from cloze.export.train.masking import Unit
from cloze.export.train.pretrain import pretrain
from cloze.export.train.progress import read_log
from cloze.export.train.recipe import (
    EmbedRecipe,
    Optimisation,
    Phase,
    Pretraining,
    PretrainRecipe,
    TextRecipe,
)
from cloze.model_store import Store
from tests.tokenizer_kinds import byte_level, unigram
from tests.training import quietly, run_options, write_pairs

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
}
TEXT = "The captain found a coin by the cold river."


class Kind(NamedTuple):
    """A kind of tokenizer, and a model of transformers that has it.

    Attributes:
        tokenizer: the tokenizer.
        config: sizes of the model.
        model: the model for pre-training.
        questions: the model for question answering.
        sentence: the sentence objective that the model has a head for.
        mark: the mark of tokens with a space before them.
    """

    tokenizer: Tokenizer
    config: Any
    model: Any
    questions: Any
    sentence: SentenceObjective
    mark: str


KINDS = {
    "byte-level": Kind(
        byte_level(),
        RobertaConfig(
            **SIZES,
            vocab_size=byte_level().get_vocab_size(),
            type_vocab_size=1,
            layer_norm_eps=1e-5,
        ),
        RobertaForMaskedLM,
        RobertaForQuestionAnswering,
        SentenceObjective.NONE,
        "Ġ",
    ),
    "unigram": Kind(
        unigram(),
        BertConfig(**SIZES, vocab_size=unigram().get_vocab_size()),
        BertForPreTraining,
        BertForQuestionAnswering,
        SentenceObjective.NSP,
        "▁",
    ),
}


def further_recipe(sentence: SentenceObjective, steps: int) -> PretrainRecipe:
    return PretrainRecipe(
        pretraining=Pretraining(
            unit=Unit.WHOLE_WORD, sentence=sentence, keep_embeddings=steps < 10
        ),
        optimisation=Optimisation(learning_rate=5e-3, precision="fp32"),
        phases=[Phase(tokens=40, sequences=16, steps=steps)],
        held_out=0.1,
    )


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def trained(kind: Kind, stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of transformers that learnt the stories here."""
    return learnt(kind, stories, 250, tmp_path_factory.mktemp("run"))


def learnt(kind: Kind, stories: Path, steps: int, folder: Path) -> Path:
    torch.manual_seed(0)
    source = folder / "source"
    kind.model(kind.config).save_pretrained(source)
    kind.tokenizer.save(str(source / "tokenizer.json"))
    recipe = further_recipe(kind.sentence, steps)
    return pretrain([stories], recipe, run_options(folder / "run"), source=str(source))


def measured(checkpoint: Path, stories: Path, folder: Path) -> dict[str, float]:
    subject = open_subject(str(checkpoint), Store(Path()), CPU)
    data = EvaluationData([stories], [], [], held_out=0.1, sequences=60, tokens=32)
    return evaluate(subject, data, folder, quietly)


def test_masked_words_are_learnt(trained: Path, stories: Path, kind: Kind, tmp_path: Path) -> None:
    """A model that has learnt nothing knows 1 % of the words."""
    log = read_log(trained.parent)
    assert log[-1]["masked_loss"] < 0.6 * log[0]["masked_loss"]
    figures = measured(trained, stories, tmp_path)
    assert figures["fill_mask_whole_word_top1"] > 0.2
    assert ("nsp_accuracy" in figures) == (kind.sentence is SentenceObjective.NSP)


@pytest.mark.slow
def test_which_text_follows_is_learnt(stories: Path, tmp_path: Path) -> None:
    """Words of four pieces take longer to learn than those of a WordPiece vocabulary."""
    longer = learnt(KINDS["unigram"], stories, 3000, tmp_path)
    assert measured(longer, stories, tmp_path)["nsp_accuracy"] > 0.7


def test_transformers_reads_the_checkpoint_alike(trained: Path, kind: Kind) -> None:
    """The same ids, of a text and of a pair, and the same logits."""
    theirs = AutoTokenizer.from_pretrained(trained)
    ours = load_checkpoint(str(trained))
    ids = kind.tokenizer.encode(TEXT).ids
    assert theirs(TEXT)["input_ids"] == ids
    assert theirs(TEXT, TEXT)["input_ids"] == kind.tokenizer.encode(TEXT, TEXT).ids
    special = ours.tokenizer.special
    assert special.pair(ids[1:-1], ids[1:-1]) == kind.tokenizer.encode(TEXT, TEXT).ids
    types = special.pair_types(len(ids) - 2, len(ids) - 2)
    assert types.tolist() == kind.tokenizer.encode(TEXT, TEXT).type_ids
    network = kind.model.from_pretrained(trained).eval()
    batch = torch.tensor([ids])
    with torch.inference_mode():
        expected = network(batch, output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(ours.model(batch), expected, atol=1e-4, rtol=1e-4)


def test_embeddings_are_learnt_beside_the_heads(
    trained: Path, stories: Path, tmp_path: Path
) -> None:
    pairs = write_pairs(tmp_path / "pairs.csv")
    recipe = EmbedRecipe(
        optimisation=Optimisation(learning_rate=2e-3),
        contrastive_steps=5,
        contrastive_sequences=16,
        contrastive_tokens=24,
        epochs=5,
        sequences=16,
        tokens=40,
        text_sequences=4,
        held_out=0.1,
    )
    files = EmbeddingFiles(pairs=[pairs], held_out_pairs=[pairs], text=[stories])
    checkpoint = finetune_embedding(str(trained), files, recipe, run_options(tmp_path / "run"))
    bundle = export(str(checkpoint), "embedded", Store(tmp_path / "store"))
    measured = []
    for source in (str(checkpoint), f"bundle:{bundle.manifest.reference}"):
        subject = open_subject(source, Store(tmp_path / "store"), CPU)
        data = EvaluationData([stories], [pairs], [], held_out=0.1, sequences=20, tokens=32)
        measured.append(evaluate(subject, data, tmp_path / "text", quietly))
    assert measured[0]["sts_spearman"] > 0.5
    assert measured[1] == pytest.approx(measured[0], abs=1e-3)


def test_kept_embeddings_are_those_of_first_texts(
    kind: Kind, stories: Path, tmp_path: Path
) -> None:
    """Where both texts of a pair have type 0, their types do not say where the second begins."""
    tokenizer = describe_tokenizer(kind.tokenizer)
    corpus = prepare_corpus([stories], kind.tokenizer, tmp_path, held_out=0.1, report=quietly).train
    pretraining = Pretraining(sentence=SentenceObjective.NSP)
    phases = [Phase(tokens=48, sequences=8, steps=1)]
    recipe = TextRecipe(pretraining=pretraining, phases=phases)
    batch = TextBatches(corpus, recipe, tokenizer)(0, 0)
    ids, mask = unmasked_texts(batch, tokens=8 * 48, length=48)
    for row, real in zip(ids, mask, strict=True):
        text = row[real].tolist()
        assert text[0] == tokenizer.special.cls
        assert text.count(tokenizer.special.sep) == 1
        assert text[-1] == tokenizer.special.sep


@pytest.mark.parametrize("kind", ["byte-level"], indirect=True)  # the other family has the head
def test_a_head_that_no_checkpoint_of_the_family_has_is_not_trained(
    trained: Path, stories: Path, tmp_path: Path
) -> None:
    recipe = further_recipe(SentenceObjective.NSP, steps=3)
    with pytest.raises(TrainError, match="a roberta has no head for nsp"):
        pretrain([stories], recipe, run_options(tmp_path), source=str(trained))


def test_whole_words_are_those_between_spaces(kind: Kind) -> None:
    """A unit has the characters of one or more words between spaces, never a part of a word."""
    tokenizer = describe_tokenizer(kind.tokenizer)
    masking = make_masking(tokenizer, Pretraining(unit=Unit.WHOLE_WORD))
    text = "The harbour was quiet, and the bank charges another fee in the evening."
    encoding = kind.tokenizer.encode(text)
    ids = np.array(encoding.ids)
    units = masking._units(ids, ~masking.special[ids])
    masked = [
        text[encoding.offsets[unit[0]][0] : encoding.offsets[unit[-1]][1]].strip() for unit in units
    ]
    assert masked == text.split()
    assert any(len(unit) > 1 for unit in units)
    vocabulary = kind.tokenizer.get_vocab()
    begins = ~tokenizer.continuations()
    assert all(begins[n] for token, n in vocabulary.items() if token.startswith(kind.mark))


def test_a_text_without_spaces_is_not_one_word() -> None:
    tokenizer = unigram()
    tokenizer.add_tokens(["水", "火", "曜日"])
    described = describe_tokenizer(tokenizer)
    continues = described.continuations()
    for token in ("水", "火", "曜日"):
        assert not continues[tokenizer.token_to_id(token)]


def test_sentences_have_the_tokens_of_their_text(kind: Kind, tmp_path: Path) -> None:
    """A text that is cut into sentences has the tokens of the whole text."""
    text = "The harbour was quiet. The bank charges a fee. It is small."
    (tmp_path / "text.txt").write_text(text)
    corpus = prepare_corpus(
        [tmp_path / "text.txt"], kind.tokenizer, tmp_path / "tokens", held_out=0.0, report=quietly
    ).train
    whole = kind.tokenizer.encode(
        f" {text}" if kind.mark == "Ġ" else text, add_special_tokens=False
    )
    assert corpus.tokens.tolist() == whole.ids
    assert len(corpus.sentences) == 4


@pytest.mark.parametrize("splits_first", [True, False])
@pytest.mark.parametrize("answer", ["bank", "ﬁnance", "Zürich", "für"])
def test_answers_are_characters_of_the_original_text(
    kind: Kind, answer: str, splits_first: bool
) -> None:
    """The normaliser changes lengths: it decomposes, and removes what it decomposed."""
    tokenizer = Tokenizer.from_str(kind.tokenizer.to_str())
    if kind.mark == "▁":
        tokenizer = unigram(splits_first=splits_first)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()])
    context = "In  Zu\u0308rich, the bank für ﬁnance is Zürich's."
    question = Question("1", "", "Which?", context, ((context.index(answer), answer),))
    windows = make_windows(
        [question],
        tokenizer,
        describe_tokenizer(tokenizer).special,
        tokens=64,
        stride=8,
        question_tokens=8,
    )
    placed = [window for window in windows if window.start]
    assert placed
    for window in placed:
        first, last = window.offsets[window.start, 0], window.offsets[window.end, 1]
        assert context[first:last] == answer
        inside = window.offsets[window.offsets[:, 0] >= 0]
        assert not any(
            context[a:b] != context[a:b].strip() for a, b in inside if context[a:b].strip()
        )


def test_windows_have_the_pairs_of_the_tokenizer(kind: Kind) -> None:
    """A window that holds the whole paragraph is the pair that the post-processor makes."""
    question = Question("1", "", "Which bank?", TEXT, ())
    [window] = make_windows(
        [question],
        kind.tokenizer,
        describe_tokenizer(kind.tokenizer).special,
        tokens=64,
        stride=8,
        question_tokens=20,
    )
    expected = kind.tokenizer.encode("Which bank?", TEXT)
    assert window.input_ids.tolist() == expected.ids
    assert window.token_type_ids.tolist() == expected.type_ids
    rows = [n for n, part in enumerate(expected.sequence_ids) if part == 1]
    assert [n for n, (start, _) in enumerate(window.offsets) if start >= 0] == rows
    assert window.offsets[rows].tolist() == [list(expected.offsets[n]) for n in rows]
