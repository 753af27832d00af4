"""How many tokens a round may draft: always K, or up to K while drafting pays.

With an adaptive length each drafter stops by itself where its next guess is not worth its price: it knows best how sure
it is. What is decided here is only whether drafting has been worth its price at all. State lives as long as one run and
depends on its tokens alone, never on a clock, so equal runs draft alike.
"""

from __future__ import annotations

from ..settings import Settings

PRIOR_ACCEPTED, PRIOR_DRAFTED = 1.2, 2.0  # the belief before the first verdict
MEMORY = 0.95  # weight that a round's counts keep in the next round
VERIFY_COST = 0.03  # what one more position adds to a target forward, as part of one forward
PROBE_EVERY = 8  # rounds without a draft before one token is tried again


class FixedDraftLength:
    def __init__(self, draft_length: int) -> None:
        self._draft_length = draft_length

    def next(self) -> int:
        return self._draft_length

    def observe(self, drafted: int, accepted: int) -> None:
        pass


class AdaptiveDraftLength:
    """`longest` while recent drafts have paid, which is when the tokens accepted outnumber the forwards that drafting
    cost: each accepted token saves one target forward, each drafted one costs `cost_ratio` + VERIFY_COST of one. When
    they have not, one token is tried now and then.
    """

    def __init__(self, longest: int, cost_ratio: float) -> None:
        self._longest = longest
        self._cost = cost_ratio + VERIFY_COST
        self._accepted, self._drafted = PRIOR_ACCEPTED, PRIOR_DRAFTED
        self._idle = 0

    def next(self) -> int:
        if self._accepted >= self._cost * self._drafted:
            return self._longest
        return min(1, self._longest) if self._idle >= PROBE_EVERY else 0

    def observe(self, drafted: int, accepted: int) -> None:
        if drafted == 0:
            self._idle += 1
            return
        self._idle = 0
        self._accepted = MEMORY * self._accepted + accepted
        self._drafted = MEMORY * self._drafted + drafted


DraftLength = FixedDraftLength | AdaptiveDraftLength


def draft_length_for(settings: Settings, cost_ratio: float) -> DraftLength:
    if settings.adaptive:
        return AdaptiveDraftLength(settings.draft_length, cost_ratio)
    return FixedDraftLength(settings.draft_length)
