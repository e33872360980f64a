"""Writes squad-v4.json: what the official SQuAD evaluation, as transformers 4 carries it, says of a file of predictions.

In an environment of its own, from the project's folder:

    pip install torch==2.13.0 'transformers<5'
    python -m tests.oracles.squad_v4
"""

import json
from pathlib import Path

GOLDEN = Path(__file__).with_name("squad-v4.json")


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

    cases = json.loads(GOLDEN.read_text())
    for case in cases:
        examples = []
        for number, (accepted, _) in enumerate(case["rows"]):
            answers = [{"text": text} for text in accepted]
            examples.append(
                SquadExample(f"q{number}", "?", "c", None, None, "t", answers, not accepted)
            )
        predicted = {f"q{number}": answer for number, (_, answer) in enumerate(case["rows"])}
        case["figures"] = dict(squad_evaluate(examples, predicted))
    GOLDEN.write_text(json.dumps(cases, indent=1, ensure_ascii=False) + "\n")
