"""Pre-training on one screen: vocabulary, corpus, model, loop, checkpoint."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from export.checkpoint import Checkpoint, load_checkpoint
from export.models import Head, Model
from export.models.encoder import Encoder
from export.scorers import TorchScorer
from export.train.batches import TextBatch, TextBatches
from export.train.card import write_card
from export.train.corpus import Corpus, fingerprint, is_held_out, prepare_corpus, read_documents
from export.train.errors import TrainError
from export.train.loop import Schedule, train
from export.train.masking import Masking
from export.train.objectives import MaskedText, ReplacedTokens, make_pretraining
from export.train.pairs import Sentence
from export.train.recipe import Phase, Pretraining, PretrainRecipe, Vocabulary
from export.train.run_folder import VOCABULARY, claim
from export.train.save import save_checkpoint
from export.train.start import start_from
from export.train.vocabulary import CONTINUATION, SPECIAL_TOKENS, save_vocabulary, special_ids, train_tokenizer

CHECKPOINT = "checkpoint"
_EVALUATION_BATCHES = 8


def pretrain(
    files: list[Path],
    recipe: PretrainRecipe,
    folder: Path,
    *,
    source: str | None = None,
    vocabulary: Path | None,
    device: torch.device,
    schedule: Schedule,
    say: Callable[[str], None],
) -> Path:
    """Train a model from text; returns the folder of its checkpoint.

    Args:
        files: the text, as `corpus.read_documents`.
        recipe: the run.
        folder: of the run: vocabulary, tokenized text, state, log, curves, checkpoint.
        source: a checkpoint to go on from, with its sizes and its vocabulary; none: random weights.
        vocabulary: a folder with a ``tokenizer.json`` to use; one is learnt from the text if not given.
        device: where to compute.
        schedule: how often to log, evaluate and save.
        say: is told what happens, a line each.

    Raises:
        TrainError: see the parts.
    """
    checkpoint = _open_source(source, recipe, vocabulary) if source else None
    given = hashlib.sha256(open_tokenizer(vocabulary).to_str().encode()).hexdigest() if vocabulary else None
    began = checkpoint.source.weights_sha256 if checkpoint else None
    claim(folder, recipe, {"text": fingerprint(files), "vocabulary": given, "checkpoint": began})
    module: MaskedText | ReplacedTokens
    if checkpoint:
        heads = [Head.MASKED_LM] if recipe.pretraining.sentence is Sentence.NONE else [Head.MASKED_LM, Head.NEXT_SENTENCE]
        start = start_from(checkpoint, heads, dropout=recipe.model.dropout, seed=recipe.seed)
        tokenizer, module = start.tokenizer, MaskedText(start.model, recipe.pretraining)
    else:
        tokenizer = (
            open_tokenizer(vocabulary) if vocabulary else learn_vocabulary(files, recipe.vocabulary, folder, recipe.held_out, say)
        )
        module = make_pretraining(recipe.model, tokenizer.get_vocab_size(), recipe.pretraining, recipe.seed)
    corpus = prepare_corpus(files, tokenizer, folder / "corpus", held_out=recipe.held_out, say=say)
    say(f"a {recipe.model.family} of {module.model.parameter_count():,} parameters")
    batches = text_batches(
        corpus.train, recipe.pretraining, recipe.phases, tokenizer, recipe.seed, recipe.optimisation.accumulation
    )
    objective = TextObjective(
        module,
        batches,
        held_out_batches(corpus.held_out, recipe.pretraining, recipe.phases, tokenizer, recipe.seed, say),
        device,
    )

    def grow(step: int) -> None:
        if not checkpoint and not recipe.pretraining.shifted and (seen := batches.grows_from(step)) is not None:
            fill_positions(module, seen)

    train(objective, recipe.seed, recipe.optimisation, folder, device=device, schedule=schedule, say=say, before_step=grow)
    if not checkpoint:  # whose positions are learnt
        fill_positions(module, max(phase.tokens for phase in recipe.phases))
    if recipe.pretraining.sentence is Sentence.SOP:
        module.model.next_sentence = None  # it tells order, which is not what a next-sentence head is asked
    save_checkpoint(module.model, tokenizer, folder / CHECKPOINT)
    write_card(folder / CHECKPOINT, title="A BERT pre-trained on text", source=source, files=files, recipe=recipe, device=device)
    for line in guesses(module.model.cpu(), tokenizer, objective.held_out[-1][0] if objective.held_out else batches(0, 0)):
        say(line)
    return folder / CHECKPOINT


def _open_source(source: str, recipe: PretrainRecipe, vocabulary: Path | None) -> Checkpoint:
    """The checkpoint to go on from, if the recipe leaves to it what is its own.

    Raises:
        TrainError: the recipe or the command gives sizes or a vocabulary, or asks for what a checkpoint cannot go on with.
    """
    checkpoint = load_checkpoint(source)
    config = checkpoint.model.config
    theirs = sorted(recipe.model.model_fields_set - {"dropout"})
    longest = max(phase.tokens for phase in recipe.phases)
    if theirs or recipe.vocabulary.model_fields_set or vocabulary:
        what = f"[model] {', '.join(theirs)}" if theirs else "a vocabulary"
        raise TrainError(f"{what} is given, but sizes and vocabulary are the checkpoint's; see the recipe pretrain-further")
    if recipe.pretraining.method != "mlm":
        raise TrainError("a checkpoint goes on with masked tokens, not with replaced ones: it has no generator")
    if config.family != "bert":
        raise TrainError(f"the checkpoint is a {config.family}; pre-training goes on from a bert")
    if longest > config.max_positions:
        raise TrainError(f"a phase of {longest} tokens exceeds the checkpoint's {config.max_positions} positions")
    return checkpoint


def guesses(model: Model, tokenizer: Tokenizer, batch: TextBatch, count: int = 4) -> list[str]:
    """A few masked places with what stood there and the model's first three guesses: what a run has learnt, at a glance."""
    if model.masked_lm is None:
        return []
    scorer, lines = TorchScorer(model, torch.device("cpu")), []
    words = {number: token for token, number in tokenizer.get_vocab().items()}
    length = batch.input_ids.shape[1]
    for row in range(min(count, len(batch.input_ids))):
        (chosen,) = torch.nonzero(batch.positions // length == row, as_tuple=True)
        if not len(chosen):
            continue
        position, label = int(batch.positions[chosen[len(chosen) // 2]]) % length, int(batch.labels[chosen[len(chosen) // 2]])
        size = int(batch.attention_mask[row].sum())
        ids, types = batch.input_ids[row : row + 1, :size].numpy(), batch.token_type_ids[row : row + 1, :size].numpy()
        best, _ = scorer.masked(ids, types, np.array([position]), np.array([label]), 3)
        around = [words[int(token)] for token in ids[0, max(1, position - 7) : position + 8]]
        around[min(7, position - 1)] = "____"
        text = " ".join(around).replace(f" {CONTINUATION}", "")
        lines.append(f"  {text}\n      was {words[label]!r}, guessed {', '.join(words[int(token)] for token in best[0])}")
    return lines


@torch.no_grad()
def fill_positions(module: nn.Module, seen: int) -> None:
    """Positions from ``seen`` on become copies of 1 to ``seen`` - 1; 0 is always ``[CLS]``'s.

    Where a longer phase begins they would else have to be learnt anew, at a lower learning rate: measured, a model stayed for 300
    steps at two thirds of the accuracy that it had reached on shorter sequences.
    """
    for part in module.modules():
        if isinstance(part, Encoder):
            positions = part.embeddings.position.weight  # [S, H]
            rows = torch.arange(seen, len(positions), device=positions.device)
            positions[rows] = positions[1 + (rows - 1) % (seen - 1)]


class TextObjective:
    """Learning from text as the loop wants it.

    Args:
        module: a batch -> the loss and figures.
        batches: to learn from.
        held_out: to measure on, for each phase; empty if there are none.
        device: where the module is.
    """

    def __init__(self, module: nn.Module, batches: TextBatches, held_out: list[list[TextBatch]], device: torch.device) -> None:
        self.module = module
        self.steps = batches.steps
        self.held_out = held_out
        self._batches, self._device = batches, device

    def batch(self, step: int, part: int) -> TextBatch:
        """See `loop.Objective`."""
        return self._batches(step, part)

    def loss(self, batch: TextBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """See `loop.Objective`."""
        return self.module(batch)  # type: ignore[no-any-return]

    def evaluate(self, step: int) -> Mapping[str, float]:
        """Means over the held-out batches of the length that is being learnt."""
        self.module.eval()
        held_out = self.held_out[self._batches.phase(step - 1)] if self.held_out else []
        with torch.inference_mode():
            results = [self.module(batch.to(self._device))[1] for batch in held_out]
        return {name: float(torch.stack([result[name] for result in results]).mean()) for name in (results[0] if results else ())}


def text_batches(
    corpus: Corpus, recipe: Pretraining, phases: list[Phase], tokenizer: Tokenizer, seed: int, accumulation: int = 1
) -> TextBatches:
    """The batches of a run with BERT's special tokens."""
    return TextBatches(
        corpus,
        recipe,
        phases,
        make_masking(tokenizer, recipe),
        special=special_ids(tokenizer),
        seed=seed,
        accumulation=accumulation,
    )


def held_out_batches(
    corpus: Corpus, recipe: Pretraining, phases: list[Phase], tokenizer: Tokenizer, seed: int, say: Callable[[str], None]
) -> list[list[TextBatch]]:
    """A few batches of each phase's shape from held-out documents, always the same; empty if they do not suffice."""
    shapes = [phase.model_copy(update={"steps": _EVALUATION_BATCHES}) for phase in phases]
    try:
        batches = [text_batches(corpus, recipe, [shape], tokenizer, seed) for shape in shapes]
    except TrainError as error:
        say(f"no held-out figures: {error}")
        return []
    return [[of_phase(step, 0) for step in range(_EVALUATION_BATCHES)] for of_phase in batches]


def make_masking(tokenizer: Tokenizer, recipe: Pretraining, replace: tuple[float, float] = (0.8, 0.1)) -> Masking:
    """The recipe's masking for a vocabulary; ``replace`` as `Masking` has it."""
    size = tokenizer.get_vocab_size()
    special, continues = np.zeros(size, bool), np.zeros(size, bool)
    for token, number in tokenizer.get_vocab().items():
        special[number] = token in SPECIAL_TOKENS
        continues[number] = token.startswith(CONTINUATION)
    return Masking(recipe.unit, recipe.rate, special_ids(tokenizer).mask, special, continues, replace)


def learn_vocabulary(
    files: list[Path], recipe: Vocabulary, folder: Path, held_out: float, say: Callable[[str], None]
) -> Tokenizer:
    """Learn a vocabulary from what is not held out, into the run's folder; one that is there already is used."""
    there = folder / VOCABULARY
    if not (there / "vocab.txt").is_file():
        say(f"learning a vocabulary of {recipe.size:,} tokens")
        tokenizer = train_tokenizer(
            lambda: (document for document in read_documents(files) if not is_held_out(document.key, held_out)),
            size=recipe.size,
            lowercase=recipe.lowercase,
            min_frequency=recipe.min_frequency,
        )
        save_vocabulary(tokenizer, there)
    return open_tokenizer(there)


def open_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a folder.

    Raises:
        TrainError: there is none, or it lacks a special token.
    """
    try:
        tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrainError(f"{folder} holds no tokenizer.json") from None
    except Exception as error:  # the library raises nothing narrower
        raise TrainError(f"{folder / 'tokenizer.json'} is damaged: {error}") from error
    special_ids(tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
