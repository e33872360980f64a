"""Checks of the arguments of methods; each error has the method's name and what it takes."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args, get_origin

from cloze.client.call import Pair

_TYPES = {str: "a text", int: "a whole number", bool: "True or False", type(None): "None"}


def texts_of(method: str, texts: str | Iterable[str]) -> list[str]:
    """Return one text or many as a list.

    Raises:
        TypeError: they are neither.
    """
    takes = "a text or a list of texts"
    return [texts] if isinstance(texts, str) else _all_texts(method, takes, texts)


def words_of(method: str, words: Iterable[str], name: str = "targets") -> list[str]:
    """Return an argument that is a list of words, such as the targets of a mask, as a list.

    Raises:
        TypeError: they are no list of words, for example one word.
    """
    return _all_texts(method, f"{name} as a list of words", words)


def one_text(method: str, name: str, text: str) -> str:
    """Return an argument that is one text.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(text, str):
        raise TypeError(f"{method} takes one text as {name}, got {_kind(text)}")
    return text


def pairs_of(
    method: str, pairs: Pair | Iterable[Pair], first: str, second: str
) -> list[dict[str, str]]:
    """Return one pair or many as a list of objects with two fields.

    Raises:
        TypeError: they are neither.
    """
    takes = f"a pair ({first}, {second}) or a list of pairs"
    listed: list[Any] = [pairs] if _is_pair(pairs) else _listed(method, takes, pairs)
    for number, pair in enumerate(listed):
        if not _is_pair(pair, list):
            raise TypeError(f"{method} takes {takes}, got {_kind(pair)} at {number}")
    return [{first: one, second: other} for one, other in listed]


def texts_or_pairs_of(
    method: str, inputs: str | Pair | Iterable[str | Pair]
) -> list[str | dict[str, str]]:
    """Return texts and pairs, one or many, as a list of texts and of objects with two fields.

    Raises:
        TypeError: they are neither, for example a tuple of three texts.
    """
    takes = "a text, a pair (text, text), or a list of these"
    if isinstance(inputs, str) or _is_pair(inputs):
        listed: list[Any] = [inputs]
    elif isinstance(inputs, tuple) and any(isinstance(value, str) for value in inputs):
        raise TypeError(f"{method} takes {takes}, got {_kind(inputs)}")
    else:
        listed = _listed(method, takes, inputs)
    for number, value in enumerate(listed):
        if not isinstance(value, str) and not _is_pair(value, list):
            raise TypeError(f"{method} takes {takes}, got {_kind(value)} at {number}")
    return [v if isinstance(v, str) else {"text": v[0], "text_pair": v[1]} for v in listed]


def option_checks(call: Callable[..., Any]) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that checks keyword arguments against the types that a call declares.

    The function raises a `TypeError` for a value of another type, and a `ValueError` for a text
    that is not one of the words of an option.
    """
    method = call.__name__
    declared = {
        name: _alternatives(parameter.annotation)
        for name, parameter in inspect.signature(call).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }

    def check(options: Mapping[str, Any]) -> None:
        for name, value in options.items():
            types, words = declared.get(name, ([], []))
            if not (types or words) or any(_is_a(value, kind) for kind in types):
                continue
            if not words:
                takes = " or ".join(_TYPES[kind] for kind in types)
                raise TypeError(f"{method} takes {takes} as {name}, got {_kind(value)}")
            if value not in words:
                takes = ", ".join(words)
                error = ValueError if isinstance(value, str) else TypeError
                raise error(f"{method} takes one of {takes} as {name}, got {value!r}")

    return check


def _alternatives(annotation: Any) -> tuple[list[type], list[str]]:
    """Return the types and the words of an annotation; no types if it has others than these."""
    kinds = get_args(annotation) if get_origin(annotation) is not Literal else ()
    kinds = kinds or (annotation,)
    types = [kind for kind in kinds if kind in _TYPES]
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    is_known = len(types) + sum(get_origin(kind) is Literal for kind in kinds) == len(kinds)
    return (types, words) if is_known else ([], [])


def _is_a(value: object, kind: type) -> bool:
    """Return whether a value has a type; True and False are no whole numbers."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _is_pair(value: Any, *kinds: type) -> bool:
    """Return whether a value is a tuple, or one of the kinds, of two texts."""
    is_kind = isinstance(value, (tuple, *kinds))
    return is_kind and len(value) == 2 and all(isinstance(text, str) for text in value)


def _all_texts(method: str, takes: str, values: Any) -> list[str]:
    listed = _listed(method, takes, values)
    for number, value in enumerate(listed):
        if not isinstance(value, str):
            raise TypeError(f"{method} takes {takes}, got {_kind(value)} at {number}")
    return listed


def _listed(method: str, takes: str, values: Any) -> list[Any]:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise TypeError(f"{method} takes {takes}, got {_kind(values)}")
    return list(values)


def _kind(value: object) -> str:
    """Return what a value is, without its content."""
    if isinstance(value, str):
        return "one text"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"
