"""The race that the page shows before any model is loaded: a real one, recorded, and labelled so.

`traces/record.py` makes its two files: the events of both lanes, and what they were recorded with.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from .. import trace
from ..errors import BadRequest
from ..events import Started
from .records import record
from .view import RaceView

TRACES = Path(__file__).parents[2] / "traces"

EVENTS_AN_UPDATE = 6
"""The numbers beside the lanes are told after this many events, as a live race tells them."""

_log = logging.getLogger(__name__)


def first_race(folder: Path = TRACES) -> str:
    """The log of the recorded race; empty where there is none, since the page can do without."""
    try:
        about = json.loads((folder / "first-race.json").read_text(encoding="utf-8"))
        return record("log", id="recorded") + record("recorded", **about) + _told(folder / "first-race.jsonl", about)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, BadRequest):
        _log.exception("the recorded race cannot be shown")
        return ""


def _told(path: Path, about: dict[str, Any]) -> str:
    events = list(trace.read(path))
    settings = next(event.settings for event in events if isinstance(event, Started))
    view, log = RaceView(settings["max_new_tokens"], settings["temperature"] == 0, about["prompt"]), ""
    for number, event in enumerate(events):
        view.add(event)
        if number % EVENTS_AN_UPDATE == 0:
            log += view.flush()
    return log + view.done()
