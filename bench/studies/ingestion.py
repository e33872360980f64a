"""Does the openai client's bulk ingestion end without failures? Threads, at default settings.

    python bench/studies/ingestion.py [BUNDLE] [--store DIR] [--tei BINARY CHECKPOINT]

Each thread calls `embeddings.create` again and again, with the client's own timeout and its two
retries. "No patience stated": without the header in which the client states its read timeout, as
clients of other makers send none. Then the server refuses, and the client comes back as
`Retry-After` says.
"""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai

from cloze.bench.processes import RunningServer
from cloze.bench.studies.overload import servers, subjects_parser
from cloze.bench.texts import words_of
from cloze.model_store import Store

LOADS = {"128 threads, 1 passage": (128, 1, 1000), "64 threads, 32 passages": (64, 32, 128)}
"""Threads, passages per call, calls."""

WORDS = 97
"""Words of a passage, which are about 130 tokens."""


def ingest(
    server: RunningServer,
    model: str,
    words: list[str],
    load: tuple[int, int, int],
    *,
    says_nothing: bool,
) -> tuple[Counter[str], list[float], float]:
    """Return what became of the calls, the seconds of each answered one, and of all."""
    threads, each, calls = load
    rng = np.random.default_rng(0)
    outcomes: Counter[str] = Counter()
    seconds: list[float] = []
    headers = {"x-stainless-read-timeout": openai.Omit()} if says_nothing else None
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

        def call(texts: list[str]) -> None:
            started = time.monotonic()
            try:
                client.embeddings.create(model=model, input=texts, extra_headers=headers)
                outcomes["answered"] += 1
                seconds.append(time.monotonic() - started)
            except openai.OpenAIError as error:
                outcomes[type(error).__name__] += 1

        inputs = [[" ".join(rng.choice(words, WORDS)) for _ in range(each)] for _ in range(calls)]
        call(inputs[0])
        outcomes.clear()
        seconds.clear()
        started = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(call, inputs))
        return outcomes, seconds, time.monotonic() - started


def main() -> None:
    """Measure, and print the table."""
    parser = subjects_parser(precision="fp32")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    options = parser.parse_args()
    bundle = Store(options.store).open(options.bundle or "cloze-bert")
    ours, *peers = servers(options)
    subjects = [(ours, False), (ours, True), *((peer, False) for peer in peers)]
    print("| server | load | failed of calls | p50 / most s | texts/s | outcomes |")
    print("|---|---|---|---|---|---|")
    for subject, says_nothing in subjects:
        for name in options.loads:
            load = LOADS[name]
            with subject.start() as running:
                outcomes, seconds, all_s = ingest(
                    running, bundle.manifest.name, words_of(bundle), load, says_nothing=says_nothing
                )
            failed = load[2] - outcomes["answered"]
            p50, most = np.percentile(seconds or [0.0], [50, 100])
            texts = outcomes["answered"] * load[1] / all_s
            label = f"{subject.name}{', no patience stated' if says_nothing else ''}"
            print(
                f"| {label} | {name} | {failed} of {load[2]} | {p50:.1f} / {most:.1f} "
                f"| {texts:.0f} | {dict(outcomes)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
