"""Logs of scripted races that are over, for tests of what the page makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fake_lanes import Script, interleaved

from specdemo.events import Candidate, Drafted, Event, Prefilled, Verified
from specdemo.ui.records import record
from specdemo.ui.view import RaceView

if TYPE_CHECKING:
    from playwright.sync_api import Page as Tab

RECORDED = {
    "prompt": "Count to seven.",
    "date": "2026-11-29T20:24:40+00:00",
    "processor": "Abacus 9000",
    "cores": 2,
    "torch": "2.13.0",
}


def log_of(events: Iterable[Event], greedy: bool = True, recorded: bool = False, prompt: str = "Count.") -> str:
    """The log of a race, as the page gets it."""
    view, log = RaceView(64, greedy, prompt), record("log", id="a race")
    log += record("recorded", **RECORDED) if recorded else ""
    for event in events:
        view.add(event)
        log += view.flush()
    return log + view.done()


def story(other: str = " other", settings: dict[str, object] | None = None) -> list[Event]:
    """A short race with every fate in it, in rounds of 100 ms against standard steps of 80 ms; each token explained.

    Right lane: A | b ✗x ·y → c (recovered) | d e → f (bonus) | g without a draft. `other` is the likeliest alternative
    everywhere.
    """
    chosen = settings or {}
    standard = Script("standard", seconds_a_round=0.08, settings=chosen).start().first("A")
    for word in (" b", " c", " d", " e", " f", " g"):
        standard.round(extra=word)
    speculative = Script("speculative", seconds_a_round=0.1, settings=chosen).start().first("A")
    speculative.round([(" b", "accepted"), (" x", "rejected"), (" y", "discarded")], " c", "recovered")
    speculative.round([(" d", "accepted"), (" e", "accepted")], " f", "bonus")
    speculative.round(extra=" g")
    return [explained(event, other) for event in interleaved(standard.finish(), speculative.finish())]


def explained(event: Event, other: str) -> Event:
    """The same event with the figures that the page shows to those who ask why."""

    def top(token: Any, prob: float) -> tuple[Candidate, ...]:
        return Candidate(token.id, prob, token.text), Candidate(7, 0.2, other), Candidate(8, 0.0001, " rare")

    match event:
        case Prefilled():
            return replace(event, token=replace(event.token, raw_p=0.45, top=top(event.token, 0.45)))
        case Drafted():
            tokens = tuple(replace(token, q=0.6, raw_q=0.55, top=top(token, 0.55)) for token in event.tokens)
            return replace(event, tokens=tokens, origin="model" if tokens else "none")
        case Verified():
            judged = tuple(
                replace(
                    token,
                    p=0.3,
                    q=0.6,
                    raw_p=0.35,
                    acceptance=0.5,
                    uniform=0.25 if token.fate == "accepted" else 0.75,
                    top=top(token, 0.35),
                )
                for token in event.judged
            )
            extra = event.extra and replace(event.extra, p=0.4, raw_p=0.45, top=top(event.extra, 0.45))
            return replace(event, judged=judged, extra=extra)
    return event


def shown(tab: Tab, lane: str) -> str:
    """The text that a lane shows as kept."""
    return "".join(tab.locator(f'[data-lane="{lane}"] .sd-output .sd-token:not([aria-hidden])').all_text_contents())
