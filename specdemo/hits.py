"""How often a draft was there before it was needed (SSD), as a fold over events: part of `metrics.Metrics`."""

from __future__ import annotations

from collections import Counter

from .events import Drafted, Event, Verified

FAN_OUTS = (1, 2, 4, 8, 16)

Shares = tuple[tuple[int, float], ...]
"""Pairs of a fan-out F and a share of rounds."""


class Hits:
    """Of one lane. Counts stay zero and shares empty where nothing was drafted ahead."""

    def __init__(self) -> None:
        self._count: Counter[bool] = Counter()
        self._ranks: list[int | None] = []
        self._by_fan_out: dict[int, Counter[bool]] = {}
        self._build_s = self._hidden_s = 0.0
        self._tokens: dict[bool, list[int]] = {
            True: [],
            False: [],
        }  # of rounds, by whether their draft was in the cache
        self._from_cache = False

    def add(self, event: Event) -> None:
        if isinstance(event, Drafted):
            self._from_cache = event.origin == "cache"
        elif isinstance(event, Verified):
            if event.judged:
                self._tokens[self._from_cache].append(event.num_accepted + (event.extra is not None))
            if event.hit is not None:
                self._count[event.hit] += 1
            if event.speculation is not None and event.hit is not None:
                self._ranks.append(event.speculation.rank)
                kept = dict(enumerate(event.speculation.fan_out)).get(event.num_accepted, 0)
                group = max((fan_out for fan_out in FAN_OUTS if fan_out <= kept), default=0)
                self._by_fan_out.setdefault(group, Counter())[event.hit] += 1
                if event.hit:
                    self._build_s += event.speculation.build_s
                    self._hidden_s += event.speculation.hidden_s

    @property
    def rate(self) -> float | None:
        return _share(self._count)

    @property
    def recall_by_fan_out(self) -> Shares:
        known = [rank for rank in self._ranks if rank is not None]
        total = len(self._ranks)
        return tuple((f, sum(rank < f for rank in known) / total) for f in FAN_OUTS) if total else ()

    @property
    def rate_by_fan_out(self) -> Shares:
        return tuple((fan_out, _share(hits) or 0.0) for fan_out, hits in sorted(self._by_fan_out.items()))

    @property
    def hidden_share(self) -> float | None:
        return self._hidden_s / self._build_s if self._build_s else None

    def tokens_a_round(self, from_cache: bool) -> float | None:
        """Tokens that rounds gave whose draft was in the cache, or was not, in a lane that has a cache."""
        tokens = self._tokens[from_cache]
        return sum(tokens) / len(tokens) if tokens and self._count else None


def _share(hits: Counter[bool]) -> float | None:
    return hits[True] / hits.total() if hits else None
