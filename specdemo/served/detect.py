"""Which engine answers, which models it has, and how long a trivial request takes.

Only the server's own address is asked. vLLM tells its version, SGLang its arguments, llama.cpp's server its properties;
the list of models tells the rest. (The last two by their documentation: not tried here.)
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from .address import Server
from .faults import malformed, quoted, refused, unreachable, wrong_model
from .wire import TITLES, Engine

ROUND_TRIPS = 3

ANSWER_S = 10.0
"""How long a question that needs no work may take."""


@dataclass(frozen=True, slots=True)
class Found:
    """A server that answers. `context_length` is None where it does not tell; `spells`: whether it tells how tokens are
    written; `round_trip_s`: the shortest of a few requests that need no work, on an open connection."""

    engine: Engine
    version: str
    model: str
    context_length: int | None
    round_trip_s: float

    @property
    def title(self) -> str:
        return f"{TITLES[self.engine]} {self.version}".rstrip()

    @property
    def spells(self) -> bool:
        return self.engine == "vllm"


async def find(client: httpx.AsyncClient, server: Server) -> Found:
    """Ask a server what it is. Raises ServerFault."""
    listed = await _get(client, server, "/v1/models")
    if listed.status_code != 200:
        raise refused(server, listed.status_code, listed.text, listed.headers.get("retry-after"))
    models = _models(server, listed)
    names = [str(model["id"]) for model in models]
    name = server.model or (names[0] if names else "")
    if name not in names:
        raise wrong_model(server, names)
    model = models[names.index(name)]
    engine, version = await _engine(client, server, model, listed)
    context_length = model.get("max_model_len")
    return Found(
        engine=engine,
        version=quoted(server, version)[:40],
        model=name,
        context_length=context_length if isinstance(context_length, int) else None,
        round_trip_s=await round_trip(client, server),
    )


async def round_trip(client: httpx.AsyncClient, server: Server) -> float:
    """Seconds. Raises ServerFault."""
    seconds = []
    for _ in range(ROUND_TRIPS):
        began = time.perf_counter()
        await _get(client, server, "/health")
        seconds.append(time.perf_counter() - began)
    return min(seconds)


async def _engine(
    client: httpx.AsyncClient, server: Server, model: dict[str, Any], listed: httpx.Response
) -> tuple[Engine, str]:
    owner = str(model.get("owned_by", "")).lower()
    if owner == "vllm":
        return "vllm", _told(await _get(client, server, "/version"), "version")
    if owner == "sglang":
        return "sglang", _told(await _get(client, server, "/get_server_info"), "version")
    if owner in ("llamacpp", "llama.cpp") or "llama.cpp" in listed.headers.get("server", "").lower():
        return "llama.cpp", _told(await _get(client, server, "/props"), "build_info")
    return "other", ""


def _models(server: Server, answer: httpx.Response) -> list[dict[str, Any]]:
    try:
        models = answer.json()["data"]
        if all(isinstance(model["id"], str) for model in models):
            return list(models)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise malformed(server, "a list of models that is none")


def _told(answer: httpx.Response, name: str) -> str:
    """A field of an answer; empty where there is none."""
    try:
        return str(json.loads(answer.text)[name]) if answer.status_code == 200 else ""
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


async def _get(client: httpx.AsyncClient, server: Server, path: str) -> httpx.Response:
    try:
        return await client.get(server.url + path, headers=server.key.headers(), timeout=ANSWER_S)
    except httpx.HTTPError:
        raise unreachable(server) from None
