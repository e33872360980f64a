"""Projects directions of bias out of embeddings, by a dense layer of the checkpoint.

Source: Liang et al. 2020, "Sent-Debias". The directions are those in which the embeddings of
sentences differ from the embeddings of their copies with the words of two groups exchanged.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize

from cloze.export.errors import TrainError
from cloze.export.measure.documents import read_documents, split_sentences
from cloze.export.train.card import front_matter
from cloze.export.train.folder import open_folder, save
from cloze.export.train.kept_embeddings import open_sentences
from cloze.export.train.word_pairs import WordPairs

_SENTENCES = 5000
"""Sentences with an exchanged word that a projection is computed from, at most."""

_FEWEST = 20


def project(
    source: str,
    text: Sequence[Path],
    words: WordPairs,
    dimensions: int,
    folder: Path,
    device: torch.device,
) -> None:
    """Write a copy of a checkpoint whose embeddings lack the directions of the word pairs.

    Args:
        dimensions: number of directions to remove.
        folder: folder of the new checkpoint, which sentence-transformers reads.

    Raises:
        TrainError: the checkpoint cannot be loaded, or too few sentences have a word of the pairs.
    """
    opened = open_folder(source)
    model = open_sentences(opened).to(device)
    size = model.get_embedding_dimension()
    assert size is not None
    sentences = list(islice(_sentences(text, words), _SENTENCES))
    if len(sentences) < max(_FEWEST, dimensions) or dimensions >= size:
        raise TrainError(
            f"{dimensions} of {size} dimensions need at least {max(_FEWEST, dimensions)} sentences "
            f"with a word of the word pairs, and the text has {len(sentences)}"
        )
    directions = bias_directions(model, sentences, words, dimensions)
    rest = torch.from_numpy(np.eye(size) - directions.T @ directions).float()
    layer = Dense(size, size, bias=False, activation_function=torch.nn.Identity(), init_weight=rest)
    was_normalised = isinstance(model[-1], Normalize)
    model.append(layer)
    if was_normalised:
        model.append(Normalize())
    title = f"# {source} without {dimensions} directions of word pairs\n"
    save(model, model.tokenizer, folder, front_matter(opened.license) + title)


def _sentences(files: Sequence[Path], words: WordPairs) -> Iterator[str]:
    """Yield the sentences of the texts that have a word of the pairs."""
    for document in read_documents(files):
        for sentence in split_sentences(document.text):
            if words.exchange(sentence) != sentence:
                yield sentence


def bias_directions(
    model: SentenceTransformer, sentences: Sequence[str], words: WordPairs, dimensions: int
) -> NDArray[np.float64]:
    """Return the orthonormal directions [K, D] in which sentences and exchanged copies differ most.

    By principal components of the differences of unit vectors. A sentence and its copy lie
    opposite to each other around their mean, so the differences are not centred again.
    """
    exchanged = [words.exchange(sentence) for sentence in sentences]
    vectors = model.encode([*sentences, *exchanged], normalize_embeddings=True)
    differences = (vectors[: len(sentences)] - vectors[len(sentences) :]).astype(np.float64)
    _, _, directions = np.linalg.svd(differences, full_matrices=False)
    chosen: NDArray[np.float64] = directions[:dimensions]
    return chosen
