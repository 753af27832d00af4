"""The arena of served lanes: what the page asks of `specdemo.arena.Arena`, with servers in place of models.

Nothing is computed here, so many races run at once, and the lock is not ours: a number of seats for each server, in
order of arrival, keeps us from flooding it. All HTTP streams live on one event loop in a thread of its own; a race is
read from a queue that this loop fills. A race that is stopped, or whose reader goes away, closes its streams, by which
the server stops decoding. A server that is down is looked for again with every race, and the other lane goes on.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Coroutine, Generator, Sequence
from contextlib import AsyncExitStack
from typing import Any, Literal, NoReturn

import httpx

from ..errors import BadRequest
from ..events import Event, Failed, Finished, Started
from ..limits import OWN, Limits
from ..request import RaceRequest, Status, check_size
from .address import Server
from .detect import Found, find
from .faults import ServerFault, unasked
from .lane import Asked, Lane, Patience
from .options import SEATS


class _Race:
    """One race under way: its events, and how it is stopped."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None: it is over
        self.waiting: asyncio.Task[None] | None = None  # for a seat
        self.lanes: list[asyncio.Task[None]] = []
        self.stopped = False

    def stop(self) -> None:
        """On the loop."""
        self.stopped = True
        if self.waiting is not None:
            self.waiting.cancel()
        for lane in self.lanes:
            lane.cancel()


class ServedArena:
    """Races between the servers of two lanes. `seats`: how many may run at once."""

    def __init__(
        self,
        servers: Sequence[Server],
        limits: Limits = OWN,
        seats: int = SEATS,
        patience: Patience | None = None,
    ) -> None:
        self.limits = limits
        self.seats = seats
        self._servers = tuple(servers)
        self._patience = patience or Patience()
        self._found: dict[str, Found] = {}
        self._words: dict[str, str] = {}  # lane -> what is to be said of its server
        self._lock = threading.Lock()
        self._races: dict[str, set[_Race]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="served lanes", daemon=True)
        self._thread.start()
        self._client, self._seats = self._on_the_loop(self._open()).result()

    async def _open(self) -> tuple[httpx.AsyncClient, dict[str, asyncio.Semaphore]]:
        client = httpx.AsyncClient(
            timeout=httpx.Timeout(self._patience.connect_s, read=None, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=4 * self.seats),
            follow_redirects=False,  # only hosts named at the start are asked
            trust_env=False,
        )
        return client, {url: asyncio.Semaphore(self.seats) for url in sorted({s.url for s in self._servers})}

    def _on_the_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Stop every race and let go of the connections."""

        async def end() -> None:
            own = asyncio.current_task()
            others = [task for task in asyncio.all_tasks() if task is not own]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._client.aclose()

        self._on_the_loop(end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- servers -------------------------------------------------------------------------------------------------------

    def start_loading(self) -> None:
        """Look for the servers in the background; races are possible meanwhile."""
        self._on_the_loop(self._look())

    def load(self) -> None:
        """Look for the servers now."""
        self._on_the_loop(self._look()).result()

    async def _look(self) -> None:
        await asyncio.gather(*(self._known(server) for server in self._servers), return_exceptions=True)

    async def _known(self, server: Server) -> Found:
        """What is known of a server; one that was not found yet is looked for again. Raises ServerFault."""
        found = self._found.get(server.lane)
        if found is not None:
            return found
        try:
            found = self._found[server.lane] = await find(self._client, server)
        except Exception as error:
            fault = error if isinstance(error, ServerFault) else unasked(server, error)
            self._words[server.lane] = str(fault)
            raise fault from None
        self._words[server.lane] = f"{server.lane}: {found.model} by {found.title} at {server.host}"
        return found

    @property
    def status(self) -> Status:
        """Ready as soon as every server was looked for, found or not: what is down may come back."""
        words = [self._words.get(server.lane, "") for server in self._servers]
        if all(words):
            return Status("ready", " · ".join(words))
        return Status("loading", "Looking for the servers", 0.0)

    @property
    def health(self) -> Literal["loading", "ready"]:
        return "loading" if self.status.state == "loading" else "ready"

    @property
    def lanes(self) -> list[str]:
        return [server.lane for server in self._servers]

    def described(self, lane: str) -> dict[str, Any]:
        """What is known of a lane's server, for the head of a report; its address is not. Raises ServerFault."""
        (server,) = (server for server in self._servers if server.lane == lane)
        found: Found = self._on_the_loop(self._known(server)).result()
        return {"engine": found.title, "model": found.model, "round_trip_s": round(found.round_trip_s, 6)}

    # -- races ---------------------------------------------------------------------------------------------------------

    def check(self, request: RaceRequest) -> None:
        """Whether a race may be asked for, as far as it can be told without the servers. Raises BadRequest."""
        check_size(request, self.limits)

    def race(self, request: RaceRequest, visitor: str = "") -> Generator[Event, None, None]:
        """Both lanes' events as they come, ending after each lane's Finished or Failed. Closing the generator, `stop`
        and the limits end it and close the streams. Raises BadRequest before the first event."""
        self.check(request)
        yield from self._read(request, self._servers, visitor)

    def decode(self, lane: str, request: RaceRequest) -> Generator[Event, None, None]:
        """One lane alone, in the same way."""
        self.check(request)
        yield from self._read(request, [server for server in self._servers if server.lane == lane], visitor="")

    def _read(self, request: RaceRequest, servers: Sequence[Server], visitor: str) -> Generator[Event, None, None]:
        race = _Race()
        with self._lock:
            self._races.setdefault(visitor, set()).add(race)
        self._on_the_loop(self._run(race, request, servers))
        try:
            while (event := race.events.get()) is not None:
                yield event
        finally:
            self._loop.call_soon_threadsafe(race.stop)
            with self._lock:
                self._races[visitor].discard(race)
                if not self._races[visitor]:
                    del self._races[visitor]

    def compare(self, request: RaceRequest, visitor: str = "") -> NoReturn:
        """There is nothing to compare: the methods are the servers'. Raises BadRequest."""
        raise BadRequest("Each server runs the method that it was started with: there are no others to compare here.")

    def stop(self, visitor: str = "") -> bool:
        """End the visitor's races, with finish reason "cancelled". Whether there was one."""
        with self._lock:
            races = list(self._races.get(visitor, ()))
        for race in races:
            self._loop.call_soon_threadsafe(race.stop)
        return bool(races)

    async def _run(self, race: _Race, request: RaceRequest, servers: Sequence[Server]) -> None:
        """A race from its place in the line to its end."""
        race.waiting = asyncio.current_task()
        try:
            if race.stopped:
                return
            urls = sorted({server.url for server in servers})  # one order for all: nobody waits in a circle
            async with AsyncExitStack() as stack:
                for url in urls:
                    await stack.enter_async_context(self._seats[url])
                race.waiting = None
                until = time.monotonic() + self.limits.seconds
                together = len(urls) == len(servers)  # with one server for both, each lane has it for itself
                for group in [servers] if together else [[server] for server in servers]:
                    await self._lanes(race, group, request, until)
        finally:
            race.events.put(None)

    async def _lanes(self, race: _Race, servers: Sequence[Server], request: RaceRequest, until: float) -> None:
        """Lanes at the same time, stopped when the race's time is up."""
        if race.stopped:
            return
        race.lanes = [asyncio.create_task(self._decode(race, server, request)) for server in servers]
        try:
            _, late = await asyncio.wait(race.lanes, timeout=max(0.0, until - time.monotonic()))
            for lane in late:
                lane.cancel()
            if late:
                await asyncio.wait(late)
        finally:
            for lane in race.lanes:
                lane.cancel()

    async def _decode(self, race: _Race, server: Server, request: RaceRequest) -> None:
        try:
            found = await self._known(server)
        except ServerFault as fault:
            _never_began(race, server, Failed(server.lane, 0.0, str(fault)))
            return
        except asyncio.CancelledError:
            _never_began(race, server, Finished(server.lane, 0.0, "cancelled", (), ""))
            return
        asked = Asked(request.prompt, request.settings, request.raw)
        lane = Lane(self._client, server, found, asked, race.events.put, self._patience)
        await lane.run()
        if lane.lost:  # it may come back as another one
            self._found.pop(server.lane, None)


def _never_began(race: _Race, server: Server, end: Event) -> None:
    """The events of a lane whose server was not found."""
    started = Started(
        lane=server.lane,
        t=0.0,
        method="standard" if server.lane == "standard" else "served",
        target=server.model or "",
        target_precision="",
        forward_path="",
        device=server.host,
        settings={},
        prompt_ids=(),
        clock="client",
    )
    race.events.put(started)
    race.events.put(end)
