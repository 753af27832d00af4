"""The last run of each visitor, kept for a while so that it can be saved as a file."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from ..events import Event
from .export import Recording

ROOM = 16
"""Visitors whose last run is kept; of the one who has been away longest it is forgotten first."""


@dataclass
class Kept:
    """A run that is still being written, or was."""

    prompt: str
    events: list[Event] = field(default_factory=list)

    def recording(self) -> Recording:
        return Recording(tuple(self.events), self.prompt)


class Shelf:
    """Thread-safe."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, visitor: str, prompt: str, events: list[Event] | None = None) -> Kept:
        """A new run in place of the visitor's last one."""
        kept = Kept(prompt, [] if events is None else events)
        with self._lock:
            self._kept[visitor] = kept
            self._kept.move_to_end(visitor)
            while len(self._kept) > self._room:
                self._kept.popitem(last=False)
        return kept

    def get(self, visitor: str) -> Recording | None:
        """The visitor's last run, if it began and is still there."""
        with self._lock:
            kept = self._kept.get(visitor)
        return kept.recording() if kept is not None and kept.events else None
