"""Whether drafting beside the verification paid, and if not, why: what an SSD lane teaches, alone and against plain
speculative decoding of the same prompt.

Everything is a fold over events, like every other number. A token costs its share of the passes, of the drafting that
could be seen, and of the rest; the difference between two lanes is split the same way, so its parts add up to the
difference of their times per token. Nothing here is predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .events import Drafted, Event, Overlap, Verified
from .metrics import Metrics, speedup

Part: TypeAlias = Literal["draft", "verify", "tokens", "rest"]
"""Where two lanes' times per token can differ: drafting that could be seen, a pass of the target, tokens of a round and
so passes for each token, all the rest."""

Cause: TypeAlias = Literal["verify", "wait", "misses", "tokens", "rest"]
"""What costs SSD most against speculative decoding: a pass takes longer (fewer processors for it, and a drafter at
work beside it), rounds wait for caches that are not ready, drafting after misses, fewer tokens a round, the rest."""

Verdict: TypeAlias = Literal["faster", "slower", "even"]

EVEN = 0.005
"""Closer to 1 than this, a ratio of speeds is called even: it is shown with two digits."""


class SsdFold:
    """What an SSD lane's `Metrics` do not say. `add` each of its events, in order."""

    def __init__(self) -> None:
        self.ready_s = 0.0  # the drafts of hits: looked up, or waited for
        self.just_in_time_s = 0.0  # all other drafts
        self.hits = self.misses = 0
        self.built_s = self.build_s = self.known_s = 0.0  # sums over the rounds in which a cache was built
        self.caches = 0
        self.guesses = 0
        self.late = 0  # caches that were built later than the outcome was known
        self.overlap: Overlap = "none"

    def add(self, event: Event) -> None:
        match event:
            case Drafted(origin="cache"):
                self.ready_s += event.draft_s
            case Drafted():
                self.just_in_time_s += event.draft_s
            case Verified(speculation=speculation, hit=hit):
                if hit is not None:
                    self.hits += hit
                    self.misses += not hit
                if speculation is not None:
                    self.caches += 1
                    self.guesses += sum(speculation.fan_out)
                    self.built_s += speculation.built_s
                    self.build_s += speculation.build_s
                    self.known_s += speculation.known_s
                    self.late += speculation.built_s > speculation.known_s
                    self.overlap = speculation.overlap


@dataclass(frozen=True, slots=True)
class Against:
    """An SSD lane against a speculative one of the same prompt.

    parts: seconds that a token takes longer, by where they go; below 0 it takes less. saved_s: the drafting that it
    saves, of draft_s that the speculative lane spends on it. cause: what costs most, None where nothing takes longer.
    pass_s, round_tokens: mean seconds of a pass and mean tokens of a round, of the SSD lane and of the other.
    """

    speedup: float
    verdict: Verdict
    saved_s: float
    draft_s: float
    parts: Mapping[Part, float]
    cause: Cause | None
    pass_s: tuple[float, float]
    round_tokens: tuple[float, float]


@dataclass(frozen=True, slots=True)
class SsdInsight:
    """Of an SSD lane. built_s, known_s: mean seconds from the begin of a pass until the cache was built and until the
    outcome was known; late: share of the caches that came later than the outcome. guesses: mean guesses a cache. The
    rest as in `Metrics`; against is None where no speculative lane ran beside it."""

    hits: int
    misses: int
    hit_rate: float | None
    recall_by_fan_out: tuple[tuple[int, float], ...]
    hit_rate_by_fan_out: tuple[tuple[int, float], ...]
    hidden_share: float | None
    tokens_on_hit: float | None
    tokens_on_miss: float | None
    guesses: float
    built_s: float
    known_s: float
    late: float
    overlap: Overlap
    against: Against | None


def ssd_insight(folded: SsdFold, ssd: Metrics, speculative: Metrics | None = None) -> SsdInsight | None:
    """What an SSD lane teaches; None where no cache was ever built. `speculative`: the lane that it has to beat."""
    if not folded.caches:
        return None
    return SsdInsight(
        hits=folded.hits,
        misses=folded.misses,
        hit_rate=ssd.hit_rate,
        recall_by_fan_out=ssd.recall_by_fan_out,
        hit_rate_by_fan_out=ssd.hit_rate_by_fan_out,
        hidden_share=ssd.hidden_share,
        tokens_on_hit=ssd.tokens_on_hit,
        tokens_on_miss=ssd.tokens_on_miss,
        guesses=folded.guesses / folded.caches,
        built_s=folded.built_s / folded.caches,
        known_s=folded.known_s / folded.caches,
        late=folded.late / folded.caches,
        overlap=folded.overlap,
        against=None if speculative is None else _against(folded, ssd, speculative),
    )


def _against(folded: SsdFold, ssd: Metrics, plain: Metrics) -> Against | None:
    ratio = speedup(plain, ssd)
    if ratio is None or not ssd.rounds or not plain.rounds:
        return None
    tokens, plain_tokens = _decoded(ssd), _decoded(plain)
    rounds_a_token, plain_rounds_a_token = ssd.rounds / tokens, plain.rounds / plain_tokens
    pass_s, plain_pass_s = ssd.verify_s / ssd.rounds, plain.verify_s / plain.rounds
    plain_draft_s = plain.draft_s / plain_tokens
    wait_s, misses_s = folded.ready_s / tokens, folded.just_in_time_s / tokens
    saved_s = plain_draft_s - wait_s - misses_s
    parts: dict[Part, float] = {
        "draft": -saved_s,
        "verify": (pass_s - plain_pass_s) * rounds_a_token,
        "tokens": (rounds_a_token - plain_rounds_a_token) * plain_pass_s,
        "rest": ssd.overhead_s / tokens - plain.overhead_s / plain_tokens,
    }
    greatest = max(parts, key=lambda part: parts[part])
    cause: Cause = greatest if greatest != "draft" else "wait" if wait_s > misses_s else "misses"
    return Against(
        speedup=ratio,
        verdict="even" if abs(ratio - 1.0) < EVEN else "faster" if ratio > 1.0 else "slower",
        saved_s=saved_s,
        draft_s=plain_draft_s,
        parts=parts,
        cause=cause if parts[greatest] > 0.0 else None,
        pass_s=(pass_s, plain_pass_s),
        round_tokens=(1.0 / rounds_a_token, 1.0 / plain_rounds_a_token),
    )


def _decoded(metrics: Metrics) -> int:
    """Tokens that came from rounds, not from the prefill. A lane that has a speed has at least one."""
    return metrics.tokens - 1
