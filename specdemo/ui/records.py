"""One line of the page's log, and the figures in it."""

from __future__ import annotations

import json
from typing import Any


def record(kind: str, **fields: Any) -> str:
    """A line of plain ASCII that neither a template nor a script element can read as code."""
    line = json.dumps({"k": kind, **fields}, separators=(",", ":"), allow_nan=False)
    return line.replace("<", "\\u003c") + "\n"


def significant(value: float | None, digits: int = 4) -> float | None:
    """Short enough to send, exact enough to show."""
    return None if value is None else float(f"{value:.{digits}g}")
