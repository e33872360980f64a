"""Reads the docstrings of fields, which describe them in OpenAPI and on the command line.

pydantic's own `use_attribute_docstrings` reads them at each start, which takes 150 ms.
"""

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise

from pydantic import BaseModel


def field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings below the fields of a model and of its bases, by field."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__[: model.__mro__.index(BaseModel)]):
        texts |= _of_module(base.__module__).get(base.__name__, {})
    return texts


@cache
def _of_module(name: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of fields by class and field."""
    texts: dict[str, dict[str, str]] = {}
    nodes = ast.walk(ast.parse(inspect.getsource(sys.modules[name])))
    for node in (node for node in nodes if isinstance(node, ast.ClassDef)):
        for field, below in pairwise(node.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(ast.Constant(str(text))):
                    texts.setdefault(node.name, {})[key] = inspect.cleandoc(text)
    return texts
