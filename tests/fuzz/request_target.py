"""Bodies of requests to each task: encodings within the limits and a result, or a service's error.

An input is the route of a task, a line break, and a body. The tokenizer is that of a default
bundle. Random numbers stand for the outputs of the engine.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from hypothesis import strategies as st

from cloze.model_store import Store
from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads import HEADS
from cloze.model_store.heads.entities import EntityKind, EntityOptions
from cloze.model_store.heads.masked_lm import MaskedLMRequest, MaskedLMResult
from cloze.model_store.heads.sequence_classification import SequenceLabels
from cloze.model_store.heads.sparse_embedding import SparseEmbeddingResult
from cloze.model_store.heads.token_classification import TokenLabels
from cloze.model_store.locations import SHIPPED_NAMES
from cloze.service.errors import ServiceError
from cloze.service.http.body import BodyLimits, load, validate
from cloze.service.protocols.native import body_type
from cloze.service.tasks import TASKS, TaskContext, TaskLimits
from cloze.service.text.tokenizer import Tokenizer
from tests.fuzz.damage import damaged_bytes, damaged_json, json_values
from tests.fuzz.search import Target

LIMITS = TaskLimits(
    max_tokens=48, max_masks=8, max_top_k=20, max_results=500, max_request_tokens=5000,
    max_text_characters=5000, max_request_texts=5,
)  # fmt: skip
BODY_LIMITS = BodyLimits.of_requests(1_000_000, 5, 5000)
ROUTES = {task.route: (task, body_type(task)) for task in TASKS.values()}
LABELS = ("O", "B-PER", "I-PER")
WIDTH = 8
"""Size of hidden states and embeddings."""


pieces = st.one_of(
    st.sampled_from(["the", " ", "a king", "Paris", "[MASK]", " [MASK] ", "[CLS]", "[SEP]", "##s"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.text(st.characters(categories=["Cc", "Cf", "Zs", "Zl", "Mn", "Me"]), max_size=6),
    st.sampled_from(
        [
            "\0", "\r\n", "\ufeff", "\ufffd", "\u202e", "\u2066", "\ud7ff", "\U0010ffff",
            "e\u0301", "\u0301" * 40, "\u0130", "\ufb03", "\u1e9b\u0323", "\uac00\u11a8",
            "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1eb\U0001f1f7",
            "\u0645\u0631\u062d\u0628\u0627", "\u05e9\u05dc\u05d5\u05dd", "\u6771\u4eac",
            "\u0e01\u0e33",
        ]
    ),
    st.sampled_from(["x" * 101, "x" * 3000, "the " * 60, "\u6771" * 70, "!" * 200]),
)  # fmt: skip
texts = st.lists(pieces, min_size=1, max_size=7).map("".join)
kinds: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(), "integer": st.integers(0, 60), "null": st.none(),
    "number": st.floats(0, 1), "string": texts,
}  # fmt: skip


def fitting(schema: Any, definitions: Any) -> st.SearchStrategy[Any]:
    """Return values that fit a schema, but for the limits of a task."""
    if "$ref" in schema:
        return fitting(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return st.one_of([fitting(each, definitions) for each in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "prefixItems" in schema:
        return st.tuples(*(fitting(each, definitions) for each in schema["prefixItems"]))
    if schema.get("type") == "array":
        return st.lists(fitting(schema.get("items", {}), definitions), min_size=1, max_size=4)
    if "properties" in schema:
        parts = {name: fitting(each, definitions) for name, each in schema["properties"].items()}
        needed = {name: parts.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(needed, optional=parts)
    return kinds.get(schema.get("type", ""), json_values)


def bodies(route: str) -> st.SearchStrategy[bytes]:
    """Return requests to a route: a body that fits its schema, or nearly does."""
    schema = ROUTES[route][1].model_json_schema()
    fits = fitting(schema, schema.get("$defs", {}))
    return st.builds(
        lambda body, ascii_only: f"{route}\n{json.dumps(body, ensure_ascii=ascii_only)}".encode(
            errors="replace"
        ),
        st.one_of(fits, fits, fits.flatmap(damaged_json)),
        st.booleans(),
    )


requests = st.sampled_from(sorted(ROUTES)).flatmap(bodies)


@cache
def context() -> TaskContext:
    """Return a model of every task, with the tokenizer of a default bundle."""
    bundle = Store().open(SHIPPED_NAMES[0])
    manifest = bundle.manifest
    changes = {"dimensions": WIDTH, "prompts": {"q": "the "}, "projected": False}
    recipe = manifest.embedding.model_copy(update=changes | {"max_tokens": LIMITS.max_tokens})
    heads = {
        "sequence_classification": SequenceLabels(
            labels=("entailment", *LABELS[1:]), problem_type="single_label_classification"
        ),
        "token_classification": TokenLabels(labels=LABELS),
        "entities": EntityOptions(kind=EntityKind.SPAN, max_width=3, max_len=8, ent_id=1, sep_id=2),
    }
    tasks = tuple(
        head.task for head in HEADS.values() if head.name not in ("lexical", "multi_vector")
    )
    update = {"tasks": tasks, "embedding": recipe, "heads": heads}
    return TaskContext(manifest.model_copy(update=update), Tokenizer(bundle), LIMITS)


def check(data: bytes, _: Path) -> bool:
    """Answer a request; return whether the request has a result."""
    route, _, body = data.decode("utf-8", "surrogateescape").partition("\n")
    if route not in ROUTES:
        return False
    task, model = ROUTES[route]
    random = np.random.default_rng(zlib.crc32(data))
    try:
        asked: Any = validate(model, load(body.encode("utf-8", "surrogateescape"), BODY_LIMITS))
        at_root = isinstance(asked, task.parameters)
        parameters = asked if at_root else getattr(asked, "parameters", None) or task.parameters()
        prepared = task.prepare(asked.inputs, parameters, context())
        while True:
            if task.name != "entities" or prepared.encodings:  # a text may have no words
                check_encodings(prepared.encodings)
            outputs = [fake_outputs(encoding, random) for encoding in prepared.encodings]
            following = prepared.advance and prepared.advance(outputs, context())
            if not following:
                break
            prepared = following
        result = task.decode(prepared.state, outputs, context())
    except ServiceError:
        return False
    answer = {"result": result, "usage": prepared.usage, "warnings": prepared.warnings}
    written = orjson.loads(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY))
    assert all(warning.isascii() for warning in prepared.warnings)
    check_places(written, longest=max(map(len, texts_of(json.loads(body)["inputs"])), default=0))
    return True


def check_encodings(encodings: Sequence[Encoding]) -> None:
    """Check the encodings of a request against the limits and the vocabulary."""
    tokenizer = context().tokenizer
    assert encodings, "the request has no encoding"
    for encoding in encodings:
        input_ids = encoding.input_ids
        assert 2 <= len(input_ids) <= LIMITS.max_tokens
        assert input_ids.dtype == encoding.token_type_ids.dtype == np.int32
        assert len(encoding.token_type_ids) == len(input_ids)
        assert set(encoding.token_type_ids.tolist()) <= {0, 1}
        assert 0 <= input_ids.min() <= input_ids.max() < tokenizer.vocab_size
        assert encoding.requests, "the encoding asks nothing"
        masks = encoding.requests.get("masked_lm")
        if isinstance(masks, MaskedLMRequest):
            assert (input_ids[list(masks.positions)] == tokenizer.mask_id).all()
    assert sum(map(len, encodings)) <= LIMITS.max_request_tokens


def fake_outputs(encoding: Encoding, random: np.random.Generator) -> HeadOutputs:
    """Return random results of the heads that an encoding asks."""
    outputs: dict[str, Any] = {}
    for name, request in encoding.requests.items():
        asked: Any = request
        if name == "masked_lm":
            masks = len(asked.positions)
            outputs[name] = MaskedLMResult(
                -np.sort(-numbers(random, masks, asked.top_k)),
                random.integers(0, 12_000, (masks, asked.top_k)),
                numbers(random, masks) + 10,
                numbers(random, masks, len(asked.targets)),
            )
        elif name == "sparse_embedding":
            count = int(random.integers(0, asked.top_k + 1))
            weights = -np.sort(-np.abs(numbers(random, count)))
            outputs[name] = SparseEmbeddingResult(weights, random.permutation(12_000)[:count])
        else:
            shapes = {
                "next_sentence": (2,),
                "span": (len(encoding), 2),
                "sequence_classification": (len(LABELS),),
                "token_classification": (len(encoding), len(LABELS)),
                "embedding": (WIDTH,),
                "token_embedding": (len(encoding), WIDTH),
                "multi_vector": (len(encoding), WIDTH),
                "entities": (
                    len(getattr(asked, "words", ())),
                    3,
                    len(getattr(asked, "labels", ())),
                ),
                "layer_embedding": (len(getattr(asked, "vectors", None) or ()), WIDTH),
            }
            outputs[name] = HEADS[name].result(numbers(random, *shapes[name]))
    return outputs


def numbers(random: np.random.Generator, *shape: int) -> Any:
    """Return random numbers in the type of a graph's outputs."""
    return random.standard_normal(shape, np.float32)


def parts(value: Any) -> Iterable[Any]:
    """Return the values that a JSON value holds."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def check_places(value: Any, longest: int) -> None:
    """Check every place in a text: ``start`` and ``end``, windows and offsets."""
    if isinstance(value, dict):
        places = [(value["start"], value["end"])] if "start" in value else []
        for name in ("windows", "offsets"):
            places += [place for place in value.get(name) or () if isinstance(place, list)]
        for start, end in places:
            assert 0 <= start <= end <= longest, (start, end, longest)
    for each in parts(value):
        check_places(each, longest)


def texts_of(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value."""
    if isinstance(value, str):
        yield value
    for each in parts(value):
        yield from texts_of(each)


TARGET = Target(
    name="request",
    valid=[
        f"{task.route}\n{json.dumps(body)}".encode()
        for task in TASKS.values()
        for body in task.examples.values()
        if "label_set" not in body.get("parameters", {})  # the heads above have one set each
    ],
    inputs=st.one_of(requests, requests, requests, damaged_bytes(requests)),
    check=check,
    examples=300,
)
