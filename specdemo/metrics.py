"""Numbers about a lane, every one a fold over its events.

The page, the command line and the benchmark read the same `Metrics`, so that a number means the same everywhere.
Decode speed is 1 / TPOT: the prompt's forward and the token it yields are in TTFT, never in the speed. Only tokens
that stayed in the output count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from .events import Arrived, Candidate, Counted, Drafted, Event, Fate, Finished, Prefilled, Retold, Started, Verified
from .hits import Hits, Shares


@dataclass(frozen=True, slots=True)
class Metrics:
    """Of one lane. Seconds are engine time; None where there is nothing to divide by.

    accepted_histogram[i]: rounds that kept i drafted tokens. acceptance_by_position[i]: of the rounds in which drafted
    token i was judged, the share that accepted it. forward_s: median seconds of a target forward by its positions, as
    pairs; draft_forward_s: mean seconds of a draft model's forward. cost_ratio and verify_cost compare with a target
    forward of one position, which a lane with a fixed K seldom makes: see `with_baseline`. overhead_s: what is neither
    prefill, drafting nor verifying. alpha is None under block verification, which does not judge tokens one by one.

    Where drafts are made ahead of time (SSD): hit_rate, the share of rounds whose outcome had a draft ready;
    recall_by_fan_out, pairs (F, share of rounds whose extra token was among the draft model's first F other choices
    at its position), which is the hit rate that F guesses at every position allow; hit_rate_by_fan_out, pairs (F, hit
    rate of the rounds that ended where at least F guesses were kept, and fewer than the next F); hidden_share, the part
    of the work on drafts that were used during which the target worked; tokens_on_hit and tokens_on_miss, tokens of a
    round with a draft that was ready, and with one that was made just in time.

    Of a lane that a server decodes all times are the client's, and what the server does not tell is None or empty.
    Where it only counts, rounds are the decoded tokens less the accepted ones: a round gives one token besides those.
    """

    tokens: int
    rounds: int
    ttft_s: float | None
    tpot_s: float | None
    tokens_per_second: float | None
    total_s: float
    drafted: int
    accepted: int
    accepted_histogram: tuple[int, ...]
    acceptance_rate: float | None
    alpha: float | None
    mean_acceptance_length: float | None
    acceptance_by_position: tuple[float, ...]
    cost_ratio: float | None
    verify_cost: float | None
    forward_s: tuple[tuple[int, float], ...]
    draft_forward_s: float | None
    draft_s: float
    verify_s: float
    overhead_s: float
    hit_rate: float | None
    recall_by_fan_out: Shares = ()
    hit_rate_by_fan_out: Shares = ()
    hidden_share: float | None = None
    tokens_on_hit: float | None = None
    tokens_on_miss: float | None = None


@dataclass(slots=True)
class _Round:
    """What a round left in the output: the fates of its draft in order, and whether an extra token followed."""

    fates: list[Fate]
    extra: bool

    @property
    def tokens(self) -> int:
        return self.fates.count("accepted") + self.extra

    def take_back(self, count: int) -> int:
        """Remove up to `count` of the round's last tokens; they count nowhere any more. Returns how many."""
        taken = min(count, self.tokens)
        keep = self.tokens - taken
        if taken:
            self.extra = False
            self.fates = ["accepted" if i < keep else "clipped" for i in range(len(self.fates))]
        return taken


class Fold:
    """Metrics that grow with the events of one lane: `add` each, ask `metrics` at any time."""

    def __init__(self) -> None:
        self._rounds: list[_Round] = []
        self._prefilled = 0
        self._arrived = 0  # tokens that came without their rounds
        self._by_rounds = True
        self._counted: Counted | None = None
        self._ttft: float | None = None
        self._prefill_s = self._draft_s = self._verify_s = self._t = self._last_token_t = 0.0
        self._draft_forwards = 0
        self._model_draft_s = 0.0
        self._verify_by_width: dict[int, list[float]] = {}
        self._hits = Hits()
        self._block = False

    def add(self, event: Event) -> None:
        self._t = event.t
        self._hits.add(event)
        match event:
            case Started():
                self._block = event.settings.get("verification") == "block"
            case Prefilled():
                self._prefilled = 1
                self._ttft = self._last_token_t = event.t
                self._prefill_s = event.target_s + event.draft_s
            case Drafted():
                self._draft_s += event.draft_s
                if event.draft_forwards:
                    self._draft_forwards += event.draft_forwards
                    self._model_draft_s += event.draft_s
            case Verified():
                self._verify_s += event.verify_s
                if event.verify_s:  # a server tells no times of its phases
                    self._verify_by_width.setdefault(len(event.judged) + 1, []).append(event.verify_s)
                self._rounds.append(_Round([token.fate for token in event.judged], event.extra is not None))
                self._last_token_t = event.t
            case Arrived():
                self._by_rounds = False
                self._ttft = event.t if self._ttft is None else self._ttft
                self._arrived += len(event.tokens)
                self._last_token_t = event.t
            case Retold():
                block = self._block
                self.__init__()  # type: ignore[misc]  # from the beginning
                self._block = block
            case Counted():
                self._counted = event
            case Finished():
                self._take_back(self._tokens - len(event.token_ids))

    @property
    def _tokens(self) -> int:
        return self._prefilled + self._arrived + sum(round.tokens for round in self._rounds)

    def _take_back(self, surplus: int) -> None:
        if not self._by_rounds:
            self._arrived -= surplus  # also more: tokens that were not counted as they came
            return
        for round in reversed(self._rounds):
            if surplus <= 0:
                return
            surplus -= round.take_back(surplus)

    def metrics(self) -> Metrics:
        rounds, tokens = self._rounds, self._tokens
        fates = Counter(fate for round in rounds for fate in round.fates)
        accepted, drafted = fates["accepted"], fates.total() - fates["clipped"]
        judged = accepted + fates["rejected"]
        decoded = max(0, tokens - (self._ttft is not None))
        count = len(rounds)
        if self._counted is not None:
            accepted, drafted = self._counted.accepted, self._counted.drafted
            count = max(0, decoded - accepted)
        decode_s = self._last_token_t - (self._ttft or 0.0)
        tpot = decode_s / decoded if decoded > 0 and decode_s > 0 else None
        forward_s = {width: median(seconds) for width, seconds in sorted(self._verify_by_width.items())}
        draft_forward_s = self._model_draft_s / self._draft_forwards if self._draft_forwards else None
        return Metrics(
            tokens=tokens,
            rounds=count,
            ttft_s=self._ttft,
            tpot_s=tpot,
            tokens_per_second=1.0 / tpot if tpot else None,
            total_s=self._t,
            drafted=drafted,
            accepted=accepted,
            accepted_histogram=_histogram(rounds),
            acceptance_rate=accepted / drafted if drafted else None,
            alpha=accepted / judged if judged and not self._block else None,
            mean_acceptance_length=decoded / count if count else None,
            acceptance_by_position=_by_position(rounds),
            cost_ratio=_ratio(draft_forward_s, forward_s.get(1)),
            verify_cost=_verify_cost(forward_s, forward_s.get(1)),
            forward_s=tuple(forward_s.items()),
            draft_forward_s=draft_forward_s,
            draft_s=self._draft_s,
            verify_s=self._verify_s,
            overhead_s=max(0.0, self._t - self._prefill_s - self._draft_s - self._verify_s),
            hit_rate=self._hits.rate,
            recall_by_fan_out=self._hits.recall_by_fan_out,
            hit_rate_by_fan_out=self._hits.rate_by_fan_out,
            hidden_share=self._hits.hidden_share,
            tokens_on_hit=self._hits.tokens_a_round(from_cache=True),
            tokens_on_miss=self._hits.tokens_a_round(from_cache=False),
        )


def fold(events: Iterable[Event]) -> Metrics:
    """Metrics of one lane's events."""
    folded = Fold()
    for event in events:
        folded.add(event)
    return folded.metrics()


def with_baseline(speculative: Metrics, standard: Metrics) -> Metrics:
    """`speculative` with its costs measured against the one-position forwards of the standard lane."""
    one_position_s = dict(standard.forward_s).get(1)
    return replace(
        speculative,
        cost_ratio=_ratio(speculative.draft_forward_s, one_position_s),
        verify_cost=_verify_cost(dict(speculative.forward_s), one_position_s),
    )


def speedup(standard: Metrics, speculative: Metrics) -> float | None:
    """Standard TPOT over speculative TPOT; below 1.0 speculation was slower."""
    return _ratio(standard.tpot_s, speculative.tpot_s)


def speedup_of_totals(standard: Metrics, speculative: Metrics) -> float | None:
    """Ratio of whole-run seconds, prefill included."""
    return _ratio(standard.total_s, speculative.total_s)


def first_divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ (the shorter one's end counts); None if equal."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def logit_gap(top: Sequence[Candidate], a: int, b: int) -> float | None:
    """How far apart the logits of tokens `a` and `b` are at one position, by its likeliest tokens: their raw
    probabilities' ratio is exp of it. None where one of the two is not among them."""
    probs = {candidate.id: candidate.prob for candidate in top}
    if not (probs.get(a) and probs.get(b)):
        return None
    return abs(math.log(probs[a]) - math.log(probs[b]))


def _histogram(rounds: Sequence[_Round]) -> tuple[int, ...]:
    counts = Counter(round.fates.count("accepted") for round in rounds)
    return tuple(counts[i] for i in range(max(counts, default=-1) + 1))


def _by_position(rounds: Sequence[_Round]) -> tuple[float, ...]:
    positions = []
    for i in range(max((len(round.fates) for round in rounds), default=0)):
        at = Counter(round.fates[i] for round in rounds if i < len(round.fates))
        if judged := at["accepted"] + at["rejected"]:
            positions.append(at["accepted"] / judged)
    return tuple(positions)


def _verify_cost(forward_s: Mapping[int, float], one_position_s: float | None) -> float | None:
    widest = max(forward_s, default=1)
    return _ratio(forward_s[widest], one_position_s) if widest > 1 else None


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None
