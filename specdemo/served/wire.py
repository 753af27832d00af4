"""What is asked of a server, and how its stream is read: OpenAI's protocol and what each engine adds to it.

vLLM gives the ids of each chunk for `return_token_ids`, and a server that was started with
`--per-request-spec-decode-metrics` tells at the end how its drafts fared (seen in vLLM 0.32). llama.cpp's server tells
in `timings` how many tokens were drafted and accepted, and takes a draft length with each request (from its
documentation; not tried here).
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ..settings import Settings
from .address import Server
from .faults import failed_midway, malformed

Engine: TypeAlias = Literal["vllm", "sglang", "llama.cpp", "other"]

TITLES: Mapping[Engine, str] = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp", "other": "a server"}

LONGEST_LINE = 1 << 20
"""Bytes of one line of a stream; a prompt's ids come in one."""

MOST_IDS = 1 << 20


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a request's drafts fared, by its server. Steps without a draft are not among `accepted` and `drafted`, which
    are None where the server counts only."""

    steps: int
    num_drafted: int
    num_accepted: int
    accepted: tuple[int, ...] | None = None
    drafted: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a stream. `ids` is None where the server tells none; `total` is its own count of the output's
    tokens; `stopped_by`: the stop string that ended the answer."""

    text: str = ""
    ids: tuple[int, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    finish: str | None = None
    stopped_by: str | None = None
    total: int | None = None
    speculation: Speculation | None = None
    server_s: tuple[float, float] | None = None  # to the first token and from there to the last, by its own clock


def path_of(raw: bool) -> str:
    return "/v1/completions" if raw else "/v1/chat/completions"


def body_of(engine: Engine, lane: str, model: str, prompt: str, settings: Settings, raw: bool) -> dict[str, Any]:
    """The request. Every sampling setting is sent, since servers have other defaults than ours."""
    body: dict[str, Any] = {
        "model": model,
        **({"prompt": prompt} if raw else {"messages": [{"role": "user", "content": prompt}]}),
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "seed": settings.seed,
    }
    if settings.stop:
        body["stop"] = list(settings.stop)
    if engine in ("vllm", "sglang"):
        body |= {"top_k": settings.top_k or -1, "min_p": settings.min_p}
        body |= {"repetition_penalty": settings.repetition_penalty, "ignore_eos": settings.ignore_eos}
    if engine == "vllm":
        body["return_token_ids"] = True
    if engine == "llama.cpp":
        body |= {"top_k": settings.top_k, "min_p": settings.min_p, "repeat_penalty": settings.repetition_penalty}
        body |= {"ignore_eos": settings.ignore_eos, "return_tokens": True}
        body["speculative.n_max"] = settings.draft_length if lane == "speculative" else 0
        body["speculative.n_min"] = 0
    return body


def not_sent(engine: Engine, settings: Settings) -> str:
    """A sentence about settings that this server is not sent; empty where it is sent all."""
    usual = Settings()
    names = {"top_k": "top-k", "min_p": "min-p", "repetition_penalty": "repetition penalty", "ignore_eos": "ignore-eos"}
    changed = [title for name, title in names.items() if getattr(settings, name) != getattr(usual, name)]
    if engine != "other" or not changed:
        return ""
    return f"Not sent to this server, which is of a kind not known here: {', '.join(changed)}."


async def chunks(server: Server, stream: AsyncIterator[bytes]) -> AsyncGenerator[Chunk, None]:
    """The chunks of an event stream, up to its `[DONE]`. Raises ServerFault."""
    async for line in _lines(server, stream):
        if not line.startswith(b"data:"):
            continue  # comments that keep the connection alive, names and ids of events
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield chunk_of(server, data)


async def _lines(server: Server, stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines ended by LF alone: a text's own separators, such as U+2028, may stand unescaped in JSON."""
    rest = b""
    async for block in stream:
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")
        if len(rest) > LONGEST_LINE:
            raise malformed(server, "a line without an end")
    if rest.strip():
        yield rest


def chunk_of(server: Server, data: bytes) -> Chunk:
    """Raises ServerFault for what is no chunk, and for an error in its place."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        raise malformed(server, "a chunk that is no JSON") from None
    if not isinstance(record, dict):
        raise malformed(server, "a chunk that is no object")
    if record.get("error"):
        raise failed_midway(server, record["error"])
    try:
        return _chunk(record)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise malformed(server, f"a chunk with {error}") from None


def _chunk(record: Mapping[str, Any]) -> Chunk:
    usage, choices = record.get("usage") or {}, record.get("choices") or []
    timings = record.get("timings") or {}
    total = usage.get("completion_tokens") if usage else timings.get("predicted_n")
    choice = choices[0] if choices else {}
    delta = choice.get("delta") or {}
    texts = [delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content"), choice.get("text")]
    ids = choice.get("token_ids", choice.get("tokens", record.get("tokens")))
    prompt_ids = record.get("prompt_token_ids") or choice.get("prompt_token_ids")
    stopped_by = choice.get("stop_reason") or record.get("stopping_word")
    finish = choice.get("finish_reason")
    return Chunk(
        text="".join(_text(text) for text in texts if text is not None),
        ids=None if ids is None else _ids(ids),
        prompt_ids=None if prompt_ids is None else _ids(prompt_ids),
        finish=None if finish is None else _text(finish),
        stopped_by=stopped_by if isinstance(stopped_by, str) and stopped_by else None,
        total=None if total is None else _count(total),
        speculation=_speculation(record, timings),
        server_s=_server_s(record, timings),
    )


def _speculation(record: Mapping[str, Any], timings: Mapping[str, Any]) -> Speculation | None:
    told = (record.get("metrics") or {}).get("speculative_decoding")
    if told:
        accepted, drafted = told.get("per_step_accepted"), told.get("per_step_drafted")
        return Speculation(
            steps=_count(told["num_spec_steps"]),
            num_drafted=_count(told["num_draft_tokens"]),
            num_accepted=_count(told["num_accepted_draft_tokens"]),
            accepted=None if accepted is None else tuple(map(_count, accepted)),
            drafted=None if drafted is None else tuple(map(_count, drafted)),
        )
    if "draft_n" in timings:
        return Speculation(0, _count(timings["draft_n"]), _count(timings.get("draft_n_accepted", 0)))
    return None


def _server_s(record: Mapping[str, Any], timings: Mapping[str, Any]) -> tuple[float, float] | None:
    metrics = record.get("metrics") or {}
    pairs = (
        (metrics.get("time_to_first_token_ms"), metrics.get("generation_time_ms")),
        (timings.get("prompt_ms"), timings.get("predicted_ms")),
    )
    for first, rest in pairs:
        if isinstance(first, int | float) and isinstance(rest, int | float):
            return first / 1000, rest / 1000
    return None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a text that is none")
    return value.encode("utf-8", "replace").decode()  # half a character cannot be sent on


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MOST_IDS:
        raise TypeError("ids that are no list")
    return tuple(map(_count, value))


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise TypeError("a count that is none")
    return value
