"""Engine time: one lane's own clock.

It runs while the lane computes and stands still while the lane is suspended at a yield, because another lane or the
page works then. Phases are timed alone: on the CPU by their ends, on CUDA by events on the stream, read when the round
has been read anyway, so that timing adds no synchronisation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .events import Event


class Clock:
    """Seconds of engine time. Starts stopped; see `running`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._total = 0.0
        self._since: float | None = None
        self._phases: dict[str, float] = {}
        self._marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def now(self) -> float:
        return self._total + (time.perf_counter() - self._since if self._since is not None else 0.0)

    def start(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def stop(self) -> None:
        self._total, self._since = self.now, None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Work that is not decoding, such as preparing what the page explains."""
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        self.stop()
        try:
            yield
        finally:
            if self._cuda is not None:
                torch.cuda.synchronize(self._cuda)
            self.start()

    def suspended(self, *events: Event) -> Iterator[Event]:
        """Hand events to the consumer while the clock stands still: `yield from clock.suspended(...)`."""
        self.stop()
        yield from events
        self.start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to phase `name`."""
        if self._cuda is None:
            begin = time.perf_counter()
            yield
            self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - begin
        else:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record(torch.cuda.current_stream(self._cuda))
            yield
            last.record(torch.cuda.current_stream(self._cuda))
            self._marks.append((name, first, last))

    def read(self) -> dict[str, float]:
        """The phases since the last reading, in seconds. On CUDA waits for the last phase to end."""
        for name, first, last in self._marks:
            last.synchronize()
            self._phases[name] = self._phases.get(name, 0.0) + first.elapsed_time(last) / 1000.0
        self._marks.clear()
        phases, self._phases = self._phases, {}
        return phases
