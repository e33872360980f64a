"""Sentences and questions for the quality gate, written for it: the gate needs no data sets."""

from collections.abc import Iterator, Sequence

import numpy as np
from tokenizers import Tokenizer

from cloze.export.evaluation.pairs import ScoredPair
from cloze.export.evaluation.scorer import Ids

SENTENCES = (
    "The train to the coast leaves at seven and arrives a little before noon.",
    "She closed the window because the wind was blowing papers off the desk.",
    "Water boils at a lower temperature on a mountain than at the sea.",
    "The committee has not yet decided who will pay for the new bridge.",
    "He was born in a small village and moved to the city when he was twelve.",
    "My order has not arrived and the tracking page shows an error.",
    "How do I reset the password of an account that was created by phone?",
    "The patient reported mild pain in the left knee after long walks.",
    "Prices rose by three percent last year, mostly because of energy.",
    "A river divides the old town from the quarter where the factories stand.",
    "They played cards until midnight and then walked home in the rain.",
    "The function returns an empty list if the file cannot be found.",
    "Plants turn light, water and carbon dioxide into sugar and oxygen.",
    "The museum is closed on Mondays and on public holidays.",
    "An old man was feeding the birds in front of the church.",
    "The court found that the contract had been broken by both parties.",
    "Add two eggs and a cup of milk, and stir until the dough is smooth.",
    "The second half of the match was better than the first.",
    "Nobody in the room had heard of the author before that evening.",
    "The moon is about four hundred thousand kilometres away from the earth.",
    "Please send the signed form back to us before the end of the month.",
    "The dog slept on the carpet while the children did their homework.",
    "Soldiers crossed the border at dawn and met no resistance.",
    "what is the difference between a lake and a pond",
    "who invented the printing press and when",
    "best way to remove red wine from a white shirt",
    "The engine makes a strange noise when the car goes uphill.",
    "In winter the islands can be reached only by aeroplane.",
    "The company was founded by two brothers who had worked as watchmakers.",
    "I would not recommend this hotel: the room was loud and the staff unfriendly.",
    "The new law forbids smoking in restaurants and on railway platforms.",
    "Her first novel was refused by nine publishers before it was printed.",
    "The blood carries oxygen from the lungs to the rest of the body.",
    "The king had three daughters, and the youngest was the most curious.",
    "Turn left at the second traffic light and park behind the library.",
    "Although it was late, the shop on the corner was still open.",
    "The results suggest that the drug is safe but hardly effective.",
    "Gold is heavier than silver and does not rust.",
    "The server answers requests in batches and reports how long each took.",
    "A loud crash was heard in the kitchen, and then there was silence.",
    "Farmers in the valley grow wheat, grapes and olives.",
    "The president met the ambassadors of five neighbouring countries.",
    "It is forbidden to feed the animals or to touch the glass.",
    "The lecture was cancelled because the professor had fallen ill.",
    "He poured himself a cup of tea and opened the letter slowly.",
    "The bird builds its nest in hollow trees and lays up to six eggs.",
    "Most of the passengers were asleep when the ship changed its course.",
    "The bank charges a small fee for payments in other currencies.",
)

QUESTIONS = (
    (
        "When does the train arrive?",
        "The train to the coast leaves the central station at seven in the morning. It stops "
        "twice on the way, at the mill and at the old harbour, and arrives a little before "
        "noon. Tickets are sold on board.",
    ),
    (
        "Who founded the company?",
        "The company was founded in 1904 by two brothers who had worked as watchmakers in the "
        "capital. It made clocks at first, then radios, and after the war measuring instruments"
        " for ships.",
    ),
    (
        "What do the farmers grow?",
        "The valley lies between two chains of hills. Its climate is mild, and farmers grow "
        "wheat, grapes and olives. In summer the river is so low that cattle can walk through "
        "it.",
    ),
    (
        "Why was the lecture cancelled?",
        "On Tuesday some forty students waited in front of the hall. The lecture was cancelled "
        "because the professor had fallen ill. It will be repeated next week in another "
        "building.",
    ),
    (
        "How far away is the moon?",
        "The moon moves around the earth in about twenty-seven days. It is about four hundred "
        "thousand kilometres away, so that light needs a little more than a second for the "
        "journey.",
    ),
    (
        "Where did the soldiers cross the border?",
        "In the spring of that year the army gathered in the north. The soldiers crossed the "
        "border near the salt lake at dawn and met no resistance. Three days later they reached"
        " the capital.",
    ),
    (
        "What does the bank charge a fee for?",
        "Keeping an account is free for students. The bank charges a small fee for payments in "
        "other currencies and for letters sent by post. Cash can be drawn at any of its "
        "machines without cost.",
    ),
    (
        "Which animal sleeps on the carpet?",
        "In the evening the family sat in the large room. The dog slept on the carpet while the"
        " children did their homework, and the cat watched the snow from the window.",
    ),
)
"""Questions, each with a context that contains the answer."""


class GateTexts:
    """The gate's texts as token ids of one checkpoint, truncated to the checkpoint's limit.

    Args:
        type_vocab_size: number of token types; 0: the checkpoint has no token types.
        mask_id: id of the mask token; None: the vocabulary has no mask token.
        max_tokens: the longest sequence.
        scored_pairs: sentence pairs with similarity scores (STS-B) to rank; may be empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        type_vocab_size: int,
        mask_id: int | None,
        max_tokens: int,
        scored_pairs: Sequence[ScoredPair] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.mask_id = mask_id
        self.max_tokens = max_tokens
        self.scored_pairs = scored_pairs
        self._truncating = Tokenizer.from_str(tokenizer.to_str())
        self._truncating.enable_truncation(max_tokens)
        self._largest_type = max(0, type_vocab_size - 1)

    def sentences(self) -> list[Ids]:
        """Return the ids [1, S] of each sentence."""
        encoded = self._truncating.encode_batch(list(SENTENCES))
        return [np.asarray([encoding.ids], np.int64) for encoding in encoded]

    def sentence_pairs(self) -> Iterator[tuple[Ids, Ids]]:
        """Yield ids and token types, [1, S] each, of pairs: neighbouring sentences and others."""
        count = len(SENTENCES)
        pairs = [
            (SENTENCES[i], SENTENCES[(i + step) % count]) for i in range(count) for step in (1, 7)
        ]
        for _, context in QUESTIONS:
            half = len(context) // 2
            pairs.append((context[:half], context[half:]))
        return self._encode(pairs)

    def questions(self) -> Iterator[tuple[Ids, Ids]]:
        """Yield ids and token types, [1, S] each, of every question with every context."""
        return self._encode(
            [(question, context) for question, _ in QUESTIONS for _, context in QUESTIONS]
        )

    def _encode(self, pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[Ids, Ids]]:
        for encoding in self._truncating.encode_batch(list(pairs)):
            types = np.minimum(np.asarray([encoding.type_ids], np.int64), self._largest_type)
            yield np.asarray([encoding.ids], np.int64), types
