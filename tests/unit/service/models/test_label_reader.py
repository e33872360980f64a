"""Vectors of labels are computed once, by one of the requests that need them."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from cloze.model_store.heads import ArrayResult
from cloze.service.batching.fair_queue import Submission, Terms
from cloze.service.core import BatchResult, Float32
from cloze.service.errors import EngineFailed
from cloze.service.models.label_reader import LabelReader
from cloze.service.tasks.label_vectors import LabelCache
from cloze.service.text.tokenizer import Tokenizer
from tests.support.task_model import bundle

pytestmark = pytest.mark.anyio


class LabelEncoder(LabelReader):
    """A reader whose encoder returns the first id of each label, when a test lets it go on."""

    def __init__(self, folder: Path, most_bytes: int = 2**20) -> None:
        made = bundle(folder)
        super().__init__(LabelCache(made.manifest, Tokenizer(made), most_bytes), self, self._run)  # type: ignore[arg-type]
        self.goes_on = asyncio.Event()
        self.submitted: list[Submission] = []
        self.failures = 0

    def submit(self, submission: Submission) -> None:
        self.submitted.append(submission)

    async def _run(self, submission: Submission) -> BatchResult:
        await self.goes_on.wait()
        if self.failures:
            self.failures -= 1
            raise EngineFailed("the run failed")
        outputs = [
            {"embedding": ArrayResult(np.full(4, encoding.input_ids[1], np.float32))}
            for encoding in submission.encodings
        ]
        return BatchResult(outputs, 0.0, 0.0)

    async def read(self, *labels: str) -> Float32:
        found = self.cache.look_up(labels)
        await self.fill(found, Terms(float("inf")))
        return found.array

    @property
    def sizes(self) -> list[int]:
        """The number of labels of each submission."""
        return [len(submission.encodings) for submission in self.submitted]


@pytest.fixture
async def encoder(tmp_path: Path) -> LabelEncoder:
    return LabelEncoder(tmp_path)


async def started(task: asyncio.Task[Float32]) -> asyncio.Task[Float32]:
    for _ in range(5):
        await asyncio.sleep(0)
    return task


async def test_known_labels_are_not_computed_again(encoder: LabelEncoder) -> None:
    encoder.goes_on.set()
    first = await encoder.read("the", "house")
    assert first.shape == (2, 4)
    assert first[0, 0] != first[1, 0]
    again = await encoder.read("old", "house", "the")
    np.testing.assert_array_equal(again[1:], first[::-1])
    assert encoder.sizes == [2, 1]


async def test_labels_in_flight_are_computed_once(encoder: LabelEncoder) -> None:
    one = await started(asyncio.create_task(encoder.read("the", "house")))
    other = await started(asyncio.create_task(encoder.read("house", "old")))
    one.cancel()  # the other request waits for its labels
    await started(one)
    encoder.goes_on.set()
    vectors = await other
    assert encoder.sizes == [2, 1]
    np.testing.assert_array_equal(vectors, await encoder.read("house", "old"))
    assert encoder.sizes == [2, 1]


async def test_a_failure_is_that_of_one_request(encoder: LabelEncoder) -> None:
    encoder.failures = 1
    one = await started(asyncio.create_task(encoder.read("the")))
    other = await started(asyncio.create_task(encoder.read("the")))
    encoder.goes_on.set()
    with pytest.raises(EngineFailed, match="the run failed"):
        await one
    assert (await other).any()
    assert encoder.sizes == [1, 1]


async def test_the_labels_that_were_not_used_for_longest_are_forgotten(tmp_path: Path) -> None:
    encoder = LabelEncoder(tmp_path, 2 * (4 * 4 + 512))
    encoder.goes_on.set()
    for labels in (["the"], ["house"], ["the"], ["old"]):  # "house" is the oldest now
        await encoder.read(*labels)
    found = encoder.cache.look_up(["the", "house", "old"])
    assert [*found.missing] == ["house"]
    assert (found.missing["house"][0], found.tokens) == (1, 3)
    whole = encoder.cache.look_up(["the"])
    assert not whole.missing
    assert whole.array.any()
