"""What tasks make of requests, and what they refuse: `requests.txt` has one line per request.

A line names the model, the request in Python, and what is prepared or the code and the words of the
error. A request is a task, inputs, parameters, and changes of the limits if there are any.

Of what is prepared, a line has the numbers of texts, of rows of the answer and of texts that are
cut; whether a thread prepares the request; the heads; the usage if the request asks for it; and the
tokens of the first encodings, with how many of them are of the second type. To accept other lines,
run this test with ``REWRITE_WORDING=1`` and read the difference.
"""

from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from cloze.service.errors import RequestError
from cloze.service.tasks import TASKS, rerank
from cloze.service.tasks.task import Task, TextUsage
from cloze.service.tasks.token_ids import DECODE, TOKENIZE
from tests.support.refusals import check_table
from tests.support.task_model import (
    CONTEXT,
    EMBEDDING,
    LATE,
    VOCABULARY,
    classifier,
    context,
    manifest,
    tokens,
)

ALL: dict[str, Task] = {**TASKS, "rerank": rerank.TASK, "tokenize": TOKENIZE, "decode": DECODE}


def without(task: str) -> list[str]:
    return [each for each in manifest().tasks if each != task]


MODELS = {
    "tiny": CONTEXT,
    "cuts the start": context(
        tokenizer=manifest().tokenizer.model_dump() | {"truncation_side": "left"}
    ),
    "two separators": context(
        tokenizer=manifest().tokenizer.model_dump() | {"pair_separators": 2, "second_type": 0}
    ),
    "default prompt": context(
        embedding=EMBEDDING | {"prompts": {"q": "ask ", "d": "say "}, "default_prompt": "q"}
    ),
    "no recipe": context(
        tasks=[task for task in manifest().tasks if not task.startswith("embed")], embedding=None
    ),
    "no prompts": context(embedding=EMBEDDING),
    "projected": context(embedding=EMBEDDING | {"projected": True}),
    "perhaps projected": context(embedding=EMBEDDING | {"projected": None}),
    "first token": context(embedding=EMBEDDING | {"pooling": "cls"}),
    "three layers": context(architecture=manifest().architecture.model_dump() | {"layers": 3}),
    "no layers": context(tasks=without("embed-layers")),
    "no tokens": context(tasks=without("embed-all")),
    "ranks": context(heads=classifier("relevance")),
    "entails": context(heads=classifier("ENTAILMENT", "neutral", "contradiction")),
    "late": context(tasks=["multi-vector"], embedding=None, heads={"multi_vector": LATE}),
}


SHOWN = 12
"""Encodings of which a line has the tokens."""


def shown(usage: TextUsage) -> str:
    return f", windows {usage.windows}" if usage.windows else ""


def outcome(model: str, request: str) -> str:
    name, inputs, parameters, *limits = eval(request, {"VOCABULARY": len(VOCABULARY)})
    task, served = ALL[name], MODELS[model]
    if limits:
        served = replace(served, limits=replace(served.limits, **limits[0]))
    validated = TypeAdapter(task.inputs).validate_python(inputs)
    try:
        given = task.parameters.model_validate(parameters)
        made = task.prepare(validated, given, served)
    except RequestError as error:
        return f"{error.code} | {error}"
    usage = [f"{used.tokens} tokens, {used.used} used{shown(used)}" for used in made.usage or ()]
    second = [int(one.token_type_ids.sum()) for one in made.encodings]
    first = [
        f"{text} ({count} of the second type)" if count else text
        for text, count in zip(tokens(made), second, strict=True)
    ][:SHOWN]
    heads = dict.fromkeys(" and ".join(sorted(one.requests)) for one in made.encodings)
    thread = ", on a thread" if task.needs_thread(given) else ""
    counts = f"{made.texts} texts, {made.answer_rows} rows, {made.truncated} cut{thread}"
    return " | ".join([counts, "; ".join(heads), *usage, *first])


def test_each_request_is_prepared_or_refused() -> None:
    check_table(Path(__file__).with_name("requests.txt"), outcome)
