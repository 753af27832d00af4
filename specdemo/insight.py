"""Why a race went as it did: where the time went, what limits the speedup, and which draft length would serve better.

Everything is computed from the `Metrics` of a race's two lanes, so it is a fold over events like every other number.
What is predicted rather than measured is named so.

The theory is that of Leviathan et al. 2023 (theorem 3.8) with a verification that need not be free: K drafted tokens
that are each kept with probability a give (1 - a^(K+1)) / (1 - a) tokens a round, and a round costs K c + v target
forwards, c for each drafted token and v for the pass over K + 1 positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .metrics import Metrics, speedup, with_baseline
from .settings import MAX_DRAFT_LENGTH

Limit: TypeAlias = Literal["matches", "acceptance", "draft", "verify", "overhead"]
"""What can keep a round from K + 1 tokens for the price of one: the drafter proposed nothing, the target refused,
drafting took time, the pass over K + 1 positions cost more than one over a single position, all the rest took time."""

CURVE_POINTS = 50


@dataclass(frozen=True, slots=True)
class Round:
    """Means over a run's rounds. Seconds are those of one round; shares are of its whole time.

    drafting: share of the rounds that had a draft. drafted, kept: drafted tokens and those of them that stayed.
    """

    drafting: float
    drafted: float
    kept: float
    draft_s: float
    verify_s: float
    overhead_s: float

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.overhead_s


@dataclass(frozen=True, slots=True)
class Insight:
    """Of one race.

    draft_length: the K in force, the mean of the drafts that were made. cost_ratio and verify_cost: c and v. alpha,
    curve and theory are None under block verification. curve: (a, speedup by theory) at this K, c and v. losses: how
    much each limit takes away, as natural logarithms that add up to log((K + 1) / speedup); shares: the same as parts
    of their sum, empty where nothing is lost. predicted: (K, speedup) for
    every K; best: the K with the greatest.
    """

    speedup: float
    draft_length: float
    alpha: float | None
    cost_ratio: float
    verify_cost: float
    theory: float | None
    curve: tuple[tuple[float, float], ...] | None
    losses: Mapping[Limit, float]
    shares: Mapping[Limit, float]
    limit: Limit | None
    round: Round
    predicted: tuple[tuple[int, float], ...]
    best: int


def theory(a: float, draft_length: float, cost_ratio: float, verify_cost: float) -> float:
    """Speedup where each of K drafted tokens is kept with probability `a`, 0 <= a <= 1."""
    k = draft_length
    tokens = k + 1.0 if a >= 1.0 else (1.0 - a ** (k + 1.0)) / (1.0 - a)
    return tokens / (k * cost_ratio + verify_cost)


def insight(standard: Metrics, speculative: Metrics, drafting_rounds: int) -> Insight | None:
    """What a race teaches; None where a lane wrote too little to have a speed, or nothing was ever drafted.

    drafting_rounds: the speculative lane's rounds that had a draft.
    """
    measured = speedup(standard, speculative)
    if (
        measured is None
        or not standard.tpot_s
        or not standard.verify_s
        or not speculative.drafted
        or not drafting_rounds
    ):
        return None
    speculative = with_baseline(speculative, standard)
    mean, baseline = _mean_round(speculative, drafting_rounds), _mean_round(standard, 0)
    k = speculative.drafted / drafting_rounds
    # a pass over K + 1 positions, from the mean over rounds with and without a draft
    wide_s = baseline.verify_s + max(0.0, mean.verify_s - baseline.verify_s) / mean.drafting
    c = speculative.draft_s / speculative.drafted / baseline.verify_s
    v = wide_s / baseline.verify_s
    alpha = speculative.alpha
    curve = (
        []
        if alpha is None
        else [(i / CURVE_POINTS, theory(i / CURVE_POINTS, k, c, v)) for i in range(CURVE_POINTS + 1)]
    )
    losses = _losses(mean, baseline, k)
    lost = sum(losses.values())
    predicted = _predicted(standard.tpot_s, speculative, mean, baseline, k, wide_s)
    return Insight(
        speedup=measured,
        draft_length=k,
        alpha=alpha,
        cost_ratio=c,
        verify_cost=v,
        theory=None if alpha is None else theory(alpha, k, c, v),
        curve=tuple(curve) or None,
        losses=losses,
        shares={name: loss / lost for name, loss in losses.items()} if lost else {},
        limit=_greatest(losses),
        round=mean,
        predicted=predicted,
        best=max(predicted, key=lambda point: point[1])[0],
    )


def _mean_round(metrics: Metrics, drafting_rounds: int) -> Round:
    n = metrics.rounds
    return Round(
        drafting=drafting_rounds / n,
        drafted=metrics.drafted / n,
        kept=metrics.accepted / n,
        draft_s=metrics.draft_s / n,
        verify_s=metrics.verify_s / n,
        overhead_s=metrics.overhead_s / n,
    )


def _losses(mean: Round, baseline: Round, k: float) -> dict[Limit, float]:
    """What each limit takes from K + 1 tokens for the price of one: logarithms, since the factors multiply. The price
    is one factor; its parts share it in proportion to the time that each adds to a standard round's."""
    price = math.log(max(1.0, mean.total_s / baseline.total_s))
    added = {
        "draft": mean.draft_s,
        "verify": max(0.0, mean.verify_s - baseline.verify_s),
        "overhead": max(0.0, mean.overhead_s - baseline.overhead_s),
    }
    whole = sum(added.values())
    part = {name: price * seconds / whole if whole else 0.0 for name, seconds in added.items()}
    return {
        "matches": math.log((k + 1.0) / (mean.drafted + 1.0)),
        "acceptance": math.log((mean.drafted + 1.0) / (mean.kept + 1.0)),
        "draft": part["draft"],
        "verify": part["verify"],
        "overhead": part["overhead"],
    }


def _greatest(losses: Mapping[Limit, float]) -> Limit | None:
    name: Limit = max(losses, key=lambda name: losses[name])
    return name if losses[name] else None


def _predicted(
    tpot_s: float, speculative: Metrics, mean: Round, baseline: Round, k: float, wide_s: float
) -> tuple[tuple[int, float], ...]:
    """Speedup for every K, were this race run again with it.

    The share of rounds that kept at least j drafted tokens is read from the histogram up to the longest draft that was
    made; beyond it the share falls by alpha a token. A drafted token costs what it cost here, and a pass grows with its
    positions as it did here between one and K + 1.
    """
    rounds = sum(speculative.accepted_histogram)
    survival = [sum(speculative.accepted_histogram[j:]) / rounds for j in range(1, len(speculative.accepted_histogram))]
    going_on = speculative.acceptance_rate if speculative.alpha is None else speculative.alpha
    longest = max((width for width, _ in speculative.forward_s), default=1) - 1
    token_s = speculative.draft_s / speculative.drafted
    position_s = (wide_s - baseline.verify_s) / k

    points, tokens, share = [], 1.0, 1.0
    for length in range(MAX_DRAFT_LENGTH + 1):
        if length:
            made = length <= longest
            share = (survival[length - 1] if length <= len(survival) else 0.0) if made else share * (going_on or 0.0)
            tokens += share
        round_s = baseline.verify_s + mean.overhead_s + length * mean.drafting * (token_s + position_s)
        points.append((length, tokens * tpot_s / round_s))
    return tuple(points)
