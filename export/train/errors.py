"""The one way a training run refuses or stops: a line that says what is wrong and what would be right."""


class TrainError(Exception):
    """A run cannot start or go on. The message is complete by itself; the last good checkpoint is kept."""
