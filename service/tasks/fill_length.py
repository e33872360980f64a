"""Cuts texts with masks to the model's limit: at their end, or to the part around their masks."""

from collections.abc import Sequence

from cloze.service.core import InvalidRequest, Location
from cloze.service.tasks.long_text import LongText, characters
from cloze.service.tasks.task import TaskContext, TextUsage


class Shortener:
    """Cuts the texts of one request.

    Args:
        choice: what to do with a long text. ``window`` keeps the part around its masks.
        context: the model.
        longest: most tokens that replace a mask.
        report: whether to report how much of each text was used.

    Attributes:
        truncated: number of texts that were cut.
        usage: how much of each text was used; None without a report.
    """

    def __init__(
        self, choice: LongText, context: TaskContext, longest: int, *, report: bool
    ) -> None:
        self._choice, self._context, self._longest = choice, context, longest
        self.truncated = 0
        self.usage: list[TextUsage] | None = [] if report else None

    def shortened(self, ids: Sequence[int], text: str, name: Location) -> Sequence[int]:
        """Return the ids of a text that the model reads, without special tokens.

        Args:
            ids: ids of the text, without special tokens.
            text: the text.
            name: name of the text in errors.

        Raises:
            InvalidRequest: the text has no mask, too many masks, or a mask outside the part that
                the model reads; or the text is too long.
        """
        masks = self._masks(ids, name)
        most = self._context.limits.max_tokens
        room = most - 2 - (self._longest - 1)
        if room < 1:
            raise InvalidRequest(
                f"the longest target has {self._longest} tokens; the model reads {most}"
            )
        first = 0
        if len(ids) > room:
            if self._choice == "error":
                target = " with its longest target" if self._longest > 1 else ""
                tokens = len(ids) + 2 + self._longest - 1
                raise InvalidRequest(f"has {tokens} tokens{target}; the model reads {most}", name)
            if self._choice == "window":
                first = _first_of_window(masks, len(ids), room, name)
            elif (last := masks[-1] + 1) > room:
                raise InvalidRequest(
                    f"has a mask token at token {last}, but the model reads only the first "
                    f"{room} of a text; long_text window reads the part around the masks",
                    name,
                )
            self.truncated += 1
        end = min(len(ids), first + room)
        if self.usage is not None:
            windows = None
            if self._choice == "window" and len(ids) > room:
                offsets = self._context.tokenizer.spans(text).offsets
                windows = characters([(first, end)], offsets)
            self.usage.append(TextUsage(len(ids) + 2, end - first + 2, windows))
        return ids[first:end]

    def _masks(self, ids: Sequence[int], name: Location) -> list[int]:
        """Return the positions of a text's masks."""
        tokenizer, most = self._context.tokenizer, self._context.limits.max_masks
        masks = tokenizer.mask_positions(ids)
        if not masks:
            mask = tokenizer.mask_token
            raise InvalidRequest(
                f"holds no mask token; put {mask} where a word is to be guessed",
                name,
            )
        if len(masks) > most:
            raise InvalidRequest(f"holds {len(masks)} mask tokens; the limit is {most}", name)
        return masks


def _first_of_window(masks: Sequence[int], tokens: int, room: int, name: Location) -> int:
    """Return the first token of the window that has a text's masks in its middle."""
    between = masks[-1] - masks[0] + 1
    if between > room:
        raise InvalidRequest(
            f"has {between} tokens from its first to its last mask; a window has {room}",
            name,
        )
    middle = (masks[0] + masks[-1] + 1) // 2
    return min(max(middle - room // 2, 0), tokens - room)
