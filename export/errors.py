"""The one way an export refuses: a line that says what is wrong with the source and what would be right."""


class ExportError(Exception):
    """A source cannot become a bundle. The message is complete by itself."""


def first_line(error: Exception) -> str:
    """What an error says, in a line; its type, if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
