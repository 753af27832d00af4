"""Who races, who waits: so many at a time, in order of arrival."""

from __future__ import annotations

import threading
import time
from collections import deque

from ..errors import BadRequest
from ..limits import OWN
from .assets import strings

RUNS_REMEMBERED = 8
"""The expected wait is made from the durations of this many runs."""

STEP_S = 5
"""The expected wait is told in multiples of this: nobody can know it better."""


class Line:
    """Thread-safe. room: visitors who may wait; room_an_address: how many of those in line, the ones who race
    included, may come from one network address; seats: how many race at once."""

    def __init__(self, room: int = OWN.waiting, room_an_address: int | None = None, seats: int = 1) -> None:
        self.room = room
        self._seats = seats
        self._room_an_address = room + seats if room_an_address is None else room_an_address
        self._visitors: dict[str, str] = {}  # visitor -> address, in order of arrival
        self._durations: deque[float] = deque(maxlen=RUNS_REMEMBERED)
        self._first_since = 0.0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._visitors)

    def join(self, visitor: str, address: str = "") -> None:
        """Raises BadRequest when the visitor is in already, the line is full or the address has its share of it."""
        with self._lock:
            if visitor in self._visitors:
                raise BadRequest(strings()["error_twice"])
            if len(self._visitors) >= self.room + self._seats:
                raise BadRequest(strings()["error_full"].format(room=self.room))
            if list(self._visitors.values()).count(address) >= self._room_an_address:
                raise BadRequest(strings()["error_full_address"].format(room=self._room_an_address))
            if not self._visitors:
                self._first_since = time.monotonic()
            self._visitors[visitor] = address

    def place(self, visitor: str) -> int | None:
        """0 is one who races, 1 the next; None for someone who left."""
        with self._lock:
            if visitor not in self._visitors:
                return None
            return max(0, list(self._visitors).index(visitor) - self._seats + 1)

    def leave(self, visitor: str, ran: float | None = None) -> None:
        """ran: how long the visitor had a turn, in seconds, if there was one."""
        with self._lock:
            if ran is not None:
                self._durations.append(ran)
            if visitor in self._visitors:
                first = next(iter(self._visitors)) == visitor
                del self._visitors[visitor]
                if first:
                    self._first_since = time.monotonic()

    def expected_wait(self, place: int) -> int | None:
        """Seconds until the turn of who has this place, judged by the runs before; None while there is none."""
        with self._lock:
            if not self._durations:
                return None
            each = sum(self._durations) / len(self._durations) / self._seats
            rest = max(0.0, each - (time.monotonic() - self._first_since))
            return STEP_S * max(1, round((rest + each * (place - 1)) / STEP_S))
