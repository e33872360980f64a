"""The architectures that are refused by name: one table for the messages and the page."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import transformers

from cloze.export.errors import ExportError
from cloze.export.families import FAMILIES
from cloze.export.families.refused import REFUSALS, REFUSED
from cloze.export.load.checkpoint import load_checkpoint
from tests.support.sources import ROOT

PAGE = ROOT / "docs" / "models.md"


@pytest.mark.slow
def test_the_page_has_the_table_of_the_code() -> None:
    script = [sys.executable, str(ROOT / "scripts/refusal-table")]
    table = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert "| `xlnet` |" in table
    assert table in PAGE.read_text(encoding="utf-8"), "copy the output of: scripts/refusal-table"


def test_no_architecture_is_refused_twice_or_served() -> None:
    counts = Counter(name for refusal in REFUSALS for name in refusal.model_types)
    assert set(counts.values()) == {1}
    assert not REFUSED.keys() & FAMILIES.keys(), "a family that is served leaves the table"


@pytest.mark.parametrize("name", ["t5", "xlnet", "longformer", "jina_embeddings_v3", "unheard-of"])
def test_the_export_refuses_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(ExportError) as error:
        load_checkpoint(str(tmp_path))
    message = str(error.value)
    assert message.startswith(f"architecture '{name}' is not supported: ")
    assert "\n" not in message
    if name in REFUSED:
        assert REFUSED[name].computes in message
        assert message.endswith(f"use instead: {REFUSED[name].instead}")
    else:
        assert message.endswith(f"model_type is none of {', '.join(FAMILIES)}")


def test_code_of_a_tokenizer_is_no_code_of_a_model() -> None:
    """It is not run either; the tokenizer's file says what it does."""
    given = transformers.BertConfig().to_dict()
    read = FAMILIES["bert"].read_config
    read(given | {"auto_map": {"AutoTokenizer": "x.Y", "AutoConfig": "x.Z"}})
    for name in ("AutoModel", "AutoModelForMaskedLM"):
        with pytest.raises(ValueError, match=rf"auto_map: {name}\)"):
            read(given | {"auto_map": {"AutoConfig": "x.Z", name: "x.Y"}})
