"""Awkward lines: a served tokenizer has the ids of its reference, and words and places of texts.

The references share no code with the export: they are built with the tokenizers library from what
the papers and file formats say.
"""

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
from cloze.model_store.heads import ArrayResult
from cloze.service.tasks.qa import QaPair
from cloze.service.tasks.task import TaskContext
from cloze.service.text import tokenizer as service_tokenizer
from tests.export.test_sentencepiece import MODELS
from tests.support.tokenizer_kinds import (
    byte_level,
    byte_level_with_brackets,
    gemma,
    mpnet_wordpiece,
    undivided,
    unigram,
    wordpiece,
)
from tests.unit.service.tasks.model import LIMITS, decoded, manifest, prepared

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


def camembert(parsed: Any) -> Tokenizer:
    pieces = [(piece.piece, piece.score) for piece in parsed.pieces]
    special = [("<s>NOTUSED", 0.0), ("<pad>", 0.0), ("</s>NOTUSED", 0.0), ("<unk>", 0.0)]
    unused = [("<unk>NOTUSED", -100.0)]
    rows = [*special, *unused, *pieces[1:], ("<mask>", 0.0)]
    return like_roberta(marked(parsed, rows, [], ENDS, 3), 5, 6)


def albert(parsed: Any) -> Tokenizer:
    rows = [
        (p.piece, p.score - 100 if p.piece[-2:-1].isdigit() and p.piece[-1:] == "," else p.score)
        for p in parsed.pieces
    ]
    steps = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    steps += [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    once = [normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer = marked(parsed, rows, steps, once, parsed.trainer_spec.unk_id)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), tokenizer.pre_tokenizer]
    )
    names = [AddedToken(t, special=True, normalized=False) for t in ("[CLS]", "[SEP]", "<unk>")]
    names.insert(0, AddedToken("[MASK]", special=True, normalized=False, lstrip=True))
    tokenizer.add_special_tokens(names)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return tokenizer


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
    "camembert": sentencepiece("unigram", "sentencepiece.bpe.model", "camembert", camembert),
    "albert": sentencepiece("brackets", "spiece.model", "albert", albert),
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


def check_ids(kind: str, folder: Path, count: int) -> None:
    KINDS[kind].write(folder)
    context, reference = served(folder), KINDS[kind].reference()
    tokenizer, texts = context.tokenizer, lines(count)
    expected = [reference.encode(text, add_special_tokens=False) for text in texts]
    assert [*map(list, tokenizer.ids(texts))] == [encoding.ids for encoding in expected]
    seconds = [*texts[1:], texts[0]]
    for text, second, encoding in zip(texts, seconds, expected, strict=True):
        assert tokenizer.ids([text]) == [encoding.ids], ascii(text)
        pair = reference.encode(text, second)
        ours = tokenizer.pair(encoding.ids, *tokenizer.ids([second]), 10**6)
        assert ours.input_ids.tolist() == pair.ids, ascii(text)
        assert ours.token_type_ids.tolist() == pair.type_ids, ascii(text)
        spans = tokenizer.spans(text)
        assert [*spans.ids] == encoding.ids, ascii(text)
        for (start, end), place in zip(spans.offsets(), encoding.offsets, strict=True):
            part = text[start:end]
            assert part == part.strip() if part.strip() else (start, end) == place, ascii(text)
    long = "".join(texts)  # divided
    assert [*map(list, tokenizer.ids([long]))] == [
        reference.encode(long, add_special_tokens=False).ids
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_reference(kind: str, tmp_path: Path) -> None:
    check_ids(kind, tmp_path, 200)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_2000_lines_are_those_of_the_reference(kind: str, tmp_path: Path) -> None:
    check_ids(kind, tmp_path, 2000)


@pytest.mark.parametrize("strategy", ["first", "average", "max"])
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"wordpiece-vocabulary", "bytes-merges"}))
def test_entities_are_whole_words_without_spaces(kind: str, strategy: str, tmp_path: Path) -> None:
    """Each token has a label of its own: a word takes one, and no entity is a part of a word.

    The words are those of the library, divided at white space.
    """
    KINDS[kind].write(tmp_path)
    context, reference = served(tmp_path), KINDS[kind].reference()
    labels = np.eye(4, dtype=np.float32)
    for number, text in enumerate(lines(120)):
        encoding = reference.encode(text, add_special_tokens=False)
        if not encoding.ids:
            continue
        chosen = random.Random(number).choices(range(4), k=len(encoding.ids) + 2)
        parameters = {"aggregation_strategy": strategy, "ignore_labels": []}
        request = prepared("token-classification", text, context, **parameters)
        result = {"token_classification": ArrayResult(9 * labels[chosen])}
        [entities] = decoded("token-classification", request, [result], context)
        words: dict[int, list[tuple[int, int]]] = {}
        for word, place in zip(encoding.word_ids, encoding.offsets, strict=True):
            if word is not None:
                words.setdefault(word, []).append(place)
        runs = [set(range(*run.span())) for run in re.finditer(r"\S+", text)]
        inside = [
            {place for first, last in places for place in range(first, last)} & run
            for places in words.values()
            for run in runs
        ]
        for entity in entities:
            shown = text[entity.start : entity.end]
            assert shown == shown.strip() or not shown.strip(), ascii(text)
            for places in inside:
                covered = places & set(range(entity.start, entity.end))
                assert covered in (set(), places), (ascii(text), entity)


NAMES = [
    "Ro\u00adbert",
    "Ro\u200bbert",
    "Re\u0301mi",
    "E\u0301a\u0301n",
    "Robe\u0301\u200brt",
    "Robert",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("kind", ["wordpiece", "wordpiece-mpnet"])
def test_a_name_with_characters_that_the_normaliser_drops_is_redacted(
    kind: str, name: str, tmp_path: Path
) -> None:
    """Only the first token of the name has the label, and its length is not that of the text."""
    KINDS[kind].write(tmp_path)
    text = f"the {name} was here"
    redaction = redacted(text, lambda token: token.startswith(name[0].lower()), served(tmp_path))
    assert redaction.text == "the <LOC_1> was here"
    assert [one.text for one in redaction.replacements] == [name]


UNDIVIDED = ["gemma", "bytes-undivided", "unigram-undivided"]
"""Kinds whose library has one word for a whole text."""


@pytest.mark.parametrize("kind", UNDIVIDED)
def test_words_begin_at_white_space_where_the_tokenizer_has_one_word(
    kind: str, tmp_path: Path
) -> None:
    KINDS[kind].write(tmp_path)
    text, context = "the bank\nwas here", served(tmp_path)
    assert {*KINDS[kind].reference().encode(text, add_special_tokens=False).word_ids} == {0}
    redaction = redacted(text, lambda token: "b" in token, context)
    assert redaction.text == "the <LOC_1>\nwas here"
    request = prepared("qa", QaPair(question="who was here", context=text), context)
    [encoding] = request.encodings
    spans = context.tokenizer.spans(text)
    [named] = [n for n, (first, last) in enumerate(spans.offsets()) if "b" in text[first:last]]
    logits = np.zeros((len(encoding.input_ids), 2), np.float32)
    logits[len(logits) - 1 - len(spans.ids) + named] = 20
    [answer] = decoded("qa", request, [{"span": ArrayResult(logits)}], context)
    assert (answer.answer, answer.start, answer.end) == ("bank", 4, 8)


@pytest.mark.parametrize("kind", [*UNDIVIDED, "unigram-marks", "xlm-roberta", "bytes"])
def test_the_bytes_of_a_character_are_one_word(kind: str, tmp_path: Path) -> None:
    KINDS[kind].write(tmp_path)
    text, context = "the 🙂水ﬁ was", served(tmp_path)
    spans = context.tokenizer.spans(text)
    inside = {
        word
        for word, (first, last) in zip(spans.words, spans.offsets(), strict=True)
        if text[first:last].strip() and first >= 4 and last <= 7
    }
    library = KINDS[kind].reference().encode(text, add_special_tokens=False)
    assert len(inside) == len({w for w, (a, b) in zip(library.word_ids, library.offsets, strict=True)
                               if b > 4 and a < 7})  # fmt: skip


@pytest.mark.parametrize("kind", ["bytes", "bytes-prefix", "bytes-brackets"])
@pytest.mark.parametrize("text", ["tabs\tand", "a  b", " a \n b "])
def test_white_space_has_the_places_of_the_library_and_is_no_name(
    kind: str, text: str, tmp_path: Path
) -> None:
    KINDS[kind].write(tmp_path)
    context = served(tmp_path)
    expected = KINDS[kind].reference().encode(text, add_special_tokens=False).offsets
    spaces = [number for number, (a, b) in enumerate(expected) if not text[a:b].strip()]
    assert spaces
    places = context.tokenizer.spans(text).offsets()
    assert [places[number] for number in spaces] == [expected[number] for number in spaces]
    assert redacted(text, lambda token: not token.strip("ĠĊĉ "), context).text == text


def redacted(text: str, is_named: Callable[[str], bool], context: TaskContext) -> Any:
    """Return the redaction of a text, some of whose tokens have a label."""
    tokens = map(context.tokenizer.token_of, context.tokenizer.spans(text).ids)
    labels = [0, *(3 * is_named(token) for token in tokens), 0]
    assert 3 in labels
    result = {"token_classification": ArrayResult(9 * np.eye(4, dtype=np.float32)[labels])}
    [redaction] = decoded("redact", prepared("redact", [text], context), [result], context)
    return redaction
