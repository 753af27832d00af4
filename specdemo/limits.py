"""What may be taken: one record of limits, the usual one and the one for strangers.

How many tokens a round may draft is limited for everyone alike (`settings.MAX_DRAFT_LENGTH`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """One run: characters of its prompt, new tokens, seconds of wall clock, and seconds without a sign of life after
    which it counts as hung. The page: visitors who may wait in line, how many of them may come from one network
    address, bytes of one request, connections at once."""

    prompt_characters: int = 50_000
    max_new_tokens: int = 2048
    seconds: float = 600.0
    hung_seconds: float = 600.0
    waiting: int = 8
    waiting_an_address: int = 9
    request_bytes: int = 100_000_000
    connections: int = 1000


OWN = Limits()
"""On a machine of one's own."""

PUBLIC = Limits(
    prompt_characters=4_000,
    max_new_tokens=256,
    seconds=90.0,
    hung_seconds=180.0,
    waiting=20,
    waiting_an_address=10,
    request_bytes=4_000_000,
    connections=600,
)
"""For a page that strangers reach. A kept race, which can be opened again, takes most of the bytes."""
