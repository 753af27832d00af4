"""One lane: a stream from a server as events, timed at the client.

Tokens are events as they arrive. When the answer is over and the server has told how its drafts fared, the lane is told
again, round by round, each at the time at which it had arrived. Times begin when the request is sent; what happens
after the last chunk (asking how tokens are spelled) is not in them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import asdict, dataclass

import httpx

from ..errors import SpecdemoError
from ..events import (
    UNTOLD,
    Arrived,
    Committed,
    Counted,
    Drafted,
    DraftedToken,
    Event,
    ExtraKind,
    Failed,
    Fate,
    Finished,
    FinishReason,
    JudgedToken,
    Prefilled,
    Retold,
    Started,
    Verified,
)
from ..settings import Settings
from .address import Server
from .detect import Found, round_trip
from .faults import ServerFault, broken_off, malformed, refused, stalled, unreachable
from .rounds import Step, Unfit, rebuilt
from .texts import Disagreement, token_texts
from .wire import Chunk, Speculation, body_of, chunks, not_sent, path_of

TRIES = 3
"""Times that a request is sent while no token has come."""

LONGEST_BODY = 20_000

NO_METRICS = (
    "This server does not tell how its drafts fared (vLLM does when started with --per-request-spec-decode-metrics "
    "detailed): pieces are shown as they arrived."
)
STOPPED = (
    "An answer that a stop string ends comes without a word on its drafts, since vLLM's engine does not see the stop: "
    "pieces are shown as they arrived."
)
TOTALS_ONLY = "This server tells how its drafts fared in total, not round by round: pieces are shown as they arrived."
BOTH_DRAFT = "The standard server drafts too: start it without speculation, or the comparison says little."
UNFIT = "What the server tells of its drafts does not fit its answer ({why}): pieces are shown as they arrived."
GHOSTS = "Refused guesses are counted by the server and not spelled out: each is shown as □."
SOME_PLACES = (
    "In rounds that wrote one token, the server does not tell which had a refused draft: those are placed as late as "
    "they fit. What was accepted, and all counts, are exact."
)
NO_SPELLING = "The server does not tell how these tokens are spelled: the text of a piece stands at its last token."
NO_IDS = "This server tells no token ids: tokens are counted when the answer is over."
WRONG_IDS = "The token ids that the server sent are not those of its text: they are not used."


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds to wait: for a connection, for the first token, between two chunks, before the first repetition of a
    request (twice as long before the next), and at most for a server that says how long."""

    connect_s: float = 5.0
    first_s: float = 120.0
    stall_s: float = 30.0
    again_s: float = 0.5
    longest_again_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What a lane is asked for."""

    prompt: str
    settings: Settings
    raw: bool


class Lane:
    """One request to one server. `emit` takes the events; `run` never raises, a fault is the lane's last event."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        server: Server,
        found: Found,
        asked: Asked,
        emit: Callable[[Event], None],
        patience: Patience,
    ) -> None:
        self._client, self._server, self._found, self._asked = client, server, found, asked
        self._emit_event, self._patience = emit, patience
        self._began = time.perf_counter()
        self._t = 0.0
        self._started = False
        self._notes: list[str] = []
        self._network_s: float | None = None
        self._arrived: list[Arrived] = []
        self._sent_ids = True  # every chunk with text so far came with its ids
        self._last = Chunk()  # what the chunks told besides text, the latest of each
        self._finish: FinishReason | None = None
        self.lost = False  # the server was not there, or was another one

    async def run(self) -> None:
        try:
            await self._decode()
        except asyncio.CancelledError:
            self._ended("cancelled")
        except Exception as error:
            self.lost = not self._arrived
            self._start(())
            self._emit_event(Failed(self._server.lane, self._t, _sentence(error)))

    # -- the stream ----------------------------------------------------------------------------------------------------

    async def _decode(self) -> None:
        self._network_s = await round_trip(self._client, self._server)
        for number in range(1, TRIES + 1):
            try:
                await self._attempt()
                break
            except ServerFault as fault:
                if self._arrived or not fault.passing or number == TRIES:
                    raise
                wait = self._patience.again_s * 2 ** (number - 1)
                await asyncio.sleep(min(max(wait, fault.wait_s or 0.0), self._patience.longest_again_s))
        if self._finish is None:
            raise broken_off(self._server)
        await self._tell_again()

    async def _attempt(self) -> None:
        server, asked = self._server, self._asked
        body = body_of(self._found.engine, server.lane, self._found.model, asked.prompt, asked.settings, asked.raw)
        self._began, self._t = time.perf_counter(), 0.0
        request = self._client.build_request(
            "POST", server.url + path_of(asked.raw), json=body, headers=server.key.headers()
        )
        try:
            response = await asyncio.wait_for(self._client.send(request, stream=True), self._patience.first_s)
        except (asyncio.TimeoutError, httpx.TimeoutException):
            raise stalled(server, self._patience.first_s, began=False) from None
        except httpx.HTTPError:
            raise unreachable(server) from None
        try:
            if response.status_code != 200:
                told = (await response.aread())[:LONGEST_BODY].decode("utf-8", "replace")
                raise refused(server, response.status_code, told, response.headers.get("retry-after"))
            await self._read(response)
        except httpx.HTTPError:
            if self._finish is None:  # else the answer is whole, and only what follows it is missing
                raise broken_off(server) from None
        finally:
            await response.aclose()

    async def _read(self, response: httpx.Response) -> None:
        async with aclosing(
            _with_patience(self._server, response, self._patience, lambda: bool(self._arrived))
        ) as read:
            async for chunk in read:
                self._take(chunk)

    def _take(self, chunk: Chunk) -> None:
        now = time.perf_counter() - self._began
        last = self._last
        self._last = Chunk(
            prompt_ids=chunk.prompt_ids or last.prompt_ids,
            finish=chunk.finish or last.finish,
            stopped_by=chunk.stopped_by or last.stopped_by,
            total=last.total if chunk.total is None else chunk.total,
            speculation=chunk.speculation or last.speculation,
            server_s=chunk.server_s or last.server_s,
        )
        if chunk.text or chunk.ids:
            self._start(self._last.prompt_ids or ())
            self._sent_ids = self._sent_ids and chunk.ids is not None
            self._t = now
            self._arrived.append(Arrived(self._server.lane, now, chunk.ids or (), chunk.text))
            self._emit_event(self._arrived[-1])
        if chunk.finish is not None:
            self._finish = _reason(self._server, self._last)

    def _start(self, prompt_ids: tuple[int, ...]) -> None:
        if self._started:
            return
        self._started = True
        asked, found = self._asked, self._found
        notes = [note for note in (not_sent(found.engine, asked.settings),) if note]
        self._emit_event(
            Started(
                lane=self._server.lane,
                t=0.0,
                method="standard" if self._server.lane == "standard" else "served",
                target=found.model,
                target_precision="",
                forward_path=found.title,
                device=self._server.host,
                settings=asdict(asked.settings),
                prompt_ids=prompt_ids,
                notes=tuple(notes),
                clock="client",
                network_s=self._network_s,
            )
        )

    # -- the end -------------------------------------------------------------------------------------------------------

    @property
    def _text(self) -> str:
        return "".join(piece.text for piece in self._arrived)

    @property
    def _ids(self) -> tuple[int, ...]:
        return tuple(id for piece in self._arrived for id in piece.tokens)

    def _ended(self, reason: FinishReason) -> None:
        self._start(self._last.prompt_ids or ())
        ids = self._ids
        if not self._sent_ids:
            total = self._last.total
            ids = (UNTOLD,) * (len(ids) if total is None else total)
        self._emit_event(Finished(self._server.lane, self._t, reason, ids, self._text, notes=tuple(self._notes)))

    async def _tell_again(self) -> None:
        """All that is known when the stream is over."""
        assert self._finish is not None
        self._start(self._last.prompt_ids or ())
        if not self._sent_ids:
            self._notes.append(NO_IDS)
            self._give_up_ids()
        spelled = await self._spelled()
        if self._server.lane == "standard":
            self._tell_standard(spelled)
        else:
            self._tell_speculative(spelled)
        if self._last.server_s is not None:
            first, rest = self._last.server_s
            whole = first + rest
            self._notes.append(
                f"By the server's own clock: {1000 * first:.0f} ms to the first token, {whole:.2f} s to the last."
            )
        self._ended(self._finish)

    def _tell_standard(self, spelled: list[str] | None) -> None:
        told = self._last.speculation
        if told is not None and told.num_drafted:
            self._notes.append(BOTH_DRAFT)
        elif self._sent_ids and all(len(piece.tokens) < 2 for piece in self._arrived):
            self._by_rounds(Speculation(0, 0, 0), spelled)  # one pass of the model for each token

    def _tell_speculative(self, spelled: list[str] | None) -> None:
        told = self._last.speculation
        if told is None:
            self._notes.append(STOPPED if self._finish == "stop" else NO_METRICS)
        elif told.accepted is not None or not (told.steps or told.num_drafted):
            if self._sent_ids:
                self._by_rounds(told, spelled)
        elif told.num_accepted <= told.num_drafted:
            self._notes.append(TOTALS_ONLY)
            self._emit_event(Counted(self._server.lane, self._t, told.num_drafted, told.num_accepted))
        else:
            self._notes.append(UNFIT.format(why="it accepted more tokens than it drafted"))

    async def _spelled(self) -> list[str] | None:
        """The text of each token, where the server tells it; ids that are not the text's are given up."""
        ids, text, total = self._ids, self._text, self._last.total
        if not self._sent_ids or not self._found.spells:
            return None
        try:
            if total is not None and total != len(ids):
                raise Disagreement
            return token_texts(ids, text, await self._spellings(text)) if text else [""] * len(ids)
        except Disagreement:
            self._notes.append(WRONG_IDS)
            self._give_up_ids()
            return None

    def _give_up_ids(self) -> None:
        """Tell the lane again without those that came."""
        self._sent_ids = False
        if self._ids:
            self._emit_event(Retold(self._server.lane, self._t))
            for piece in self._arrived:
                self._emit_event(Arrived(piece.lane, piece.t, (), piece.text))

    async def _spellings(self, text: str) -> dict[int, str]:
        """How the tokens of a text are written in the vocabulary; empty where the server does not tell."""
        body = {
            "model": self._found.model,
            "prompt": text,
            "add_special_tokens": False,
            "return_token_strs": True,
        }
        try:
            answer = await asyncio.wait_for(
                self._client.post(self._server.url + "/tokenize", json=body, headers=self._server.key.headers()),
                self._patience.stall_s,
            )
            told = json.loads(answer.text) if answer.status_code == 200 else {}
            pairs = zip(told["tokens"], told["token_strs"], strict=True)
            return {id: word for id, word in pairs if isinstance(id, int) and isinstance(word, str)}
        except (httpx.HTTPError, asyncio.TimeoutError, ValueError, KeyError, TypeError, RecursionError):
            return {}

    def _by_rounds(self, told: Speculation, spelled: list[str] | None) -> None:
        pieces = [piece for piece in self._arrived if piece.tokens]
        try:
            steps, exact = rebuilt([len(piece.tokens) for piece in pieces], told)
        except Unfit as fault:
            self._notes.append(UNFIT.format(why=fault))
            return
        if not pieces:
            return
        if spelled is None:
            spelled = [text for piece in self._arrived for text in _at_the_last(piece)]
            if any(len(piece.tokens) > 1 for piece in pieces):
                self._notes.append(NO_SPELLING)
        if any(step.drafted > step.kept for step in steps):
            self._notes.append(GHOSTS)
        if not exact:
            self._notes.append(SOME_PLACES)
        self._emit_event(Retold(self._server.lane, self._t, exact))
        for event in _retold(self._server.lane, [piece.t for piece in pieces], self._ids, spelled, steps):
            self._emit_event(event)


def _at_the_last(piece: Arrived) -> list[str]:
    """A piece's text at its last token. One without ids has no token to stand at: its text is lost to the rounds, and
    comes back with the whole at the end."""
    return [""] * (len(piece.tokens) - 1) + [piece.text] if piece.tokens else []


def _retold(
    lane: str, times: list[float], ids: tuple[int, ...], texts: list[str], steps: list[Step]
) -> Iterator[Event]:
    """The rounds as events. Phases have no times of their own, and nothing is known of p and q."""
    yield Prefilled(lane, times[0], 0.0, 0.0, Committed(ids[0], texts[0], None))
    for number, step in enumerate(steps, start=1):
        t = times[step.chunk]
        fates = _fates(step)
        known = [(ids[at], texts[at]) for at in range(step.begin, step.begin + step.kept)]
        known += [(UNTOLD, "")] * (step.drafted - step.kept)
        drafted = tuple(DraftedToken(id, text, None) for id, text in known)
        judged = tuple(
            JudgedToken(id, text, fate, None, None, None, None, None)
            for (id, text), fate in zip(known, fates, strict=True)
        )
        extra = Committed(ids[step.end - 1], texts[step.end - 1], None) if step.extra else None
        kind: ExtraKind = "recovered" if "rejected" in fates else "bonus"
        yield Drafted(lane, t, number, drafted, 0.0, "server" if drafted else "none")
        yield Verified(lane, t, number, 0.0, 0.0, judged, step.kept, extra, kind if extra else None)


def _fates(step: Step) -> list[Fate]:
    """What became of a step's drafts. In the step in which the answer ended, what came after its end counts nowhere."""
    refused = step.drafted - step.kept
    fates: list[Fate] = ["accepted"] * step.kept
    if not step.extra:
        fates += ["clipped"] * refused
    elif refused:
        fates += ["rejected"]
        fates += ["discarded"] * (refused - 1)
    return fates


def _reason(server: Server, told: Chunk) -> FinishReason:
    """A server's word for the end as ours; vLLM and llama.cpp tell the stop string that was met."""
    if told.finish == "length":
        return "length"
    if told.finish in ("abort", "error"):
        raise broken_off(server)
    return "stop" if told.stopped_by else "eos"


async def _with_patience(
    server: Server, response: httpx.Response, patience: Patience, began: Callable[[], bool]
) -> AsyncGenerator[Chunk, None]:
    """The chunks of an answer, none of them awaited for ever."""
    media = response.headers.get("content-type", "")
    if "text/event-stream" not in media:
        raise malformed(server, "an answer that is no stream")
    async with aclosing(chunks(server, response.aiter_bytes())) as read:
        while True:
            seconds = patience.stall_s if began() else patience.first_s
            try:
                yield await asyncio.wait_for(read.__anext__(), seconds)
            except StopAsyncIteration:
                return
            except asyncio.TimeoutError:
                raise stalled(server, seconds, began()) from None


def _sentence(error: Exception) -> str:
    if isinstance(error, SpecdemoError):
        return str(error)
    return f"The lane stopped with an internal error ({type(error).__name__}): try again, report it if it stays."
