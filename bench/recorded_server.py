"""A server that answers as another one did: recorded streams, byte for byte, played back on loopback.

    python bench/recorded_server.py RECORDING [--port 8000] [--speed 1]

`bench/served.py record` makes recordings from a real server. What is asked for is looked up by path and prompt; the
other fields of a request are not looked at, so tests can ask with settings of their own. A key that was needed when the
recording was made is needed here too. `faults` make it fail as servers do: a fault belongs to a prompt, and says what
happens after how many lines of the stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import uvicorn

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True)
class Fault:
    """After `lines` lines of the stream: the line `line` in place of the next one, then the end ("end"), the connection
    broken off ("break"), or nothing more ("stall"). Without lines a `status` answers at once, `times` times."""

    lines: int = 0
    line: str | None = None
    then: Literal["end", "break", "stall", "go on"] = "end"
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    times: int = 1_000_000


class Recorded:
    """The ASGI application. `speed`: 1 is as it was, 2 twice that, 0 at once. Counts what was asked, how many streams
    are open, and how many were closed by the client before their end."""

    def __init__(self, recording: Mapping[str, Any], speed: float = 0.0, faults: Mapping[str, Fault] | None = None):
        self.answers = {_key(a["path"], a["body"]): a for a in recording["answers"]}
        self.needed = recording.get("key")
        self.speed, self.faults = speed, dict(faults or {})
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.heads: list[dict[str, str]] = []
        self.open = self.most_open = self.closed = 0
        self._failed: dict[str, int] = {}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        asked = json.loads(body) if body else {}
        head = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.asked.append((scope["path"], asked))
        self.heads.append(head)
        del self.asked[:-1000], self.heads[:-1000]
        if self.needed and scope["path"].startswith("/v1/") and head.get("authorization") != f"Bearer {self.needed}":
            await _answer(send, 401, '{"error":"Unauthorized"}')
            return
        answer = self.answers.get(_key(scope["path"], asked))
        if answer is None:
            known = [a for a in self.answers.values() if a["path"] == scope["path"] and "lines" in a]
            answer = known[0] if known else {"status": 404, "text": '{"detail":"Not Found"}'}
        if asked.get("model") not in (None, answer.get("body", {}).get("model")) and "lines" in answer:
            said = {"message": f"The model `{asked['model']}` does not exist.", "code": 404}
            await _answer(send, 404, json.dumps({"error": said}))
        elif "lines" in answer:
            await self._stream(answer, _prompt(asked), receive, send)
        else:
            await _answer(send, answer["status"], answer["text"])

    async def _stream(self, answer: Mapping[str, Any], prompt: str, receive: Receive, send: Send) -> None:
        fault = self.faults.get(prompt)
        if fault and fault.status and self._failed.get(prompt, 0) < fault.times:
            self._failed[prompt] = self._failed.get(prompt, 0) + 1
            await _answer(send, fault.status, fault.line or "", fault.headers)
            return
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        gone = asyncio.ensure_future(receive())  # its answer is that the client has gone
        began = time.perf_counter()
        try:
            head = [(b"content-type", answer["type"].encode())]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            for number, (t, line) in enumerate(answer["lines"]):
                if self.speed:
                    due = began + t / self.speed - time.perf_counter()
                    if due > 0:
                        await asyncio.wait([gone], timeout=due)
                if gone.done():
                    self.closed += 1
                    return
                if fault and not fault.status and number == fault.lines:
                    if fault.line is not None:
                        await send({"type": "http.response.body", "body": _block(fault.line), "more_body": True})
                    if fault.then == "stall":
                        await gone
                        self.closed += 1
                        return
                    if fault.then == "break":
                        raise ConnectionAbortedError  # uvicorn closes the connection in the middle of the answer
                    if fault.then == "end":
                        break
                    continue
                await send({"type": "http.response.body", "body": _block(line), "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.open -= 1
            gone.cancel()


def _block(line: str) -> bytes:
    return f"{line}\n\n".encode()


async def _answer(send: Send, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
    head = {"content-type": "application/json", **(headers or {})}
    pairs = [(name.encode(), value.encode()) for name, value in head.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": text.encode()})


def _key(path: str, body: Mapping[str, Any]) -> tuple[str, str]:
    return path, _prompt(body)


def _prompt(body: Mapping[str, Any]) -> str:
    messages = body.get("messages")
    return str(messages[-1]["content"] if messages else body.get("prompt", ""))


def read(path: Path) -> dict[str, Any]:
    recording: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return recording


@contextmanager
def running(app: Recorded, port: int = 0) -> Iterator[str]:
    """Its address while it runs, in a thread of its own."""
    config = uvicorn.Config(app, "127.0.0.1", port, log_level="critical", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise OSError(f"Port {port} cannot be used.")
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recording", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--speed", type=float, default=1.0)
    options = parser.parse_args()
    with running(Recorded(read(options.recording), options.speed), options.port) as url:
        print(url, flush=True)
        threading.Event().wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
