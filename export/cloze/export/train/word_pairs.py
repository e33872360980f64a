"""Word pairs that name two groups of people, and texts with these words exchanged."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from accelerate import PartialState

from cloze.export.errors import TrainError
from cloze.export.measure.documents import read_documents, read_lines
from cloze.export.train.device import is_main
from cloze.model_store.plain_files import replacing

_GENDER_WORDS = Path(__file__).parent / "gender-words.tsv"
"""The pairs of the package, such as he and she."""

_WORD = re.compile(r"\w+")


class WordPairs:
    """Exchanges the words of pairs, which are in lower case, in texts.

    A word that stands in several rows becomes its partner in the first of them. English "her" is
    both "his" and "him", which takes a parser to tell apart: in the pairs of the package, "her"
    becomes "his".
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._partner: dict[str, str] = {}
        for first, second in pairs:
            self._partner.setdefault(first, second)
            self._partner.setdefault(second, first)

    def exchange(self, text: str) -> str:
        """Return the text with each word replaced by its partner, and its capitals kept."""
        return _WORD.sub(lambda match: self._exchanged(match[0]), text)

    def _exchanged(self, word: str) -> str:
        partner = self._partner.get(word.lower())
        if partner is None:
            return word
        if word.isupper() and len(word) > 1:
            return partner.upper()
        return partner.capitalize() if word[0].isupper() else partner


def read_word_pairs(file: Path | None = None) -> WordPairs:
    """Read a file with two words per line, and a tab between them; None: that of the package.

    Raises:
        DataError: the file is missing, or a line is not such a pair.
    """
    file, pairs = file or _GENDER_WORDS, []
    for number, line in enumerate(read_lines(file), 1):
        if not line.strip():
            continue
        words = [word.strip().lower() for word in line.split("\t")]
        if len(words) != 2 or words[0] == words[1] or not all(map(_WORD.fullmatch, words)):
            raise TrainError(
                f"{file}, line {number}: two different words with a tab between them are "
                f"expected, got {line.strip()!r:.80}"
            )
        pairs.append((words[0], words[1]))
    if not pairs:
        raise TrainError(f"{file} holds no word pairs")
    return WordPairs(pairs)


def write_counterfactuals(files: Iterable[Path], words: WordPairs, out: Path) -> int:
    """Write the documents of ``files``, and after each that has such words its exchanged copy.

    Return the number of copies. Of several processes of a run, the main one writes, and the others
    return 0.

    Pre-training on the result is counterfactual data augmentation (Zmigrod et al. 2019). A copy has
    the title of its original, so a split by title never holds out one of them.

    Raises:
        TrainError: a file cannot be read, or no document has such a word.
    """
    with PartialState().main_process_first():
        return _write(files, words, out) if is_main() else 0


def _write(files: Iterable[Path], words: WordPairs, out: Path) -> int:
    copies = 0
    with replacing(out) as new_file, new_file.open("w", encoding="utf-8") as stream:
        for document in read_documents(files):
            exchanged = words.exchange(document.text)
            texts = [document.text] if exchanged == document.text else [document.text, exchanged]
            copies += len(texts) - 1
            for text in texts:
                stream.write(json.dumps({"title": document.key, "text": text}) + "\n")
        if not copies:
            raise TrainError("no document has a word of the word pairs: nothing would change")
    return copies
