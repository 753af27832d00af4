"""The access log: one JSON line for each run and each request, with counts and timings, and never a word of a prompt.

No line names a visitor, a network address, a session or the query of an address, which can hold a prompt.
"""

from __future__ import annotations

import json
import threading
from datetime import datetime, timezone
from typing import Any, TextIO

from ..request import RaceRequest


class AccessLog:
    """Thread-safe. `stream` None writes nothing."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def write(self, what: str, **facts: str | int | float | None) -> None:
        """One line. `facts`: numbers, and words of the program's own choice."""
        if self._stream is None:
            return
        at = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = json.dumps({"at": at, "what": what, **{name: _short(fact) for name, fact in facts.items()}})
        with self._lock:
            self._stream.write(line + "\n")
            self._stream.flush()


def _short(fact: Any) -> Any:
    return round(fact, 4) if isinstance(fact, float) else fact


def facts_of(what: str, request: RaceRequest) -> dict[str, Any]:
    """What is told of a run: sizes, and nothing that was written."""
    return {"what": what, "characters": len(request.prompt), "asked": request.settings.max_new_tokens}
