"""Measures what equal texts cost a server: questions by Zipf's law, with and without a cache.

Usage: equal_texts.py DATA BEFORE OUT, where DATA holds the folder `qa` of questions and BEFORE is a
checkout of the version to compare with. The server and this program share the cores.
"""

import asyncio
import json
import lzma
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np

DATA, BEFORE, OUT = (Path(argument) for argument in sys.argv[1:4])
HERE = Path(__file__).resolve().parents[2]
TEXTS, SECONDS, WARM = 100_000, 6.0, 50_000


def questions() -> list[str]:
    """Return distinct questions; beyond the real ones, each is made of the halves of two."""
    found: dict[str, None] = {}
    for file in sorted((DATA / "qa").glob("*.xz")):
        for article in json.loads(lzma.decompress(file.read_bytes()))["data"]:
            for paragraph in article["paragraphs"]:
                for each in paragraph["qas"]:
                    found[each["question"].strip()] = None
    real, rng = [*found], np.random.default_rng(1)
    while len(found) < TEXTS:
        first, second = (real[i].split() for i in rng.integers(len(real), size=2))
        found[" ".join(first[: len(first) // 2] + second[len(second) // 2 :])] = None
    chosen = [*found]
    rng.shuffle(chosen)
    return chosen


def draws(exponent: float, count: int, seed: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    weights = 1 / np.arange(1, TEXTS + 1) ** exponent
    return np.random.default_rng(seed).choice(TEXTS, count, p=weights / weights.sum())


class Server:
    def __init__(self, root: Path, cache_mb: int | None, port: int = 8123) -> None:
        paths = os.pathsep.join(str(root / part) for part in ("", "service", "model_store"))
        environment = os.environ | {"PYTHONPATH": paths, "CLOZE_ACCESS_LOG_SHARE": "0"}
        if cache_mb is not None:
            environment["CLOZE_CACHE_MB"] = str(cache_mb)
        words = [sys.executable, "-P", "-m", "cloze", "serve", "--port", str(port)]
        words += ["--model", "cloze-bert", "--model-store", str(HERE / "model_store/bundles")]
        self.port = port
        self.process = subprocess.Popen(words, env=environment, cwd="/", stderr=subprocess.DEVNULL)
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz")
                return
            except OSError:
                time.sleep(0.1)
        raise SystemExit("the server did not start")

    def count(self, name: str) -> float:
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics").read().decode()
        found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def memory_mb(self) -> float:
        return self.count("process_resident_memory_bytes") / 1e6

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


async def ask(port: int, inputs, until: float, times: list[float]) -> None:
    """Ask one after another on one connection, until a time or the end of the inputs."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for one in inputs:
        if time.perf_counter() > until:
            break
        body = json.dumps({"inputs": one}).encode()
        began = time.perf_counter()
        writer.write(
            b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        await reader.readexactly(int(length[1]))
        times.append(time.perf_counter() - began)
    writer.close()


def load(port: int, texts: list[str], connections: int, seconds: float) -> list[float]:
    times: list[float] = []

    async def run() -> None:
        inputs, until = iter(texts), time.perf_counter() + seconds
        await asyncio.gather(*(ask(port, inputs, until, times) for _ in range(connections)))

    asyncio.run(run())
    return times


def cell(all_texts: list[str], version: str, cache_mb: int | None, exponent: float | None) -> dict:
    server = Server(BEFORE if version == "before" else HERE, cache_mb)
    try:
        load(server.port, [f"warm up {i}" for i in range(1500)], 32, 1.5)
        if exponent is None:
            order, start = [*range(TEXTS)], 0
            np.random.default_rng(int(time.time())).shuffle(order)
        else:
            order = draws(exponent, WARM + 60_000, 2)
            start = 0
            if cache_mb:
                lists = [[all_texts[i] for i in order[a : a + 64]] for a in range(0, WARM, 64)]
                load(server.port, lists, 3, 60.0)
                start = WARM
        texts = [all_texts[i] for i in order[start : start + 60_000]]
        before = [server.count(f"cloze_{n}_total") for n in NAMES]
        times = load(server.port, texts, 32, SECONDS)
        hits, misses, shared = (
            server.count(f"cloze_{n}_total") - b for n, b in zip(NAMES, before, strict=True)
        )
        lone = load(server.port, texts[len(times) :], 1, 3.0) if exponent is None else times
        row = {
            "version": version, "cache_mb": cache_mb, "exponent": exponent,
            "per_s": round(len(times) / SECONDS, 1), "p50_ms": round(np.median(times) * 1e3, 1),
            "p99_ms": round(float(np.quantile(times, 0.99)) * 1e3, 1),
            "hit": round(hits / max(1, len(times)), 3), "shared": round(shared / len(times), 3),
            "lone_p50_ms": round(np.median(lone) * 1e3, 2),
            "cache_bytes_mb": round(server.count("cloze_cache_bytes") / 2**20, 1),
            "evictions": server.count("cloze_cache_evictions_total"),
            "memory_mb": round(server.memory_mb()),
        }
    finally:
        server.close()
    print(json.dumps(row), flush=True)
    with OUT.open("a") as out:
        out.write(json.dumps(row) + "\n")
    return row


NAMES = ("cache_hits", "cache_misses", "shared_sequences")

if __name__ == "__main__":
    universe = questions()
    print(sum(map(len, map(str.split, universe))) / TEXTS, "words", flush=True)
    for turn in range(3):
        for version, cache in (("before", None), ("after", 0), ("after", 64))[:: (-1) ** turn]:
            cell(universe, version, cache, None)
    for exponent in (1.0, 1.1):
        for version, cache in (("before", None), *(("after", mb) for mb in (0, 16, 64, 256))):
            cell(universe, version, cache, exponent)
