"""Writes squad-v4.json: what the official SQuAD evaluation, as transformers 4 carries it, says of a file of predictions.

In an environment of its own, from the project's folder:

    pip install torch==2.13.0 'transformers<5'
    python -m tests.oracles.squad_v4
"""

import json
from pathlib import Path

GOLDEN = Path(__file__).with_name("squad-v4.json")

ROWS: list[tuple[list[str], str]] = [
    (["the Norman Conquest", "Norman Conquest of England"], "Norman conquest"),
    (["in 1066", "1066", "the year 1066"], "year 1066."),
    (["William the Conqueror"], "William"),
    (["$1,200 million", "1,200 million"], "1200 million dollars"),
    (["a cat"], "An  cat!"),
    (["the"], ""),
    (["the", "The."], "a"),
    (["Café Müller"], "cafe muller"),
    (["Café Müller"], "café  müller"),
    (["red red blue"], "red blue blue"),
    (["well-known", "well known"], "wellknown"),
    (["30\u201340 %"], "30-40"),
    (["\u201cOh\u201d", "Oh"], '"Oh"'),
    (["it's theirs"], "its theirs"),
    (["北京"], "北京。"),
    (["another theory"], "other theory"),
    (["line\nbreak\tand tab"], "line break and tab"),
    (["x y z"], "nothing in common"),
    ([], ""),
    ([], "made up"),
    ([], "the"),
    (["something"], ""),
]


def as_squad(rows: list[tuple[list[str], str]]) -> dict[str, object]:
    questions = [
        {
            "id": f"q{number}",
            "question": f"Question {number}?",
            "answers": [{"text": text, "answer_start": 0} for text in accepted],
            "is_impossible": not accepted,
        }
        for number, (accepted, _) in enumerate(rows)
    ]
    context = " | ".join(text for accepted, _ in rows for text in accepted)
    return {
        "version": "v2.0",
        "data": [{"title": "Rows", "paragraphs": [{"context": context, "qas": questions}]}],
    }


if __name__ == "__main__":
    from transformers.data.metrics.squad_metrics import squad_evaluate
    from transformers.data.processors.squad import SquadExample

    def official(rows: list[tuple[list[str], str]]) -> dict[str, float]:
        examples = [
            SquadExample(
                f"q{n}",
                "?",
                "c",
                None,
                None,
                "t",
                [{"text": text} for text in accepted],
                not accepted,
            )
            for n, (accepted, _) in enumerate(rows)
        ]
        return dict(
            squad_evaluate(examples, {f"q{n}": answer for n, (_, answer) in enumerate(rows)})
        )

    answered = [row for row in ROWS if row[0]]
    golden = [{"rows": rows, "figures": official(rows)} for rows in (ROWS, answered)]
    GOLDEN.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")
