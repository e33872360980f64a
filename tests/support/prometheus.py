"""A real Prometheus that scrapes servers, with the configuration that the project ships."""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from tests.support.ports import free_port
from tests.support.waiting import wait_until

MONITORING = Path(__file__).parents[2] / "monitoring"


_FAST = {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "1s"}


@contextmanager
def running_prometheus(folder: Path, targets: Sequence[str], key: str = "") -> Iterator[str]:
    """Run Prometheus with the shipped configuration, but other targets and a shorter interval.

    The targets are URLs of servers, all with TLS or none. Servers without keys need the key "".
    """
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    (folder / "metrics-key").write_text(key)
    for job in config["scrape_configs"]:
        scheme = urlsplit(targets[0]).scheme
        # As the comment in the file says.
        job |= {"scheme": scheme, "tls_config": {"insecure_skip_verify": True}}
        job["static_configs"] = [{"targets": [urlsplit(url).netloc for url in targets]}]
    with running_with(folder, config) as url:
        yield url


@contextmanager
def running_with(folder: Path, config: dict[str, Any]) -> Iterator[str]:
    """Run Prometheus with a configuration, but the shipped rules, and a shorter interval.

    Returns:
        The URL of Prometheus.
    """
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian's package prometheus)")
    config = config | {"global": _FAST, "rule_files": [str(MONITORING / "rules.yml")]}
    for job in config["scrape_configs"]:
        for name in ("scrape_interval", "scrape_timeout"):
            job.pop(name, None)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    files = (f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data")
    options = (f"--web.listen-address={address}", "--enable-feature=exemplar-storage")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(["prometheus", *files, *options], **quiet)
    try:
        wait_until(lambda: _is_ready(address), longest_s=30)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(10)


def _is_ready(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def query(url: str, expression: str) -> list[Any]:
    """Return the result of a query."""
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", (expression, answer.get("error"))
    result: list[Any] = answer["data"]["result"]
    return result
