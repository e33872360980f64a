"""The errors of export. Each message is one line: what is wrong, and what to do next."""


class ExportError(Exception):
    """A source cannot be exported as a bundle."""


class DataError(Exception):
    """A file of text, pairs or questions cannot be used."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
