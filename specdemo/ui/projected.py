"""What a device for each model would make of a race with SSD, as records of the page's log.

projection  profile: whose latencies, source: where they come from, error: how far off the projection is where it can
            be checked, lanes: [[method, tokens a second, times standard decoding, devices], ...], empty where that
            is too far to be shown
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import BadRequest
from ..events import Event, Verified
from ..projection import MEASURED, PROFILES, project
from .records import significant


def projected(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    """The records' fields, for a race's own latencies and for each profile; nothing where a lane is missing, failed or
    is too short, and one record without lanes where the projection does not hold. Where each model had a card of its
    own the race's latencies need no projection: SSD was measured with them."""
    apart = any(
        isinstance(event, Verified) and event.speculation is not None and event.speculation.overlap == "card"
        for event in events
    )
    for profile in PROFILES if apart else (MEASURED, *PROFILES):
        try:
            projection = project(events, profile)
        except BadRequest:
            return
        standard_s = projection.lanes[0].tpot_s if projection.lanes else 0.0
        yield {
            "profile": profile,
            "source": projection.latencies.source,
            "error": significant(projection.error, 3),
            "lanes": [
                [lane.method, significant(1.0 / lane.tpot_s), significant(standard_s / lane.tpot_s, 3), lane.devices]
                for lane in projection.lanes
            ],
        }
        if not projection.lanes:
            return
