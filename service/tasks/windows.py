"""Divides long texts into overlapping windows."""


def windows(tokens: int, window_tokens: int, stride: int) -> list[tuple[int, int]]:
    """Return the bounds of each window, as (first token, token after the last).

    Args:
        tokens: number of tokens of the text.
        window_tokens: most tokens per window.
        stride: number of tokens that neighbouring windows share; less than ``window_tokens``.
    """
    bounds = [(0, min(window_tokens, tokens))]
    while bounds[-1][1] < tokens:
        first = bounds[-1][0] + window_tokens - stride
        bounds.append((first, min(first + window_tokens, tokens)))
    return bounds


def window_count(tokens: int, window_tokens: int, stride: int) -> int:
    """Return the number of windows that `windows` returns, without creating the windows."""
    return 1 + max(0, -(-(tokens - window_tokens) // (window_tokens - stride)))
