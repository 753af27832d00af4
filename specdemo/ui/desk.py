"""Keep and share: a visitor's last run as a file, a file as a run on the page.

Every answer is a small JSON text for the page's script, and whatever is asked for may come from anyone.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import trace
from ..errors import BadRequest
from ..events import Failed, Finished
from ..request import RaceRequest
from .assets import LANGUAGES, escaped, strings
from .export import Recording, as_lines, as_page, read, replayed
from .form import DEFAULTS
from .links import restored
from .recorded import TRACES
from .shelf import Shelf

KINDS: Mapping[str, tuple[str, str]] = {
    "lines": ("specdemo-run.jsonl", "application/x-ndjson"),
    "html": ("specdemo-run.html", "text/html"),
}
"""Kind of file -> its name and type."""

_log = logging.getLogger(__name__)


class Desk:
    """The handlers, free of Gradio's components."""

    def __init__(self, shelf: Shelf, check: Callable[[RaceRequest], None], recorded: Path = TRACES) -> None:
        self._shelf = shelf
        self._check = check
        self._recorded = recorded

    def usual(self, names: Iterable[str]) -> str:
        """What the page's script has to know about the form: its fields in their order, and what they usually are."""
        usual = {"prompt": "", **DEFAULTS}
        return escaped({"fields": {name: usual[name] for name in names}})

    def save(self, visitor: str, wanted: object) -> str:
        """The run on show as {"file": name, type, text}, or {"note": a sentence}. `wanted`: JSON, kind and language."""
        try:
            kind, language = _wanted(wanted)
            recording = self._shelf.get(visitor) or self._first_race()
            if recording is None:
                raise BadRequest(strings()["share_nothing"])
            ended = {event.lane for event in recording.events if isinstance(event, Finished | Failed)}
            if {event.lane for event in recording.events} != ended:
                raise BadRequest(strings()["share_running"])
            text = as_lines(recording) if kind == "lines" else as_page(recording, language)
        except BadRequest as error:
            return _note(error)
        name, type = KINDS[kind]
        return escaped({"file": {"name": name, "type": type, "text": text}})

    def open(self, visitor: str, text: object) -> tuple[str | None, str]:
        """A file's run as the page's log (None: leave what is there) and a word about it."""
        try:
            recording = read(text)
            log = replayed(recording, uuid.uuid4().hex)
        except BadRequest as error:
            return None, _note(error)
        self._shelf.put(visitor, recording.prompt, list(recording.events))
        return log, escaped({"key": "share_opened", "good": True})

    def restored(self, query: Mapping[str, str]) -> tuple[dict[str, Any] | None, str | None]:
        """The form's values by a link, and a word about it; None for what stays as it is."""
        try:
            values = restored(query, self._check)
        except BadRequest as error:
            return None, escaped({"note": f"{strings()['share_link_bad']} {error}"})
        return values, None

    def _first_race(self) -> Recording | None:
        """The recorded race that a page shows before any other."""
        try:
            about = json.loads((self._recorded / "first-race.json").read_text(encoding="utf-8"))
            return Recording(tuple(trace.read(self._recorded / "first-race.jsonl")), str(about["prompt"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, BadRequest):
            _log.exception("the recorded race cannot be saved")
            return None


def _wanted(wanted: object) -> tuple[str, str]:
    """Kind and language. Raises BadRequest."""
    try:
        asked = json.loads(wanted) if isinstance(wanted, str) and len(wanted) < 200 else {}
        kind, language = asked["kind"], asked["language"]
        if kind in KINDS and language in LANGUAGES:
            return kind, language
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise BadRequest(strings()["share_kind"])


def _note(error: BadRequest) -> str:
    return escaped({"note": str(error)})
