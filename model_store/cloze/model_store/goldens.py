"""Reads golden files: inputs of a graph, with torch's outputs for these inputs.

A golden file is a JSON list of cases. Each case has all inputs and all outputs of the graph as
nested lists: ``{"feeds": {name: values}, "outputs": {name: values}}``.
`cloze.export.check.verify` writes the files.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from cloze.model_store.graph_checks import ExpectedTensor, expected_tensors, format_shape
from cloze.model_store.layouts import Feeds, Layout
from cloze.model_store.limits import MAX_GOLDEN_BYTES, MAX_GOLDEN_CASES, MAX_GOLDEN_INPUT
from cloze.model_store.plain_files import read_plain
from cloze.model_store.store import Bundle


@dataclass(frozen=True, slots=True)
class Golden:
    """One golden case.

    Attributes:
        outputs: torch's outputs by tensor name; every output has at least one number.
    """

    feeds: Feeds
    outputs: dict[str, NDArray[Any]]


def read_goldens(bundle: Bundle, file: str, layout: Layout) -> tuple[Golden, ...]:
    """Read a golden file of a bundle.

    Returns:
        At least one golden case.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a golden file of such a graph, or exceeds a limit.
    """
    cases = _parse(read_plain(bundle.file(file), MAX_GOLDEN_BYTES))
    expected = expected_tensors(bundle.manifest, layout)
    return tuple(
        Golden(_feeds(case["feeds"], expected.inputs), _outputs(case["outputs"], expected.outputs))
        for case in cases
    )


def _parse(data: bytes) -> list[dict[str, dict[str, Any]]]:
    try:
        cases = json.loads(data, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(cases, list) or not 1 <= len(cases) <= MAX_GOLDEN_CASES:
        count = f"{len(cases)} cases" if isinstance(cases, list) else "no list of cases"
        raise ValueError(f"has {count}; a golden file has 1 to {MAX_GOLDEN_CASES}")
    for case in cases:
        if not isinstance(case, dict) or case.keys() != {"feeds", "outputs"}:
            raise ValueError("has a case without exactly feeds and outputs")
        if not all(isinstance(tensors, dict) for tensors in case.values()):
            raise ValueError("has a case whose feeds or outputs are no JSON object")
    return cases


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")


def _feeds(values: Mapping[str, Any], expected: Mapping[str, ExpectedTensor]) -> Feeds:
    feeds = _arrays("input", values, expected)
    for name, array in feeds.items():
        if array.size > MAX_GOLDEN_INPUT:
            raise ValueError(
                f"has {array.size} numbers for the input {name}; the limit is {MAX_GOLDEN_INPUT}"
            )
    return feeds


def _outputs(
    values: Mapping[str, Any], expected: Mapping[str, ExpectedTensor]
) -> dict[str, NDArray[Any]]:
    outputs = _arrays("output", values, expected)
    for name, array in outputs.items():
        if not array.size:
            raise ValueError(f"has a case with no number for the output {name}")
    return outputs


def _arrays(
    kind: str, values: Mapping[str, Any], expected: Mapping[str, ExpectedTensor]
) -> dict[str, NDArray[Any]]:
    """Return the arrays of one case; each array has the dtype and a shape of its tensor."""
    if different := values.keys() ^ expected.keys():
        name = min(different)
        problem = "lacks" if name in expected else "has"
        raise ValueError(
            f"has a case that {problem} the {kind} {name!r}; a case has every {kind} of its graph"
        )
    arrays = {}
    for name, tensor in expected.items():
        try:
            with np.errstate(over="ignore"):  # an infinite number is refused below
                array = np.array(values[name], tensor.spec.numpy_dtype)
        except (ValueError, TypeError, OverflowError):
            raise ValueError(
                f"has values of {name} that are no array of {tensor.spec.dtype}"
            ) from None
        if not tensor.may_have(array.shape):
            raise ValueError(f"has {name} as {format_shape(array.shape)}, but it must be {tensor}")
        if not np.isfinite(array).all():
            raise ValueError(f"has a number of {name} that is not finite")
        arrays[name] = array
    return arrays
