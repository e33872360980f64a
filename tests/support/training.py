"""Text and recipes so small that a model trains in seconds."""

import json
import random
from pathlib import Path

import numpy as np
import torch

from cloze.export.measure.documents import Document
from cloze.export.train.recipe import (
    Optimisation,
    Phase,
    Pretraining,
    PretrainRecipe,
    Sizes,
    Vocabulary,
)
from cloze.export.train.run_options import RunOptions, Schedule


def quietly(_: str) -> None:
    """Nobody listens."""


def run_options(folder: Path) -> RunOptions:
    """Return the options of a short run on the processor."""
    schedule = Schedule(log=5, evaluate=50, checkpoint=1000)
    return RunOptions(folder, torch.device("cpu"), quietly, schedule)


PEOPLE = ["the old king", "a young girl", "her brother", "the captain", "my teacher", "an owl"]
PLACES = ["in the green house", "by the cold river", "on the long road", "under the big tree"]
PLACES += ["at the red door"]
ACTS = ["sang a song", "read a book", "ate some bread", "found a coin", "told a story"]
ACTS += ["saw the moon"]


def _story(number: int) -> Document:
    """Every document keeps to one person and one place, so that a second sentence can be told from
    another document's.
    """
    draw = random.Random(number)
    person, place = draw.choice(PEOPLE), draw.choice(PLACES)
    sentences = [f"{person.capitalize()} {draw.choice(ACTS)} {place}." for _ in range(30)]
    return Document(" ".join(sentences[:15]) + "\n" + " ".join(sentences[15:]), f"story {number}")


STORIES = [_story(number) for number in range(60)]


def write_stories(file: Path) -> Path:
    """The stories as plain text, a blank line between two."""
    file.write_text("\n\n".join(story.text for story in STORIES) + "\n")
    return file


def write_questions(file: Path, count: int = 40) -> Path:
    """Who did it? The person is in the paragraph. Each article has six questions."""
    rng = np.random.default_rng(0)
    articles = []
    for number in range(count):
        paragraphs = []
        for part in range(6):
            person, act, place = rng.choice(PEOPLE), rng.choice(ACTS), rng.choice(PLACES)
            context = f"{place.capitalize()} {person} {act}."
            answers = [{"text": person, "answer_start": context.index(person)}]
            asked = {"id": f"{number}-{part}", "question": f"Who {act}?", "answers": answers}
            paragraphs.append({"context": context, "qas": [asked]})
        articles.append({"title": f"article {number}", "paragraphs": paragraphs})
    file.write_text(json.dumps({"data": articles}))
    return file


def write_pairs(file: Path, count: int = 200) -> Path:
    """Sentences of one person are alike (5), of two are not (0)."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        one, other = rng.choice(PEOPLE, 2)
        texts = [
            f"{who.capitalize()} {rng.choice(ACTS)} {rng.choice(PLACES)}." for who in (one, other)
        ]
        rows.append(f"{texts[0]},{texts[1]},{5.0 if one == other else 0.0}")
    file.write_text("\n".join(rows) + "\n")
    return file


def tiny_recipe(steps: int = 30, **pretraining: object) -> PretrainRecipe:
    """Two layers of 32."""
    return PretrainRecipe(
        vocabulary=Vocabulary(size=130),
        model=Sizes(
            hidden_size=32, layers=2, heads=2, intermediate_size=64, max_tokens=64, dropout=0.1
        ),
        pretraining=Pretraining.model_validate(pretraining),
        optimisation=Optimisation(learning_rate=5e-3, precision="fp32"),
        phases=[
            Phase(tokens=24, sequences=16, steps=steps),
            Phase(tokens=40, sequences=8, steps=steps),
        ],
        held_out=0.1,
    )
