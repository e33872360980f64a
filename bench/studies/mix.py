"""Are accepted requests answered, whatever comes later? A mix of small and large requests.

    python bench/studies/mix.py [--times 1.1 3 10] [--timeouts-ms 0 5000] [--seconds 30]
    python bench/studies/mix.py BUNDLE --store DIR --tei BINARY CHECKPOINT  # embeddings alone

An open loop offers multiples of the capacity of a closed loop with 32 clients: search questions,
lists of 32 passages, question answering on 2,000 words and fill-mask, all of one client. The work
of a kind is measured alone, in seconds of the closed loop. "Wasted" is the work of the requests
that were neither answered nor refused with 429, as a share of all work.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import orjson
import uvloop

from cloze.bench.http_client import Request, post
from cloze.bench.load import (
    MANY_CONNECTIONS,
    Answer,
    LoadResult,
    allow_many_connections,
    closed_loop,
    open_loop,
    poisson,
)
from cloze.bench.processes import RunningServer
from cloze.bench.servers import MeasuredServer
from cloze.bench.studies.overload import servers, subjects_parser, watching
from cloze.bench.texts import make_texts, words_of
from cloze.model_store import Store

CLIENTS = 32
SHARES = {"question": 0.6, "list of 32": 0.2, "long QA": 0.1, "fill-mask": 0.1}
EMBED_SHARES = {"question": 0.75, "list of 32": 0.25}
COUNT = 2000

PATIENT_MS = 240_000
"""Time limit that the closed loop states, so that nothing of it is refused."""

PATIENT = {"x-request-timeout-ms": str(PATIENT_MS)}


@dataclass(frozen=True, slots=True)
class Subject:
    """A measured server, and the kinds of requests that it answers, with their shares."""

    server: MeasuredServer
    shares: dict[str, float]


def bodies(words: Sequence[str], mask: str) -> dict[str, list[tuple[str, bytes]]]:
    """Return the path and the body of some requests of each kind."""
    rng = np.random.default_rng(0)
    questions = make_texts(words, 200, "questions").texts
    passages = [" ".join(rng.choice(words, 95)) for _ in range(320)]
    contexts = [" ".join(rng.choice(words, 2000)) for _ in range(20)]
    pairs = zip(questions, contexts, strict=False)
    return {
        "question": [("/embed", orjson.dumps({"inputs": text})) for text in questions],
        "list of 32": [
            ("/embed", orjson.dumps({"inputs": passages[i : i + 32]})) for i in range(0, 320, 32)
        ],
        "long QA": [
            ("/qa", orjson.dumps({"inputs": {"question": question, "context": context}}))
            for question, context in pairs
        ],
        "fill-mask": [
            ("/fill-mask", orjson.dumps({"inputs": f"{text} {mask} ."})) for text in questions
        ],
    }


def requests_of(
    made: dict[str, list[tuple[str, bytes]]], shares: dict[str, float], timeouts_ms: Sequence[int]
) -> list[Request]:
    """Return requests in random order; 0 ms stands for requests that state no time limit."""
    rng = np.random.default_rng(1)
    kinds = rng.choice(list(shares), COUNT, p=list(shares.values()))
    requests = []
    for number, kind in enumerate(kinds):
        path, body = made[kind][number % len(made[kind])]
        timeout_ms = int(rng.choice(timeouts_ms))
        headers = {"x-request-timeout-ms": str(timeout_ms)} if timeout_ms else None
        group = f"{kind}, {timeout_ms} ms" if timeout_ms else str(kind)
        requests.append(Request(post(path, body, headers), 1, group))
    return requests


async def seconds_each(
    server: RunningServer, made: dict[str, list[tuple[str, bytes]]], kinds: Sequence[str]
) -> dict[str, float]:
    """Return the seconds of the whole server that a request of each kind needs."""
    seconds = {}
    for kind in kinds:
        requests = [Request(post(*each, PATIENT)) for each in made[kind]]
        await closed_loop(server.url, requests, clients=8, seconds=1)
        load = await closed_loop(server.url, requests, clients=8, seconds=4)
        seconds[kind] = load.seconds / max(1, load.requests)
    return seconds


def lines(
    times: float, load: LoadResult, answers: Sequence[tuple[str, Answer]], work: dict[str, float]
) -> list[str]:
    """Return a line of the table per kind, and one for all."""
    statuses: dict[str, Counter[int]] = defaultdict(Counter)
    for group, answer in answers:
        statuses[group][answer.response.status if answer.response else 0] += 1
    table, done_s, wasted_s, accepted, lost = [], 0.0, 0.0, 0, 0
    for group, counts in sorted(statuses.items()):
        sent, answered, refused = counts.total(), counts[200], counts[429]
        each_s = work[group.partition(",")[0]]
        unanswered = sent - answered - refused
        done_s, wasted_s = done_s + answered * each_s, wasted_s + unanswered * each_s
        accepted, lost = accepted + answered + unanswered, lost + unanswered
        latencies = load.by_group[group]
        p50, p99 = (latencies.get_value_at_percentile(p) / 1e6 for p in (50, 99))
        others = {status: n for status, n in sorted(counts.items()) if status not in (200, 429)}
        table.append(
            f"| {times:g} | {group} | {sent} | {answered} | {refused / sent:.1%} "
            f"| {unanswered} {others or ''} | {p50:.2f} / {p99:.2f} | |"
        )
    span_s = max(answer.due_s for _, answer in answers)
    table.append(
        f"| {times:g} | all | {sum(map(Counter.total, statuses.values()))} | {accepted - lost} | "
        f"| {lost} of {accepted} accepted | wasted {wasted_s / (done_s + wasted_s):.1%} "
        f"| {done_s / max(span_s, load.seconds):.2f} |"
    )
    return table


async def measure(
    subject: Subject, made: dict[str, list[tuple[str, bytes]]], options: argparse.Namespace
) -> None:
    """Measure one server, and print its lines."""
    with subject.server.start() as server:
        mixed = requests_of(made, subject.shares, [PATIENT_MS])
        await closed_loop(server.url, mixed, clients=CLIENTS, seconds=3)
        work = await seconds_each(server, made, list(subject.shares))
        closed = await closed_loop(server.url, mixed, clients=CLIENTS, seconds=options.closed)
        done_s = sum(
            work[group.partition(",")[0]] * latencies.get_total_count()
            for group, latencies in closed.by_group.items()
        )
        capacity = closed.requests / closed.seconds
        each = ", ".join(f"{kind} {seconds * 1e3:.1f} ms" for kind, seconds in work.items())
        print(
            f"\n{subject.server.name}: {capacity:.1f} requests per second in the closed loop, "
            f"{done_s / closed.seconds:.2f} s of work per second ({each}), "
            f"statuses {dict(closed.statuses)}\n\n{TABLE}",
            flush=True,
        )
        requests = requests_of(made, subject.shares, options.timeouts_ms)
        for times in options.times:
            answers: list[tuple[str, Answer]] = []

            def note(answer: Answer, answers: list[tuple[str, Answer]] = answers) -> None:
                answers.append((requests[answer.number].group, answer))

            arrivals = poisson(times * capacity, options.seconds)
            with watching(server, subject.server.ready_path) as watch:
                load = await open_loop(
                    server.url, requests, arrivals, connections=MANY_CONNECTIONS, on_answer=note
                )
            print("\n".join(lines(times, load, answers, work)))
            p50, p99 = (watch.probes.get_value_at_percentile(p) / 1e3 for p in (50, 99))
            print(f"| {times:g} | probes | | | | {watch.failed_probes} failed "
                  f"| {p50 / 1e3:.3f} / {p99 / 1e3:.3f} | |", flush=True)  # fmt: skip


TABLE = """\
| times the capacity | kind | sent | answered | refused | neither | p50 / p99 s | work done, s/s |
|---|---|---|---|---|---|---|---|"""


def main() -> None:
    """Measure, and print the tables."""
    allow_many_connections()
    parser = subjects_parser()
    parser.add_argument("--times", type=float, nargs="+", default=[1.1, 3.0, 10.0])
    parser.add_argument("--timeouts-ms", type=int, nargs="+", default=[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--closed", type=float, default=15.0, help="seconds of the closed loop")
    options = parser.parse_args()
    bundle = Store(options.store).open(options.bundle or "cloze-bert")
    shares = EMBED_SHARES if options.bundle else SHARES
    ours, *peers = servers(options)
    subjects = [Subject(ours, shares), *(Subject(peer, EMBED_SHARES) for peer in peers)]
    made = bodies(words_of(bundle), bundle.manifest.tokenizer.mask_token or "")
    for subject in subjects:
        uvloop.run(measure(subject, made, options))


if __name__ == "__main__":
    main()
