"""The one way an export refuses: a line that says what is wrong with the source and what would be right."""


class ExportError(Exception):
    """A source cannot become a bundle. The message is complete by itself."""
