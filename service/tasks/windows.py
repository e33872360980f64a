"""Overlapping windows over a text that is longer than the model reads."""


def windows(tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Return the (first, end) tokens of each window.

    Args:
        tokens: of the text.
        room: most tokens per window.
        stride: tokens that neighbouring windows share; less than ``room``.
    """
    bounds = [(0, min(room, tokens))]
    while bounds[-1][1] < tokens:
        first = bounds[-1][0] + room - stride
        bounds.append((first, min(first + room, tokens)))
    return bounds


def window_count(tokens: int, room: int, stride: int) -> int:
    """Return how many windows `windows` makes, without making them."""
    return 1 + max(0, -(-(tokens - room) // (room - stride)))
