"""A hub of one repository on loopback, with the routes that huggingface_hub uses."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

from tests.support.loopback import Handler, serving, url_of

COMMIT = "86b5e0934494bd15c9632b12f734a8a67f723594"


class FakeHub(ThreadingHTTPServer):
    """Serves one repository, ``tiny/bert``, at one commit, also named ``main`` and ``v1``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {file.name: file.read_bytes() for file in folder.iterdir()}
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return url_of(self)


class _Handler(Handler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        path = self.path.split("?")[0]
        for revision in ("main", "v1", COMMIT):
            if path == f"/api/models/tiny/bert/revision/{revision}" or (
                path == "/api/models/tiny/bert" and revision == "main"
            ):
                files = [{"rfilename": name} for name in self.server.files]
                return self._answer(
                    200, json.dumps({"id": "tiny/bert", "sha": COMMIT, "siblings": files}).encode()
                )
            if path.startswith(f"/api/models/tiny/bert/tree/{revision}"):
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                    for name, data in self.server.files.items()
                ]
                return self._answer(200, json.dumps(tree).encode())
            if (name := path.removeprefix(f"/tiny/bert/resolve/{revision}/")) in self.server.files:
                data = self.server.files[name]
                return self._answer(200, data, etag=hashlib.sha256(data).hexdigest())
        missing = "RevisionNotFound" if "/tiny/bert" in path else "RepoNotFound"
        return self._answer(404, b'{"error": "not found"}', x_error_code=missing)

    def _answer(self, status: int, data: bytes, etag: str = "x", **headers: str) -> None:
        known = {"content_type": "application/json", "etag": f'"{etag}"', "x_repo_commit": COMMIT}
        self.answer(status, data, **known, **headers)


@contextmanager
def running_hub(checkpoint: Path) -> Iterator[FakeHub]:
    """Serve a checkpoint and files that must not be downloaded."""
    with serving(FakeHub(checkpoint)) as hub:
        hub.files["README.md"] = b"---\nlicense: apache-2.0\n---\n"
        hub.files["pytorch_model.bin"] = b"must not be downloaded: there is a safer form"
        hub.files["tf_model.h5"] = b"neither"
        hub.files["adapter_model.safetensors"] = b"nor this"
        yield hub
