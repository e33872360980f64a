"""Measures how fast `cloze serve` is ready, and its memory at rest and under long mixed requests.

    python bench/studies/start_and_memory.py [MODEL_STORE] >bench/results/start-and-memory.md

Without MODEL_STORE, the server serves the default models.
"""

import asyncio
import json
import os
import statistics
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

from cloze.bench.http_client import Request, post
from cloze.bench.load import closed_loop
from cloze.bench.processes import RunningServer, free_port, running

STARTS, CLIENTS, SECONDS = 7, 8, 60.0
TEXT = " ".join(["The river carried the old boat past the town and the mill."] * 30)
REQUESTS = (
    ("/fill-mask", {"inputs": f"{TEXT} It is a [MASK].", "parameters": {"top_k": 50}}),
    ("/embed", {"inputs": [TEXT] * 8}),
    ("/qa", {"inputs": {"question": "What did the river carry?", "context": TEXT * 4}}),
    ("/nsp", {"inputs": [{"text": TEXT[:900], "next": TEXT[:900]}] * 4}),
)


def main() -> None:
    """Print the figures."""
    store = ["--model-store", sys.argv[1]] if len(sys.argv) > 1 else []
    # As after an installation: Python keeps what it compiles.
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    ready, cpu = [], []
    for _ in range(STARTS):
        url = f"http://127.0.0.1:{free_port()}"
        port = str(urlsplit(url).port)
        command = [sys.executable, "-m", "cloze", "serve", "--port", port, "--workers", "2", *store]
        with running(command, url, "/readyz", environment=kept) as server:
            ready.append(server.ready_s)
            cpu.append(server.cpu_s())
            time.sleep(1)
            at_rest, private = server.rss_mb(), private_mb(server)
            if len(ready) == STARTS:
                ask_each(server)
                used = server.rss_mb()
                largest, answers = asyncio.run(under_load(server))
    print("# The start and the memory of the server\n")
    print("    python bench/studies/start_and_memory.py\n")
    print("The default models with 2 workers per model, on 2 cores of an AMD EPYC.\n")
    print("| figure | value |\n|---|---|")
    print(f"| ready, median of {STARTS} starts | {statistics.median(ready):.2f} s |")
    print(f"| ready, the slowest start | {max(ready):.2f} s |")
    print(f"| processor time until it is ready, median | {statistics.median(cpu):.2f} s |")
    print(f"| memory at rest | {at_rest:.0f} MB, of which {private:.0f} MB are no mapped files |")
    print(f"| memory after one request to each task | {used:.0f} MB |")
    load = f"{CLIENTS} clients with long texts for {SECONDS:g} s"
    print(f"| largest memory, {load} | {largest:.0f} MB |")
    shown = ", ".join(f"{count:,} of status {status}" for status, count in sorted(answers.items()))
    print(f"\nAnswers: {shown}.")


def private_mb(server: RunningServer) -> float:
    """Return the resident memory of the first process that is no mapped file, in MB."""
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["RssAnon"].split()[0]) * 1024 / 1e6


def ask_each(server: RunningServer) -> None:
    """Send each request once, alone: a lone batch has a session of its own."""
    for path, body in REQUESTS:
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(server.url + path, data, headers)
        urllib.request.urlopen(request).read()


async def under_load(server: RunningServer) -> tuple[float, Counter[int]]:
    """Return the largest resident memory in MB while clients ask, and the number of each status."""
    requests = [Request(post(path, json.dumps(body).encode())) for path, body in REQUESTS]
    load = asyncio.create_task(closed_loop(server.url, requests, clients=CLIENTS, seconds=SECONDS))
    largest = 0.0
    while not load.done():
        largest = max(largest, server.rss_mb())
        await asyncio.sleep(0.05)
    return largest, load.result().statuses


if __name__ == "__main__":
    main()
