"""Which docstrings describe the fields of a model."""

from pydantic import BaseModel, create_model

from cloze.model_store.docstrings import field_docstrings


class Base(BaseModel):
    a: int = 1
    """the first
    field"""
    b: int = 2


class Derived(Base):
    "A docstring of the class."

    b: int = 3
    """the second"""
    c: int = 4
    "not the text of d"
    d: int = 5


def test_each_field_has_the_text_below_it_in_its_class_or_a_base() -> None:
    assert field_docstrings(Base) == {"a": "the first\nfield"}
    texts = {"a": "the first\nfield", "b": "the second", "c": "not the text of d"}
    assert field_docstrings(Derived) == texts
    assert field_docstrings(create_model("Made", __base__=Derived, e=(int, 7))) == texts
