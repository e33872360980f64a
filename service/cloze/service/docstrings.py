"""Reads the docstrings of fields, which describe them in OpenAPI and on the command line.

pydantic can read them when it makes a class (`use_attribute_docstrings`). At the start of a server
that takes 150 ms of processor time, and few servers are asked for a description.
"""

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise


def field_docstrings(model: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class and of its bases, by field."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if base.__module__ in sys.modules and hasattr(sys.modules[base.__module__], "__file__"):
            texts |= _of_module(base.__module__).get(base.__name__, {})
    return texts


@cache
def _of_module(name: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of fields by class and field; none for a module without a source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except OSError:
        return {}
    return {node.name: _of_class(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _of_class(node: ast.ClassDef) -> dict[str, str]:
    texts = {}
    for field, below in pairwise(node.body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = inspect.cleandoc(text)
    return texts
