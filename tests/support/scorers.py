"""Scorers with outputs by hand, and a small tokenizer, for tests of figures."""

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from cloze.export.measure.texts import GateTexts
from cloze.model_store.batch import Encoding, HeadOutputs
from tests.support.vocabulary import vocabulary

VOCABULARY = vocabulary()
ID = {token: number for number, token in enumerate(VOCABULARY)}
CLS, SEP, MASK = ID["[CLS]"], ID["[SEP]"], ID["[MASK]"]


class ByHand:
    """Gives each encoding the result of a function, and records the batches."""

    def __init__(self, result: Callable[[Encoding], HeadOutputs], layers: int = 1) -> None:
        self._result, self.layers = result, layers
        self.batches: list[list[Encoding]] = []

    def run(self, batch: Sequence[Encoding]) -> list[HeadOutputs]:
        self.batches.append(list(batch))
        return [self._result(encoding) for encoding in batch]

    @property
    def encodings(self) -> list[Encoding]:
        return [encoding for batch in self.batches for encoding in batch]


def tokenizer(*, mask: bool = True) -> Tokenizer:
    """Return a tokenizer that frames a text by ``[CLS]`` and ``[SEP]``."""
    words = {t: n for t, n in ID.items() if mask or t != "[MASK]"}
    made = Tokenizer(models.WordPiece(words, unk_token="[UNK]", max_input_chars_per_word=100))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(["[CLS]", "[SEP]", *(["[MASK]"] if mask else [])])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    return made


def gate_texts(**changes: object) -> GateTexts:
    fields: dict = {"type_vocab_size": 2, "mask_id": MASK, "max_tokens": 16} | changes
    return GateTexts(tokenizer(), **fields)
