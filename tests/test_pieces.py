"""Long texts are tokenized in pieces, with the tokens of the whole; abandoned work ends."""

import asyncio
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloze.model_store import Store
from cloze.model_store.locations import DEFAULT_ROOT
from cloze.service import text_pieces
from cloze.service.abandonment import Abandoned, check_awaited, run_on_thread
from cloze.service.text_pieces import divide, groups, is_divisible
from cloze.service.tokenizer import Spans, Tokenizer
from tests.waiting import wait_until

BUNDLE = Store(DEFAULT_ROOT).open("cloze-bert")
TOKENIZER = Tokenizer(BUNDLE)

WORDS = [
    "river",
    "Éclair",
    "un" * 60,
    "3.14",
    "a,b",
    "[MASK]",
    "[SEP]",
    "水火",
    "水" * 9,
    "\u0301x",
]
WORDS += [
    "\u00a0",
    "\u200b",
    "e\u0301",
    "\x00",
    "🙂",
    "\u2028",
    "don't",
    "İ",
    "ﬁ",
    "x!?",
    ";;",
    "한국",
]
TEXTS = st.lists(
    st.one_of(st.sampled_from(WORDS), st.text(max_size=6), st.sampled_from(list(" \n\t .,;:!?水")))
).map("".join)


def whole(text: str) -> Spans:
    encoding = TOKENIZER._backend.encode(text, add_special_tokens=False)
    return Spans(encoding.ids, encoding.offsets, encoding.word_ids)


@settings(max_examples=400, deadline=None)
@given(text=TEXTS, size=st.integers(1, 30))
def test_pieces_have_the_tokens_of_the_whole(text: str, size: int) -> None:
    parts = list(divide(text, size))
    assert "".join(content for _, content in parts) == text
    spans = Spans([], [], [])
    for start, content in parts:
        assert text[start : start + len(content)] == content
        spans.add(TOKENIZER._backend.encode(content, add_special_tokens=False), start)
    assert spans == whole(text)


@pytest.mark.parametrize(
    "text",
    [" ".join(["river walk"] * 20_000), "水" * 50_000, "river," * 20_000, "x" * 40_000, "a b" * 5],
    ids=["words", "ideographs", "commas", "one-word", "short"],
)
def test_long_texts_are_divided_and_give_the_same(text: str) -> None:
    assert TOKENIZER.spans(text) == whole(text)
    assert TOKENIZER.ids([text, "walk", text]) == [whole(part).ids for part in (text, "walk", text)]
    longest = max(len(content) for _, content in divide(text))
    assert longest <= (40_000 if text.startswith("x") else 16_384)


def test_groups_are_bounded() -> None:
    texts = ["river " * 100] * 1000
    sizes = [sum(len(piece.content) for piece in group) for group in groups(texts, divisible=True)]
    assert sum(sizes) == 600_000
    assert max(sizes) <= text_pieces._GROUP_CHARACTERS


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"BertPreTokenizer"', '"Whitespace"'),
        ('"BertNormalizer"', '"NFC"'),
        ('"content":"[MASK]"', '"content":"a b"'),
        ('"lstrip":false', '"lstrip":true'),
    ],
)
def test_other_tokenizers_are_not_divided(old: str, new: str) -> None:
    data = BUNDLE.file(BUNDLE.manifest.tokenizer.file).read_text()
    data = data.replace(": ", ":")
    assert old in data
    assert is_divisible(data)
    assert not is_divisible(data.replace(old, new))


def test_abandoned_work_ends_between_its_parts() -> None:
    ended: list[type[BaseException]] = []
    started = threading.Event()

    def work() -> None:
        try:
            while True:
                check_awaited()
                started.set()
        except Abandoned as error:
            ended.append(type(error))
            raise

    async def play() -> None:
        task = asyncio.create_task(run_on_thread(work))
        await asyncio.to_thread(started.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await run_on_thread(lambda: check_awaited() or 3) == 3, "others go on"

    asyncio.run(play())
    wait_until(lambda: ended == [Abandoned])


def test_tokenizing_ends_when_nobody_waits(tmp_path: Path) -> None:
    texts = ["river walk " * 90_000] * 20  # seconds of work
    done = threading.Event()

    def tokenize() -> None:
        try:
            TOKENIZER.ids(texts)
        finally:
            done.set()

    async def play() -> float:
        task = asyncio.create_task(run_on_thread(tokenize))
        await asyncio.sleep(0.05)
        task.cancel()
        cancelled = time.monotonic()
        await asyncio.to_thread(done.wait)
        return time.monotonic() - cancelled

    started = time.monotonic()
    TOKENIZER.ids(texts[:2])
    two_texts_s = time.monotonic() - started
    assert asyncio.run(play()) < two_texts_s
