"""Runs Presidio's recogniser and spaCy's component of docs/clients.md, for entities of any labels.

python entity_components.py PAGE ADDRESS TEXT
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import spacy
from presidio_analyzer import AnalyzerEngine
from presidio_analyzer.recognizer_registry import RecognizerRegistry
from presidio_recognizer import BlankEngine


def main(page: str, url: str, text: str) -> dict[str, Any]:
    programs = re.findall(r"^```\n(import httpx\n.*?)^```", Path(page).read_text(), re.M | re.S)
    names: dict[str, Any] = {}
    for program in (one for one in programs if "/entities" in one):
        assert len(program.splitlines()) <= 40
        exec(program.replace("http://localhost:8000", url), names)
    registry = RecognizerRegistry(recognizers=[names["LabelRecognizer"](url)])
    analyzer = AnalyzerEngine(registry=registry, nlp_engine=BlankEngine())
    presidio = analyzer.analyze(text, language="en", entities=["PERSON", "LOCATION"])
    nlp: spacy.Language = names["nlp"]
    ents = nlp(text).ents
    return {
        "presidio": [[r.start, r.end, r.entity_type, r.score] for r in presidio],
        "spacy": [[e.start_char, e.end_char, e.label_, e._.score] for e in ents],
        "empty": len(nlp("").ents),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
