"""How many tokens to draft next: always K, or as many as the run so far says will pay.

State lives as long as one run and depends on its tokens alone, never on a clock, so equal runs draft alike.
"""

from __future__ import annotations

from ..settings import Settings

PRIOR_ACCEPTED, PRIOR_JUDGED = 1.2, 2.0  # the belief before the first verdict: alpha 0.6, worth two tokens
MEMORY = 0.9  # weight that a round's counts keep in the next round
VERIFY_COST = 0.02  # what one more position adds to a target forward, as part of one forward
PROBE_EVERY = 8  # rounds without a draft before one token is tried again


class FixedDraftLength:
    def __init__(self, draft_length: int) -> None:
        self._draft_length = draft_length

    def next(self) -> int:
        return self._draft_length

    def observe(self, drafted: int, accepted: int) -> None:
        pass


class AdaptiveDraftLength:
    """The K up to `longest` with the best expected speedup (1 - a^(K+1)) / ((1 - a)(1 + K c)) (Leviathan et al. 2023,
    Theorem 3.8), a estimated from recent verdicts. When drafting does not pay at all, one token is tried now and then.
    """

    def __init__(self, longest: int, cost_ratio: float) -> None:
        self._longest = longest
        self._cost = cost_ratio + VERIFY_COST
        self._accepted, self._judged = PRIOR_ACCEPTED, PRIOR_JUDGED
        self._idle = 0

    def next(self) -> int:
        alpha = min(self._accepted / self._judged, 0.99)
        speedups = [(1 - alpha ** (k + 1)) / ((1 - alpha) * (1 + k * self._cost)) for k in range(self._longest + 1)]
        best = max(range(len(speedups)), key=speedups.__getitem__)
        return min(1, self._longest) if best == 0 and self._idle >= PROBE_EVERY else best

    def observe(self, drafted: int, accepted: int) -> None:
        if drafted == 0:
            self._idle += 1
            return
        self._idle = 0
        judged = min(accepted + 1, drafted)
        self._accepted = MEMORY * self._accepted + accepted
        self._judged = MEMORY * self._judged + judged


DraftLength = FixedDraftLength | AdaptiveDraftLength


def draft_length_for(settings: Settings, cost_ratio: float) -> DraftLength:
    if settings.adaptive:
        return AdaptiveDraftLength(settings.draft_length, cost_ratio)
    return FixedDraftLength(settings.draft_length)
