"""Every number against one worked out by hand, and the traps of measuring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdemo.events import (
    Candidate,
    Committed,
    Drafted,
    DraftedToken,
    Event,
    Fate,
    Finished,
    FinishReason,
    JudgedToken,
    Prefilled,
    Started,
    Verified,
)
from specdemo.metrics import (
    Fold,
    Metrics,
    first_divergence,
    fold,
    logit_gap,
    speedup,
    speedup_of_totals,
    with_baseline,
)

FATES: dict[str, Fate] = {"a": "accepted", "r": "rejected", "d": "discarded", "c": "clipped"}


def start(verification: str = "token") -> Started:
    return Started("lane", 0.0, "speculative", "t", "float32", "table", "cpu", {"verification": verification}, (1, 2))


def prefill(t: float = 1.0, target_s: float = 0.7, draft_s: float = 0.2) -> Prefilled:
    return Prefilled("lane", t, target_s, draft_s, Committed(5, "x", 1.0))


def a_round(
    index: int,
    t: float,
    fates: str,
    extra: bool = True,
    draft_s: float = 0.0,
    verify_s: float = 0.1,
    forwards: int = 0,
    hit: bool | None = None,
) -> list[Event]:
    judged = tuple(JudgedToken(i, "x", FATES[fate], 0.5, 0.5, 0.5, 1.0, 0.0) for i, fate in enumerate(fates))
    accepted = fates.count("a")
    return [
        Drafted("lane", t, index, tuple(DraftedToken(j.id, "x", 0.5) for j in judged), draft_s, "model", forwards),
        Verified(
            "lane",
            t,
            index,
            verify_s,
            0.01,
            judged,
            accepted,
            Committed(9, "y", 1.0) if extra else None,
            ("bonus" if accepted == len(fates) else "recovered") if extra else None,
            hit=hit,
        ),
    ]


def finish(t: float, tokens: int, reason: FinishReason = "length") -> Finished:
    return Finished("lane", t, reason, tuple(range(tokens)), "text")


RUN: list[Event] = [
    start(),
    prefill(t=1.0),
    *a_round(1, 1.5, "aard", draft_s=0.1, verify_s=0.2, forwards=4, hit=True),  # 3 tokens
    *a_round(2, 2.0, "rddd", draft_s=0.1, verify_s=0.3, forwards=4, hit=False),  # 1
    *a_round(3, 2.5, "aaaa", draft_s=0.1, verify_s=0.2, forwards=4, hit=True),  # 5
    *a_round(4, 2.75, "", verify_s=0.1),  # 1
    *a_round(5, 3.0, "ar", draft_s=0.05, verify_s=0.15, forwards=2, hit=True),  # 2
    finish(3.25, 13),
]


def test_a_run_worked_out_by_hand() -> None:
    metrics = fold(RUN)
    assert metrics == Metrics(
        tokens=13,
        rounds=5,
        ttft_s=1.0,
        tpot_s=2.0 / 12,
        tokens_per_second=6.0,
        total_s=3.25,
        drafted=14,
        accepted=7,
        accepted_histogram=(2, 1, 1, 0, 1),
        acceptance_rate=7 / 14,
        alpha=7 / 10,
        mean_acceptance_length=12 / 5,
        acceptance_by_position=(3 / 4, 2 / 3, 1 / 2, 1.0),
        cost_ratio=pytest.approx((0.35 / 14) / 0.1),
        verify_cost=pytest.approx(0.2 / 0.1),
        forward_s=((1, 0.1), (3, 0.15), (5, 0.2)),
        draft_forward_s=pytest.approx(0.35 / 14),
        draft_s=pytest.approx(0.35),
        verify_s=pytest.approx(0.95),
        overhead_s=pytest.approx(3.25 - 0.9 - 0.35 - 0.95),
        hit_rate=3 / 4,
        tokens_on_miss=(3 + 1 + 5 + 2) / 4,  # every draft was made just in time
    )


def test_a_standard_lane_worked_out_by_hand() -> None:
    events = [start(), prefill(1.0, 0.9, 0.0), *a_round(1, 1.2, ""), *a_round(2, 1.4, ""), finish(1.4, 3)]
    metrics = fold(events)
    assert (metrics.tokens, metrics.rounds, metrics.accepted_histogram) == (3, 2, (2,))
    assert metrics.tpot_s == pytest.approx(0.2)
    assert metrics.mean_acceptance_length == 1.0
    assert (metrics.acceptance_rate, metrics.alpha, metrics.acceptance_by_position) == (None, None, ())
    assert (metrics.cost_ratio, metrics.verify_cost, metrics.draft_forward_s, metrics.hit_rate) == (None,) * 4


def test_numbers_grow_with_the_events() -> None:
    growing, seen = Fold(), []
    for event in RUN:
        growing.add(event)
        seen.append(growing.metrics())
    assert [metrics.tokens for metrics in seen] == [0, 1, 1, 4, 4, 5, 5, 10, 10, 11, 11, 13, 13]
    assert [fold(RUN[: i + 1]) for i in range(len(RUN))] == seen


def test_nothing_is_divided_by_nothing() -> None:
    for events in ([], RUN[:1], RUN[:2], [*RUN[:2], finish(1.0, 1)]):
        metrics = fold(events)
        assert metrics.tpot_s is None
        assert metrics.tokens_per_second is None
        assert metrics.acceptance_rate is None
        assert metrics.alpha is None
        assert metrics.mean_acceptance_length is None
        assert metrics.accepted_histogram == ()
        assert metrics.overhead_s >= 0.0


# The traps


@pytest.mark.parametrize("prefill_s", [0.001, 10.0, 1000.0])
def test_pitfall_16_prefill_is_never_in_the_decode_speed(prefill_s: float) -> None:
    """However long the prompt took, and whatever the first token's time."""
    late = prefill_s - 1.0
    events = [replace(event, t=event.t + late) if event.t else event for event in RUN]
    metrics = fold(events)
    assert metrics.tokens_per_second == pytest.approx(6.0)
    assert metrics.ttft_s == pytest.approx(prefill_s)


def test_pitfall_16_a_first_round_of_many_tokens_is_decoding_and_not_prompt() -> None:
    """All tokens after the prefill's came in one round: the speed is theirs, and not 0."""
    metrics = fold([start(), prefill(1.0), *a_round(1, 1.5, "aaaa"), finish(1.5, 6)])
    assert metrics.tokens_per_second == pytest.approx(10.0)
    assert metrics.mean_acceptance_length == 5.0


def test_pitfall_16_tokens_after_eos_and_clipped_ones_count_nowhere() -> None:
    metrics = fold([start(), prefill(1.0), *a_round(1, 2.0, "aaccc", extra=False), finish(2.0, 3, "eos")])
    assert (metrics.tokens, metrics.accepted, metrics.drafted) == (3, 2, 2)
    assert (metrics.acceptance_rate, metrics.alpha) == (1.0, 1.0)
    assert metrics.acceptance_by_position == (1.0, 1.0)
    assert metrics.tokens_per_second == pytest.approx(2.0)
    assert metrics.mean_acceptance_length == 2.0


def test_pitfall_16_what_was_produced_counts_and_not_what_was_asked_for() -> None:
    started = replace(start(), settings={"max_new_tokens": 500})
    assert fold([started, *RUN[1:]]).tokens == 13


def test_pitfall_08_alpha_is_over_judged_tokens_and_the_rate_over_drafted_ones() -> None:
    """Discarded tokens were never judged."""
    metrics = fold([start(), prefill(), *a_round(1, 2.0, "ardd"), finish(2.0, 3)])
    assert metrics.alpha == 1 / 2
    assert metrics.acceptance_rate == 1 / 4
    assert metrics.acceptance_by_position == (1.0, 0.0)


def test_alpha_is_not_defined_under_block_verification() -> None:
    metrics = fold([start("block"), *RUN[1:]])
    assert metrics.alpha is None
    assert replace(metrics, alpha=0.7) == fold(RUN)


@pytest.mark.parametrize(
    ("stays", "accepted", "drafted", "histogram"),
    [
        (13, 7, 14, (2, 1, 1, 0, 1)),
        (12, 7, 13, (2, 1, 1, 0, 1)),  # the last round keeps its one accepted token, no extra
        (11, 6, 12, (3, 0, 1, 0, 1)),  # and now nothing
        (10, 6, 12, (3, 0, 1, 0, 1)),  # the round before had one token, its extra
        (9, 6, 12, (3, 0, 1, 0, 1)),  # the bonus of the third round goes
        (7, 4, 10, (3, 0, 2, 0, 0)),  # two of its accepted ones as well
        (1, 0, 0, (5,)),  # only the prefill's token is left
    ],
)
def test_pitfall_03_tokens_taken_back_by_a_late_stop_string_count_nowhere(
    stays: int, accepted: int, drafted: int, histogram: Sequence[int]
) -> None:
    metrics = fold([*RUN[:-1], finish(3.25, stays, "stop")])
    assert metrics.tokens == stays
    assert (metrics.accepted, metrics.drafted) == (accepted, drafted)
    shown = list(metrics.accepted_histogram) + [0] * (len(histogram) - len(metrics.accepted_histogram))
    assert shown == list(histogram)
    assert metrics.rounds == 5
    assert metrics.mean_acceptance_length == pytest.approx((stays - 1) / 5)


kept = st.integers(0, 16).flatmap(
    lambda k: st.integers(0, k).map(lambda n: "a" * n + "r" * (n < k) + "d" * (k - n - 1))
)


@given(st.lists(kept, max_size=8), st.integers(0, 200), st.lists(st.floats(0.001, 2.0), min_size=8, max_size=8))
def test_pitfall_04_accepted_tokens_are_never_more_than_emitted_ones(
    rounds: list[str], taken_back: int, seconds: list[float]
) -> None:
    t, events = 1.0, [start(), prefill(1.0)]
    for index, fates in enumerate(rounds, start=1):
        t += seconds[index - 1]
        events += a_round(index, t, fates)
    emitted = 1 + sum(fates.count("a") + 1 for fates in rounds)
    stays = max(1, emitted - taken_back)
    metrics = fold([*events, finish(t, stays, "stop")])
    assert metrics.tokens == stays
    assert metrics.accepted <= metrics.tokens - 1
    assert metrics.accepted <= metrics.drafted
    assert sum(i * n for i, n in enumerate(metrics.accepted_histogram)) == metrics.accepted
    assert sum(metrics.accepted_histogram) == metrics.rounds
    assert metrics.acceptance_rate is None or 0.0 <= metrics.acceptance_rate <= 1.0
    assert metrics.alpha is None or metrics.acceptance_rate <= metrics.alpha <= 1.0  # type: ignore[operator]
    assert all(0.0 <= share <= 1.0 for share in metrics.acceptance_by_position)
    if metrics.tpot_s is not None:
        assert metrics.tpot_s * (stays - 1) == pytest.approx(t - 1.0)


# Two lanes


STANDARD = fold([start(), prefill(1.0, 0.9, 0.0), *a_round(1, 1.3, "", verify_s=0.05), finish(1.3, 2)])


def test_costs_are_measured_against_the_standard_lanes_forward_of_one_position() -> None:
    metrics = with_baseline(fold(RUN), STANDARD)
    assert metrics.cost_ratio == pytest.approx((0.35 / 14) / 0.05)
    assert metrics.verify_cost == pytest.approx(0.2 / 0.05)
    same = [field.name for field in fields(Metrics) if field.name not in ("cost_ratio", "verify_cost")]
    assert [getattr(metrics, name) for name in same] == [getattr(fold(RUN), name) for name in same]


def test_pitfall_20_a_speedup_below_one_is_told_as_it_is() -> None:
    fast = fold(RUN)
    assert speedup(STANDARD, fast) == pytest.approx(0.3 / (2 / 12))
    assert speedup(fast, STANDARD) == pytest.approx((2 / 12) / 0.3)
    assert speedup(fast, STANDARD) < 1.0  # type: ignore[operator]
    assert speedup_of_totals(STANDARD, fast) == pytest.approx(1.3 / 3.25)


def test_pitfall_19_there_is_no_speedup_without_a_measured_baseline() -> None:
    nothing = fold([start(), prefill(), finish(1.0, 1)])
    assert speedup(nothing, fold(RUN)) is None
    assert speedup(fold(RUN), nothing) is None


@pytest.mark.parametrize(
    ("a", "b", "at"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [], 0),
        ((1, 2), [1, 2], None),
    ],
)
def test_pitfall_13_the_first_divergence_is_an_index(a: Sequence[int], b: Sequence[int], at: int | None) -> None:
    assert first_divergence(a, b) == at
    assert first_divergence(b, a) == at


def test_the_gap_of_two_logits_is_the_log_of_their_raw_probabilities_ratio() -> None:
    logits = {3: 2.5, 5: 2.0, 8: -1.0}
    total = sum(math.exp(value) for value in logits.values())
    top = [Candidate(id, math.exp(value) / total, "") for id, value in logits.items()]
    assert logit_gap(top, 3, 5) == pytest.approx(0.5)
    assert logit_gap(top, 8, 3) == pytest.approx(3.5)
    assert logit_gap(top, 3, 4) is None
    assert logit_gap([Candidate(3, 1.0, ""), Candidate(5, 0.0, "")], 3, 5) is None
    assert logit_gap([], 3, 5) is None
