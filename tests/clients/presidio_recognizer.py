"""Finds entities with Presidio's analyzer and Cloze, and prints them as one line of JSON.

python presidio_recognizer.py ADDRESS TEXT
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import httpx
import spacy
from presidio_analyzer import AnalyzerEngine, EntityRecognizer, RecognizerResult
from presidio_analyzer.nlp_engine import NlpArtifacts, SpacyNlpEngine
from presidio_analyzer.recognizer_registry import RecognizerRegistry

ENTITIES = {"PER": "PERSON", "LOC": "LOCATION", "ORG": "ORGANIZATION"}
"""The labels of your model -> Presidio's names."""


class ClozeRecognizer(EntityRecognizer):
    """Presidio's names of the entities that a tagger of Cloze finds."""

    def __init__(self, url: str, model: str | None = None) -> None:
        self.url, self.model = f"{url}/token-classification", model
        super().__init__(supported_entities=[*ENTITIES.values()], name="Cloze")

    def load(self) -> None:
        """Load nothing: the model is on the server."""

    def analyze(
        self, text: str, entities: Sequence[str], nlp_artifacts: NlpArtifacts | None = None
    ) -> list[RecognizerResult]:
        parameters = {"aggregation_strategy": "first", "words": "tokenizer", "long_text": "window"}
        body = {"inputs": text, "parameters": parameters, "model": self.model}
        found = httpx.post(self.url, json=body).raise_for_status().json()
        return [
            RecognizerResult(name, entity["start"], entity["end"], entity["score"])
            for entity in found
            if (name := ENTITIES.get(entity["entity_group"])) in entities
        ]


class BlankEngine(SpacyNlpEngine):
    """spaCy without a model, which only divides a text into words."""

    def __init__(self) -> None:
        super().__init__()
        self.nlp = {"en": spacy.blank("en")}


def main(url: str, text: str) -> list[dict[str, Any]]:
    registry = RecognizerRegistry(recognizers=[ClozeRecognizer(url)])
    analyzer = AnalyzerEngine(registry=registry, nlp_engine=BlankEngine())
    found = analyzer.analyze(text, language="en", entities=["PERSON", "LOCATION"])
    return [
        {"entity": r.entity_type, "start": r.start, "end": r.end, "score": r.score} for r in found
    ]


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
