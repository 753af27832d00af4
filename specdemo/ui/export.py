"""A run as a file to keep, and back: JSON lines, or one HTML file that replays in any browser without a server.

The HTML file carries the page's own scripts, style and text, the log that they draw, and the events that it was made
from. What a model or a visitor wrote is data in it: JSON in which every `<` is escaped, drawn by `textContent`. The
security policy allows the one script that it was written with, and no request to anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .. import trace
from ..errors import BadRequest
from ..events import Event, Started, settled
from ..settings import Settings
from .assets import KEPT_SCRIPTS, LANGUAGES, escaped, script, strings, style
from .records import record
from .view import LANES, RaceView

LONGEST_FILE = 24_000_000
"""Characters of a file that is loaded back."""

EVENTS_AN_UPDATE = 6
"""The numbers beside the lanes are told after this many events, as a live race tells them."""

_RUN = '<script type="application/json" id="specdemo-run">'
_END = "</script>"


@dataclass(frozen=True)
class Recording:
    """The events of a race in the order in which they came, and the prompt where it is known."""

    events: Sequence[Event]
    prompt: str = ""


def as_lines(recording: Recording) -> str:
    """The events as JSON lines, each lane's end with its metrics."""
    return "".join(trace.to_json(event) + "\n" for event in trace.with_metrics(settled(recording.events)))


def as_page(recording: Recording, language: str = LANGUAGES[0]) -> str:
    """One HTML file. It begins in `language` and can be switched."""
    text = strings(language)
    program = script(KEPT_SCRIPTS) + _BOOT
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'; "
        "form-action 'none'"
    )
    whole = trace.with_metrics(settled(recording.events))
    run = {"prompt": recording.prompt, "events": [json.loads(trace.to_json(event)) for event in whole]}
    return _FILE.format(
        language=language,
        policy=html.escape(policy, quote=True),
        title=html.escape(text["title"]),
        style=style(),
        run=_RUN + escaped(run) + _END,
        log=replayed(recording),
        program=program,
    )


def replayed(recording: Recording, id: str = "kept") -> str:
    """The log of a recorded race, as the page draws it; a new `id` makes it a new log. Raises BadRequest for settings
    that no run can have."""
    decoding, *_ = [_settings(event.settings) for event in recording.events if isinstance(event, Started)]
    view = RaceView(decoding.max_new_tokens, decoding.greedy, recording.prompt)
    log = record("log", id=id)
    for number, event in enumerate(settled(recording.events)):
        view.add(event)
        if number % EVENTS_AN_UPDATE == 0:
            log += view.flush()
    return log + view.done()


def read(text: object) -> Recording:
    """A recording from the text of a file of either kind. Raises BadRequest, one sentence, for anything else: another
    file, one too large, one that was cut off or changed."""
    if not isinstance(text, str):
        raise BadRequest(strings()["error_file_kind"])
    if len(text) > LONGEST_FILE:
        raise BadRequest(strings()["error_file_size"].format(limit=LONGEST_FILE // 1_000_000))
    text = text.lstrip("\ufeff \t\r\n")
    recording = Recording(trace.parse(text)) if text.startswith("{") else _from_page(text)
    trace.check(recording.events)
    return replace(recording, events=_on_the_page(recording.events))


def _from_page(text: str) -> Recording:
    begin = text.find(_RUN)
    if begin < 0:
        raise BadRequest(strings()["error_file_kind"])
    begin += len(_RUN)
    end = text.find(_END, begin)
    if end < 0 or not text.rstrip().endswith("</html>"):
        raise BadRequest(strings()["error_file_cut"])
    try:
        run: dict[str, Any] = json.loads(text[begin:end])
        prompt, lines = run["prompt"], [json.dumps(event) for event in run["events"]]
        if not isinstance(prompt, str):
            raise TypeError(prompt)
        prompt.encode()  # a lone surrogate gets in through no escape sequence
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadRequest(strings()["error_file_cut"]) from None
    return Recording(trace.parse("\n".join(lines)), prompt)


def _on_the_page(events: Sequence[Event]) -> list[Event]:
    """The events with their lanes named as the page names them: a single lane, recorded on the command line, by whether
    it is the standard one. Raises BadRequest for lanes that have no place."""
    started = {event.lane: event for event in events if isinstance(event, Started)}
    if set(started) <= set(LANES):
        return list(events)
    if len(started) > 1:
        raise BadRequest(strings()["error_file_lanes"])
    (only,) = started.values()
    lane = LANES[0] if only.method == LANES[0] else LANES[1]
    return [replace(event, lane=lane) for event in events]


def _settings(told: Any) -> Settings:
    """The settings that a run says it had, the usual ones for what it does not say. Raises BadRequest."""
    known = asdict(Settings())
    wanted = {name: value for name, value in told.items() if name in known}
    if "stop" in wanted:
        wanted["stop"] = tuple(wanted["stop"]) if isinstance(wanted["stop"], list | tuple) else wanted["stop"]
    return Settings(**wanted)


# The log is plain ASCII without `<`, so it can stand in the document as it is.
_FILE = """<!doctype html>
<html lang="{language}">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="specdemo-language" content="{language}">
<title>{title}</title>
<style>
*, ::before, ::after {{ box-sizing: border-box; }}
body {{ margin: 0; font-family: ui-sans-serif, system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif; }}
{style}
</style>
{run}
<script type="text/plain" id="specdemo-log">{log}</script>
</head>
<body class="gradio-container">
<main class="main app"><div id="kept"></div><div id="stage"></div></main>
<script>{program}</script>
</body>
</html>
"""

_BOOT = """
specdemo.held = (id) => () => document.getElementById(id).textContent;
specdemo.mountKept(document.getElementById("kept"), specdemo.held("specdemo-run"), () => {});
specdemo.mountStage(document.getElementById("stage"), specdemo.held("specdemo-log"), () => {});
"""
