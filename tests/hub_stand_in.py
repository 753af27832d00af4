"""A hub on loopback: what the hub's client asks for, answered from a folder, with faults on demand.

A plugin: test modules that fetch name it in `pytest_plugins` and get the fixture `hub`.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import huggingface_hub.hf_api
import huggingface_hub.utils._http
import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BLOCK = 1 << 14


@dataclass
class Hub:
    """Serves the model "owner/model" from `folder`. `fault`: "gated", "unknown", or "cut", where the connection breaks
    in the middle of the largest file. `delay`: seconds before each block."""

    folder: Path
    cache: Path
    fault: str = ""
    delay: float = 0.0
    asked: list[str] = field(default_factory=list)

    @property
    def stored(self) -> list[Path]:
        """Files of the model that are whole in the cache."""
        return sorted(path for path in self.cache.glob("models--owner--model/snapshots/*/*") if path.exists())

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0].strip("/")
        self.asked.append(path)
        if self.fault in ("gated", "unknown"):
            code, name = (403, "GatedRepo") if self.fault == "gated" else (404, "RepoNotFound")
            return _send(request, code, b"{}", {"X-Error-Code": name})
        if path.startswith("api/models/owner/model/tree/"):
            return _send(request, 200, json.dumps([_entry(file) for file in self._files()]).encode())
        if path.startswith("api/models/owner/model"):
            siblings = [{"rfilename": file.name} for file in self._files()]
            about = {"id": "owner/model", "sha": COMMIT, "siblings": siblings, "private": False, "gated": False}
            return _send(request, 200, json.dumps(about).encode())
        file = self.folder / path.rpartition("/")[2]
        if not file.is_file():
            return _send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"})
        content = file.read_bytes()
        if wanted := request.headers.get("Range"):
            content = content[int(wanted.removeprefix("bytes=").partition("-")[0]) :]
        headers = {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        largest = file == max(self._files(), key=lambda one: one.stat().st_size)
        cut = len(content) // 2 if self.fault == "cut" and largest else len(content)
        return _send(request, 206 if wanted else 200, content, headers, cut, len(content), self.delay)

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.is_file())


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


def _entry(file: Path) -> dict[str, Any]:
    return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _etag(file)}


def _send(
    request: BaseHTTPRequestHandler,
    code: int,
    content: bytes,
    headers: dict[str, str] | None = None,
    cut: int | None = None,
    length: int | None = None,
    delay: float = 0.0,
) -> None:
    request.send_response(code)
    for name, value in {"Content-Length": str(len(content) if length is None else length), **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command == "HEAD":
        return
    for start in range(0, len(content[:cut]), BLOCK):
        time.sleep(delay)
        request.wfile.write(content[:cut][start : start + BLOCK])
    if cut is not None and cut < len(content):
        request.close_connection = True


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub that the client asks in this test, with an empty cache; its folder is to be filled."""
    made = Hub(tmp_path / "served", tmp_path / "cache")
    made.folder.mkdir()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            made.answer(self)

        def do_HEAD(self) -> None:
            made.answer(self)

        def log_message(self, *_words: object) -> None:
            """Nothing is printed."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_where: object) -> None:
            """A client that hangs up, as it should when told to stop."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(made.cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", BLOCK)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    at_once = SimpleNamespace(sleep=lambda _seconds: None)  # the client waits between its tries, up to 8 seconds
    monkeypatch.setattr(huggingface_hub.utils._http, "time", at_once)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    yield made
    server.shutdown()
    server.server_close()
