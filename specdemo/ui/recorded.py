"""The race that the page shows before any model is loaded: a real one, recorded, and labelled so.

`traces/record.py` makes its two files: the events of both lanes, and what they were recorded with.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

from ..errors import BadRequest
from .export import read, replayed
from .records import record

TRACES = Path(__file__).parents[2] / "traces"

_log = logging.getLogger(__name__)


def first_race(folder: Path = TRACES) -> str:
    """The log of the recorded race; empty where there is none, since the page can do without."""
    try:
        about = json.loads((folder / "first-race.json").read_text(encoding="utf-8"))
        recording = read((folder / "first-race.jsonl").read_text(encoding="utf-8"))
        head, _, race = replayed(replace(recording, prompt=about["prompt"]), id="recorded").partition("\n")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, BadRequest):
        _log.exception("the recorded race cannot be shown")
        return ""
    return f"{head}\n{record('recorded', **about)}{race}"
