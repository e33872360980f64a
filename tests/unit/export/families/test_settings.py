"""What families read from and write to ``config.json``, and the names that transformers has."""

from typing import Any

import pytest
import transformers

from cloze.export.families import FAMILIES, Family
from tests.unit.export.families.test_against_transformers import OWN, SIZES


def settings(family: str) -> dict[str, Any]:
    given = {"vocab_size": 50} | SIZES | OWN[family]
    return transformers.CONFIG_MAPPING[family](**{"pad_token_id": 1} | given).to_dict()


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def test_every_class_that_a_family_names_is_one_of_transformers(family: Family) -> None:
    tokenizers = [family.sentencepiece_class, family.byte_level_class]
    tokenizers += [family.wordpiece.name] if family.wordpiece else []
    names = [f"{family.class_prefix}Model", *filter(None, tokenizers)]
    assert [name for name in names if not hasattr(transformers, name)] == []


def test_code_of_a_tokenizer_is_no_code_of_a_model() -> None:
    """It is not run either; the tokenizer's file says what it does."""
    given = settings("bert")
    FAMILIES["bert"].read_config(
        given | {"auto_map": {"AutoTokenizer": "x.Y", "AutoConfig": "x.Z"}}
    )
    for name in ("AutoModel", "AutoModelForMaskedLM"):
        with pytest.raises(ValueError, match=rf"auto_map: {name}\)"):
            FAMILIES["bert"].read_config(given | {"auto_map": {"AutoConfig": "x.Z", name: "x.Y"}})
