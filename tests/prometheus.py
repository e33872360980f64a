"""A real Prometheus that scrapes servers, with the configuration that the project ships."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

MONITORING = Path(__file__).parents[1] / "monitoring"


@contextmanager
def running_prometheus(folder: Path, targets: Sequence[str]) -> Iterator[str]:
    """Run Prometheus with other targets and a shorter interval; return its URL."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian's package prometheus)")
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {
        "scrape_interval": "200ms",
        "scrape_timeout": "200ms",
        "evaluation_interval": "1s",
    }
    config["rule_files"] = [str(MONITORING / name) for name in config["rule_files"]]
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [url.removeprefix("http://") for url in targets]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
            "--enable-feature=exemplar-storage",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"http://{address}/-/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        else:
            pytest.fail("Prometheus did not start")
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(10)


def query(url: str, expression: str) -> list[Any]:
    """Return the result of a query."""
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", (expression, answer.get("error"))
    result: list[Any] = answer["data"]["result"]
    return result
