"""How export refuses: one line that says what is wrong with a source and what would be right."""


class ExportError(Exception):
    """A source cannot become a bundle. The message is complete by itself."""


class DataError(Exception):
    """A file of text, pairs or questions cannot be used. The message is complete by itself."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
