"""The architectures that are refused by name: what each computes, and what to use instead.

``refused.jsonl`` has the table, and `docs/models.md` has it from `scripts/refusal-table`. Every
other unknown ``model_type`` is refused too, without a reason.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple


class Refusal(NamedTuple):
    """Why some architectures are not exported: ``computes`` says what no block computes."""

    model_types: Sequence[str]
    computes: str
    task: str
    instead: str


_ROWS: Final = Path(__file__).with_name("refused.jsonl").read_text(encoding="utf-8").splitlines()

REFUSALS: Final = tuple(Refusal(**json.loads(row)) for row in _ROWS)
"""All architectures that are refused by name."""

REFUSED: Final[Mapping[str, Refusal]] = {
    name: refusal for refusal in REFUSALS for name in refusal.model_types
}
"""The refusals by ``model_type``."""


def reason(model_type: str) -> str | None:
    """Return why an architecture is refused and what to use instead; None: no reason is known."""
    refusal = REFUSED.get(model_type)
    if refusal is None:
        return None
    return f"it computes {refusal.computes}; use instead: {refusal.instead}"
