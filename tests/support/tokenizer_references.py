"""Tokenizers as checkpoints hold them, and their references.

The references share no code with the export: they are built with the tokenizers library from what
the papers and file formats say.
"""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers.convert_slow_tokenizer import import_protobuf

from cloze.export.load.tokenizer import load_tokenizer
from cloze.model_store import Bundle
from cloze.service.tasks.task import TaskContext
from cloze.service.text import tokenizer as service_tokenizer
from tests.support.task_model import LIMITS, manifest
from tests.support.tokenizer_kinds import (
    byte_level,
    byte_level_with_brackets,
    gemma,
    mpnet_wordpiece,
    undivided,
    unigram,
    wordpiece,
)

MODELS = Path(__file__).parents[1] / "sentencepiece"


PARTS = [
    "river", "Éclair", "cafe\u0301", "naïve", "\uff21\uff22\uff23", "ﬁne", "Ⅷ", "½", "\u00a0", "\u200b",
    "\u200d", "\u2028", "\u3000", "\ufeff", "👩\u200d👩\u200d👧", "🇩🇪", "🙂", "\t", " ", "  ", "    ", "\n",
    "x" * 100, "<mask>", "[MASK]", "<s>", "</s>", "[SEP]", "don't", "``quoted''", "3.14", "1,000,000",
    "http://a.b/c?d=e", "水火", "日本語のテキスト", "한국", "Привет", "مرحبا", "שלום", "ไทย", "İ", "ß", "Å",
    "\u0301x", "\u00a0\u0301", "\u3000\u0e33", "a\u0323\u0307", "\x00", "\x7f", "\ud7ff", "…", "—", "!?", ";;", "the harbour was quiet",
    "New-York", "O'Brien", "@user", "#tag", "A", "I", "▁", "Ġ", "##ed", "_", "$5", "€",
]  # fmt: skip


def lines(count: int) -> list[str]:
    """Return lines of one to a dozen parts, the same ones each time; one is empty."""
    chosen = random.Random(5)
    made = [
        chosen.choice(["", " "]).join(chosen.choices(PARTS, k=chosen.randint(1, 12)))
        for _ in range(count - 2)
    ]
    return ["", " ", *made]


@dataclass(frozen=True)
class Kind:
    """How the files of a checkpoint are written, and what the tokenizer should be."""

    write: Callable[[Path], None]
    reference: Callable[[], Tokenizer]
    mask: bool = True


def from_json(make: Callable[[], Tokenizer]) -> Kind:
    """A ``tokenizer.json``, with the truncation and padding that some files have."""

    @cache
    def once() -> str:
        return make().to_str()  # a trainer gives letters other ids each time

    def write(folder: Path) -> None:
        tokenizer = Tokenizer.from_str(once())
        tokenizer.enable_truncation(8)
        tokenizer.enable_padding(length=12)
        tokenizer.save(str(folder / "tokenizer.json"))

    return Kind(write, lambda: Tokenizer.from_str(once()))


def byte_level_with_a_prefix() -> Tokenizer:
    """As a file of transformers, which writes an empty prefix where others have none."""
    parts = json.loads(byte_level().to_str())
    parts["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    return Tokenizer.from_str(json.dumps(parts))


def write_vocabulary(folder: Path) -> None:
    tokens = KINDS["wordpiece"].reference().get_vocab()
    (folder / "vocab.txt").write_text("\n".join(sorted(tokens, key=tokens.__getitem__)) + "\n")


def write_merges(folder: Path) -> None:
    tokenizer = KINDS["bytes"].reference()
    tokenizer.model.save(str(folder))
    file = folder / "vocab.json"
    mask = tokenizer.token_to_id("<mask>")
    file.write_text(file.read_text().rstrip()[:-1] + f',"<mask>":{mask}}}')


def model_of(name: str) -> Any:
    parsed = import_protobuf().ModelProto()
    parsed.ParseFromString((MODELS / f"{name}.model").read_bytes())
    return parsed


def sentencepiece(name: str, file: str, kind: str, reference: Callable[[Any], Tokenizer]) -> Kind:
    def write(folder: Path) -> None:
        shutil.copy(MODELS / f"{name}.model", folder / file)
        (folder / "config.json").write_text(f'{{"model_type": "{kind}"}}')

    return Kind(write, lambda: reference(model_of(name)))


def marked(
    parsed: Any, rows: list[tuple[str, float]], first: list[Any], last: list[Any], unknown: int
) -> Tokenizer:
    """Return a Unigram model with normalisers before and after that of the file."""
    tokenizer = Tokenizer(models.Unigram(rows, unk_id=unknown, byte_fallback=False))
    charsmap = parsed.normalizer_spec.precompiled_charsmap
    steps = [*first, *([normalizers.Precompiled(charsmap)] if charsmap else []), *last]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer


ENDS = [normalizers.Strip(left=False), normalizers.Replace(Regex(" {2,}"), "▁")]


def like_roberta(tokenizer: Tokenizer, start: int, end: int) -> Tokenizer:
    """Add RoBERTa's special tokens and their places."""
    names = [
        AddedToken(t, special=True, normalized=False) for t in ("<s>", "<pad>", "</s>", "<unk>")
    ]
    mask = AddedToken("<mask>", special=True, normalized=False, lstrip=True)
    tokenizer.add_special_tokens([*names, mask])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", start), ("</s>", end)],
    )
    return tokenizer


def xlm_roberta(parsed: Any) -> Tokenizer:
    pieces = [(piece.piece, piece.score) for piece in parsed.pieces]
    special = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return like_roberta(marked(parsed, [*special, *pieces[3:], ("<mask>", 0.0)], [], ENDS, 3), 0, 2)


def deberta(parsed: Any) -> Tokenizer:
    rows = [(piece.piece, piece.score) for piece in parsed.pieces]
    once = [normalizers.Replace(Regex(" {2,}"), " ")]
    unknown = parsed.trainer_spec.unk_id
    tokenizer = marked(parsed, rows, [normalizers.Strip()], once, unknown)
    names = ("[CLS]", "[SEP]", "[MASK]")
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in names])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(t, tokenizer.token_to_id(t)) for t in names[:2]],
    )
    return tokenizer


KINDS: dict[str, Kind] = {
    "wordpiece": from_json(wordpiece),
    "wordpiece-vocabulary": Kind(write_vocabulary, lambda: KINDS["wordpiece"].reference()),
    "wordpiece-mpnet": from_json(mpnet_wordpiece),
    "bytes": from_json(byte_level),
    "bytes-prefix": from_json(byte_level_with_a_prefix),
    "bytes-brackets": from_json(byte_level_with_brackets),
    "bytes-merges": Kind(write_merges, lambda: KINDS["bytes"].reference()),
    "unigram": from_json(unigram),
    "unigram-marks": from_json(lambda: unigram(splits_first=False)),
    "gemma": from_json(gemma),
    "bytes-undivided": from_json(lambda: undivided(byte_level(), use_regex=False)),
    "unigram-undivided": from_json(lambda: undivided(unigram(splits_first=False), split=False)),
    "xlm-roberta": sentencepiece("unigram", "sentencepiece.bpe.model", "xlm-roberta", xlm_roberta),
    "deberta": sentencepiece("brackets", "spm.model", "deberta-v2", deberta),
}


def served(folder: Path) -> TaskContext:
    """Return the context of a model with the tokenizer of a checkpoint."""
    loaded = load_tokenizer(folder)
    loaded.tokenizer.save(str(folder / "tokenizer.json"))
    special, base = loaded.special, manifest()
    fields = {
        "file": "tokenizer.json", "vocab_size": loaded.size, "lowercase": loaded.lowercase,
        "cls_id": special.cls, "sep_id": special.sep, "mask_id": loaded.mask_id,
        "mask_token": loaded.mask_token, "pair_separators": special.separators,
        "second_type": special.second_type, "truncation_side": loaded.truncation_side,
    }  # fmt: skip
    tasks = [task for task in base.tasks if loaded.mask_id is not None or task not in MASKED]
    rows = base.architecture.model_dump() | {"vocab_size": loaded.size}
    described = manifest(tokenizer=fields, architecture=rows, tasks=tasks)
    limits = LIMITS.__class__(**dict.fromkeys(LIMITS.__slots__, 10**6))
    return TaskContext(described, service_tokenizer.Tokenizer(Bundle(described, folder)), limits)


MASKED = ("fill-mask", "sparse")


def entry(content: str, **flags: bool) -> dict[str, Any]:
    return dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word", "special"), False) | {
        "content": content, **flags
    }  # fmt: skip
