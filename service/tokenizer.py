"""Text to token ids and back, and the one place where sequences are cut. Hides the tokenizers library."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer as Backend

from model_store import Bundle
from model_store.batch import Encoding
from service.core import StartupError


@dataclass(frozen=True, slots=True)
class Spans:
    """A text's tokens with their places in it.

    Attributes:
        ids: vocabulary ids, no special tokens added.
        offsets: (start, end) of each token, in characters of the text.
        words: the number of the word each token belongs to; None for a special token.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]
    words: list[int | None]


class Tokenizer:
    """A bundle's WordPiece tokenizer. Safe to call from several threads.

    Raises:
        StartupError: the bundle's tokenizer file cannot be read.
    """

    def __init__(self, bundle: Bundle) -> None:
        spec = bundle.manifest.tokenizer
        try:
            self._backend = Backend.from_str(bundle.file(spec.file).read_text(encoding="utf-8"))
        except Exception as error:  # the library raises a bare Exception
            raise StartupError(
                f"bundle {bundle.manifest.reference}: its tokenizer cannot be read: {error}"
            ) from error
        self.mask_id = spec.mask_id
        self.mask_token = spec.mask_token
        self.vocab_size = spec.vocab_size
        self.unknown_token: str = self._backend.model.unk_token
        self._cls_id = spec.cls_id
        self._sep_id = spec.sep_id
        self._second_type = min(1, max(0, bundle.manifest.architecture.type_vocab_size - 1))

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Vocabulary ids of each text, no special tokens added, nothing cut."""
        return [
            encoding.ids
            for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def spans(self, text: str) -> Spans:
        """Ids, character offsets and words of a text."""
        # `encode` would hold the interpreter's lock all the while; the batch form lets go of it.
        encoding = self._backend.encode_batch([text], add_special_tokens=False)[0]
        return Spans(encoding.ids, encoding.offsets, encoding.word_ids)

    def encode(
        self, ids: Sequence[int], max_tokens: int, *, keep_end: bool = False
    ) -> tuple[Encoding, bool]:
        """Return ``[CLS] ids [SEP]`` and whether any ids were cut.

        Args:
            ids: of a text, without special tokens.
            max_tokens: longest sequence; the end of a longer text is cut.
            keep_end: cut the start instead.

        Returns:
            An encoding that asks for nothing yet.
        """
        room = max_tokens - 2
        kept = ids[-room:] if keep_end else ids[:room]
        input_ids = np.array([self._cls_id, *kept, self._sep_id], np.int32)
        return Encoding(input_ids, np.zeros(len(input_ids), np.int32)), len(ids) > room

    def pair(
        self, first: Sequence[int], second: Sequence[int], max_tokens: int
    ) -> tuple[Encoding, bool]:
        """``[CLS] first [SEP] second [SEP]``, the longer of the two cut first, as transformers' ``longest_first``.

        Returns:
            An encoding that asks for nothing yet, and whether any tokens were cut.
        """
        room = max_tokens - 3
        cut = len(first) + len(second) > room
        if cut:
            shorter = min(len(first), len(second), room // 2)
            longer = room - shorter
            lengths = (shorter, longer) if len(first) <= len(second) else (longer, shorter)
            first, second = first[: lengths[0]], second[: lengths[1]]
        ids = [self._cls_id, *first, self._sep_id, *second, self._sep_id]
        types = np.zeros(len(ids), np.int32)
        types[len(first) + 2 :] = self._second_type
        return Encoding(np.array(ids, np.int32), types), cut

    def decode(
        self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = False
    ) -> list[str]:
        """Ids to texts, WordPiece joined and spaces before punctuation removed."""
        return self._backend.decode_batch(sequences, skip_special_tokens=skip_special_tokens)

    def token_of(self, number: int) -> str:
        """Return the token of an id, with its prefix."""
        token = self._backend.id_to_token(number)
        assert token is not None  # ids come from the same vocabulary
        return token

    def join(self, tokens: Sequence[str]) -> str:
        """Return the text of tokens, with WordPiece joined."""
        decoder = self._backend.decoder
        return decoder.decode(list(tokens)) if decoder else " ".join(tokens)

    def id_of(self, token: str) -> int | None:
        """A token's id; None if the vocabulary does not have it."""
        return self._backend.token_to_id(token)

    def is_wrapped(self, ids: Sequence[int]) -> bool:
        """Whether ids already begin with ``[CLS]`` and end with ``[SEP]``."""
        return len(ids) >= 2 and ids[0] == self._cls_id and ids[-1] == self._sep_id
