"""One run, in turns: the bare engine and the server on the same texts. A first look; `cloze bench` will take its place.

.venv/bin/python bench/engine_and_server.py STORE MODEL QUESTIONS.jsonl      a line: {"question": "..."}
"""

import json
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from model_store import Store
from service.core import Device, Query
from service.engine import OnnxEngine
from service.tokenizer import Tokenizer
from tests.serving import running_server

TEXTS, WORKERS, CLIENTS, MAX_BATCH_TOKENS = 1000, 2, 32, 2048


def main(store: Path, model: str, questions: Path) -> None:
    """Print texts a second, twice each, in turns."""
    lines = [json.loads(line)["question"] for line in questions.open()]
    rng = np.random.default_rng(0)
    texts = [". ".join(rng.choice(lines, rng.choice([1, 1, 1, 2, 5, 10]))) for _ in range(TEXTS)]
    bundle = Store(store).open(model)
    engine, tokenizer = OnnxEngine(bundle, Device.CPU), Tokenizer(bundle)
    groups: dict[int, list[Query]] = defaultdict(list)
    for ids in tokenizer.ids(texts):
        sequence = np.array(tokenizer.single(ids, 256)[0], np.int32)
        groups[len(sequence)].append(Query(sequence, np.zeros_like(sequence), embed=True))
    batches = [g[i : i + MAX_BATCH_TOKENS // n] for n, g in groups.items() for i in range(0, len(g), MAX_BATCH_TOKENS // n)]
    with running_server(store, "--model", model) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(2):
            with ThreadPoolExecutor(WORKERS) as pool:
                started = time.perf_counter()
                list(pool.map(engine.run, batches))
                print(f"engine alone, {WORKERS} workers: {TEXTS / (time.perf_counter() - started):.0f} texts/s")
            with ThreadPoolExecutor(CLIENTS) as pool:
                started = time.perf_counter()
                list(pool.map(lambda text: client.post("/embed", json={"inputs": text}).raise_for_status(), texts))
                print(f"server, {CLIENTS} clients: {TEXTS / (time.perf_counter() - started):.0f} texts/s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
