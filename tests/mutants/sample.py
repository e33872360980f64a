"""Samples of mutants: which faults a module could have, and which of them nothing can notice."""

import difflib
import random
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import parso
from cosmic_ray.ast import ast_nodes
from cosmic_ray.mutating import mutate_code

from tests.mutants.operators import OPERATORS
from tests.support.sources import file_of, name_of

EQUIVALENT = Path(__file__).with_name("equivalent.toml")


@dataclass(frozen=True)
class Mutant:
    """One fault: the text of a module in which one place differs."""

    path: str
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after or '(nothing)'}"


class Equivalents:
    """The mutants that no test can notice, from `equivalent.toml`."""

    def __init__(self, file: Path = EQUIVALENT) -> None:
        tables = tomllib.loads(file.read_text())
        self._rules = [
            (rule.get("path", ""), re.compile(rule["before"]), re.compile(rule.get("after", "")))
            for rule in tables.get("rule", ())
        ]
        self._single = {
            (entry["path"], entry["before"], entry["after"]) for entry in tables.get("mutant", ())
        }

    def __contains__(self, mutant: Mutant) -> bool:
        """Return whether a rule for a kind of line, or the list of single mutants, has it."""
        return (mutant.path, mutant.before, mutant.after) in self._single or any(
            mutant.path.startswith(path)
            and before.search(mutant.before)
            and after.search(mutant.after)
            for path, before, after in self._rules
        )


def modules(target: str) -> list[str]:
    """Return the names of the modules of a package, or of one module."""
    path = file_of(target)
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    if not files or not files[0].is_file():
        raise FileNotFoundError(f"no module at {target}: name a folder or a file, as service/tasks")
    return [name_of(file) for file in files]


def sample(paths: Sequence[str], size: int, seed: int, equivalents: Equivalents) -> list[Mutant]:
    """Return mutants at random places: each place once, and each place as likely as the others."""
    generator = random.Random(seed)
    places = [(path, place) for path in paths for place in _places(path).items()]
    generator.shuffle(places)
    mutants: list[Mutant] = []
    for path, (_, faults) in places:
        if len(mutants) == size:
            break
        mutant = _mutant(path, *generator.choice(faults))
        if mutant is not None and mutant not in equivalents:
            mutants.append(mutant)
    return mutants


def _places(path: str) -> dict[object, list[tuple[int, int]]]:
    """Return the faults of a module by their place; a fault is an operator and an occurrence."""
    tree = parso.parse(file_of(path).read_text())
    places: dict[object, list[tuple[int, int]]] = defaultdict(list)
    for number, operator in enumerate(OPERATORS):
        occurrence = 0
        for node in ast_nodes(tree):
            for position in operator.mutation_positions(node):
                places[position].append((number, occurrence))
                occurrence += 1
    return places


def _mutant(path: str, number: int, occurrence: int) -> Mutant | None:
    original = file_of(path).read_text()
    source = mutate_code(original, OPERATORS[number], occurrence)
    if source is None or source == original:
        return None
    changes = list(_changes(original, source))
    line = changes[0][0]
    before = " ".join(text.strip() for _, sign, text in changes if sign == "-")
    after = " ".join(text.strip() for _, sign, text in changes if sign == "+")
    return Mutant(path, line, before, after, source)


def _changes(original: str, source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, sign and text of each line that differs."""
    line = 0
    for text in difflib.ndiff(original.splitlines(), source.splitlines()):
        line += text[0] in " -"
        if text[0] in "-+":
            yield line, text[0], text[2:]
