"""The tiny checkpoints' vocabulary.

Imports nothing heavy, so that a server process started by a test may have it.
"""

import string

WORDS = """
    the a of and to in is was he she it for on with as his her they at by this had not are but from or have an
    what all were when we there can who paris france capital city river door opened house time year people water
    first new great old long little world war king answer question moon sun tree green house red walk run see say
    ask ##s ##ed ##ing ##er ##ly
""".split()  # noqa: SIM905 (a list of words reads best as words)


def vocabulary() -> list[str]:
    characters = string.ascii_lowercase + string.digits + string.punctuation
    pieces = [*characters, *(f"##{c}" for c in string.ascii_lowercase + string.digits)]
    return list(dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces, *WORDS]))
