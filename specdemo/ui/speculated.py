"""What was drafted for the next round while a round was verified (SSD), as one record of the page's log.

cache  n: round, h: whether the next draft was found in it, o: [kept, text] of the outcome,
       r: rank of its extra token among the draft's choices there, null far behind, f: guesses at each position,
       g: [[kept, text, text of the draft that was made for it, whether it was taken], ...],
       b: [until it was built, until the outcome was known] in seconds from the begin of the pass,
       d: share of the work that the pass hid, p: what made that possible (process, stream, card, none)
"""

from __future__ import annotations

from typing import Any

from ..events import Verified
from .records import significant


def speculated(event: Verified) -> dict[str, Any]:
    """The record's fields; `event` is one in which something was speculated, so it has an outcome."""
    speculation, outcome, extra = event.speculation, event.outcome, event.extra
    assert speculation is not None
    assert outcome is not None
    assert extra is not None
    return {
        "n": event.round,
        "h": event.hit,
        "o": [outcome[0], extra.text],
        "r": speculation.rank,
        "f": list(speculation.fan_out),
        "g": [[guess.num_accepted, guess.text, guess.draft_text, guess.taken] for guess in speculation.guesses],
        "b": [round(speculation.built_s, 6), round(speculation.known_s, 6)],
        "d": significant(speculation.hidden_s / speculation.build_s, 3) if speculation.build_s else None,
        "p": speculation.overlap,
    }
