"""Zero-shot classification: which of the request's own labels fit a text.

A classifier of pairs that was trained on inferences reads the text with one sentence per label, the
hypothesis, and says whether the text entails the sentence. The scores are those of transformers'
pipeline. Source: Yin et al. 2019, "Benchmarking Zero-shot Text Classification".
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from pydantic import Field

from cloze.model_store import Manifest
from cloze.model_store.heads import sequence_classification
from cloze.model_store.sequences import TEXT_TOKENS
from cloze.service.errors import InvalidRequest, Location, TextTooLong, quoted
from cloze.service.tasks.task import (
    Input,
    Outputs,
    PreparedRequest,
    Task,
    TaskContext,
    check_has_tokens,
    softmax,
)
from cloze.service.tasks.text_classification import (
    REQUEST,
    LabelScore,
    best_labels,
    means,
    sequence_labels,
)
from cloze.service.tasks.texts import TextEncoder, TruncationParameters, UsageParameters
from cloze.service.tasks.wire import Text, Texts

_SLOT: Final = "{}"
_LABEL_CHARACTERS: Final = 1000
"""Most characters of a label, which the answer repeats for each text."""
_LABELS: Final = Location(("candidate_labels",))
_TEMPLATE_PLACE: Final = Location(("hypothesis_template",))


class ZeroShotParameters(TruncationParameters, UsageParameters):
    """The parameters of huggingface_hub's ``zero_shot_classification``, and long texts.

    A label is never cut.
    """

    candidate_labels: Texts | None = None
    """the labels to choose among; needed"""
    hypothesis_template: Text | None = None
    """the sentence that a fitting text entails, with {} in the label's place; the default is
    This example is {}."""
    multi_label: bool | None = None
    """whether each label is judged alone, so that several may fit; the default is false, for which
    the scores of all labels have the sum 1"""


class _State(NamedTuple):
    """How the logits of one request become scores."""

    labels: list[str]
    alone: bool  # whether each label is judged alone
    windows: list[int]  # number of windows of each text; each has one encoding per label


def _entailing(manifest: Manifest) -> tuple[int, slice] | None:
    """Return the label of entailment of the first label set that has one, and the set's logits.

    The label is the one that transformers' pipeline takes.
    """
    for chosen, columns in sequence_labels(manifest).columns():
        for number, label in enumerate(chosen.labels):
            if label.lower().startswith("entail"):
                return number, columns
    return None


def _why_not_served(manifest: Manifest) -> str | None:
    if _entailing(manifest) is not None:
        return None
    labels = [label for each in sequence_labels(manifest).sets for label in each.labels]
    known = ascii(", ".join(labels)[:200])[1:-1]
    return f"none of its labels begins with entail; it has {known}"


def prepare(
    inputs: Any, parameters: ZeroShotParameters, context: TaskContext
) -> PreparedRequest[_State]:
    """Tokenize each text with the hypothesis of each label."""
    limits, tokenizer = context.limits, context.tokenizer
    texts: list[Input[str]] = limits.checked(inputs)
    if (labels := parameters.candidate_labels) is None:
        raise InvalidRequest("is missing; name at least 1 label", _LABELS)
    hypotheses = _hypotheses(labels, parameters.hypothesis_template, context)
    rule = parameters.rule(report=parameters.return_usage)
    encoder = TextEncoder(rule, context, limits.max_tokens)
    limits.check_results(len(texts) * len(hypotheses), "the request asks for", "scores")
    around = [len(hypothesis) + tokenizer.special.pair_tokens for hypothesis in hypotheses]
    tokens, windows = 0, []
    for (at, text), ids in zip(texts, tokenizer.ids([text for _, text in texts]), strict=True):
        check_has_tokens(ids, at)
        # Windows have room beside the longest hypothesis. A cut is made for each hypothesis.
        parts = encoder.divide(at, len(ids), max(around))
        cuts = [parts] * len(around)
        if len(parts) == 1:
            cuts = [encoder.divide(at, len(ids), others) for others in around]
        pairs = list(zip(hypotheses, cuts, strict=True))
        tokens += sum(len(parts) * others for others in around)
        tokens += sum(end - first for cut in cuts for first, end in cut)
        limits.check_tokens(tokens, "the texts with each of their labels hold", at)
        encodings = [
            tokenizer.pair(ids[slice(*cut[part])], hypothesis, limits.max_tokens, REQUEST)
            for part in range(len(parts))
            for hypothesis, cut in pairs
        ]
        read = parts[0][1] - parts[0][0] if len(parts) == 1 else len(ids)
        encoder.keep(encodings, len(ids) + TEXT_TOKENS, read + TEXT_TOKENS, parts, text)
        windows.append(len(parts))
    # One label alone would always have the score 1, so it is judged as one of several.
    state = _State(labels, bool(parameters.multi_label) or len(labels) == 1, windows)
    return encoder.prepared(state)


def _hypotheses(
    labels: Sequence[str], template: str | None, context: TaskContext
) -> list[Sequence[int]]:
    """Return the tokens of each label's hypothesis, after a check of the labels."""
    limits = context.limits
    first: dict[str, Location] = {}
    for at, label in limits.checked(labels, _LABELS, "label"):
        if len(label) > _LABEL_CHARACTERS:
            problem = f"has {len(label)} characters; the limit of a label is {_LABEL_CHARACTERS}"
            raise TextTooLong(problem, at)
        if (other := first.setdefault(label, at)) != at:
            raise InvalidRequest(f"is {quoted(label)}, as {other} is; a label is given once", at)
    template = "This example is {}." if template is None else template
    limits.checked(template, _TEMPLATE_PLACE)
    before, slot, after = template.partition(_SLOT)
    if not slot or set(_SLOT) & set(before + after):
        problem = f"is {quoted(template)}; it needs {_SLOT} once, for the label, and no brace"
        raise InvalidRequest(f"{problem} besides", _TEMPLATE_PLACE)
    # A short body may have a long template and many labels.
    if (length := len(template) * len(labels)) > (most := limits.max_text_characters):
        problem = f"has {len(template)} characters, and with {len(labels)} labels {length}"
        raise TextTooLong(f"{problem}; the limit is {most}", _TEMPLATE_PLACE)
    sentences = [before + label + after for label in labels]
    without, *hypotheses = context.tokenizer.ids([before + after, *sentences])
    room = limits.max_tokens - context.tokenizer.special.pair_tokens
    for number, hypothesis in enumerate(hypotheses):
        check_has_tokens(hypothesis if hypothesis != without else (), _LABELS.below(number))
        if len(hypothesis) >= room:
            raise TextTooLong(
                f"becomes a sentence of {len(hypothesis)} tokens; the model reads {room}, and at "
                "least 1 of them is the text's",
                _LABELS.below(number),
            )
    return hypotheses


def decode(state: _State, outputs: Outputs, context: TaskContext) -> list[list[LabelScore]]:
    """Return the labels of each text, best first."""
    found = _entailing(context.manifest)
    assert found is not None  # else the model does not serve the task
    entailed, columns = found
    name = sequence_classification.HEAD.name
    logits = np.stack([output[name].array[columns] for output in outputs])
    windows = logits.reshape(-1, len(state.labels), logits.shape[1])  # [windows, labels, L]
    if state.alone:
        # transformers takes the first label for the contradiction, or the last if the first entails
        contradicted = -1 if entailed == 0 else 0
        scores = softmax(windows[..., [contradicted, entailed]])[..., 1]
    else:
        scores = softmax(windows[..., entailed])
    return best_labels(state.labels, means(scores, state.windows))


TASK: Final = Task(
    name="zero-shot-classification",
    route="/zero-shot-classification",
    summary="Which of the request's own labels fit a text",
    heads=(sequence_classification.HEAD.name,),
    why_not_served=_why_not_served,
    inputs=Annotated[Text | Texts, Field(description="a text or a list of texts")],
    parameters=ZeroShotParameters,
    result=list[LabelScore] | list[list[LabelScore]],
    alone=(str,),
    own_parameters=("candidate_labels",),
    needs_thread=lambda _: True,
    prepare=prepare,
    decode=decode,
    scores=lambda *_: "probability",
    labels=lambda _, parameters: parameters.candidate_labels,
    examples={
        "One text": {
            "inputs": "The parliament passed the law.",
            "parameters": {"candidate_labels": ["politics", "sport", "cooking"]},
        },
        "Several labels may fit": {
            "inputs": ["The room was loud and the staff unfriendly."],
            "parameters": {"candidate_labels": ["complaint", "praise"], "multi_label": True},
        },
    },
)
