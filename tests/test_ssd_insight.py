"""What an SSD lane teaches, against figures worked out by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from fake_lanes import Judged, Script
from ssd_logs import cache, guess, ssd_story

from specdemo.events import Drafted, Event, Verified
from specdemo.metrics import fold
from specdemo.ssd_insight import Against, SsdFold, SsdInsight, ssd_insight

KEEP_TWO: Judged = [(" a", "accepted"), (" b", "accepted"), (" x", "rejected")]
KEEP_ONE: Judged = [(" a", "accepted"), (" x", "rejected"), (" y", "discarded")]


def taught(events: Iterable[Event], lane: str = "ssd", beside: str | None = "speculative") -> SsdInsight | None:
    events = list(events)
    folded = SsdFold()
    for event in events:
        if event.lane == lane:
            folded.add(event)
    own, other = (fold(event for event in events if event.lane == name) for name in (lane, beside))
    return ssd_insight(folded, own, other if beside else None)


def lane(
    name: str, rounds: Sequence[Judged], pass_s: float, draft_s: Sequence[float], built_s: float | None = None
) -> list[Event]:
    """A lane of these rounds: draft_s[i] of drafting in round i, then a pass, then 1 ms of the rest. built_s: the time
    in which each cache was built; every outcome but the last is a hit, and known at the end of the pass."""
    script = Script(name).start().first("A")
    for judged, seconds in zip(rounds, draft_s, strict=True):
        script.seconds_a_round = seconds + pass_s + 0.001
        script.round(judged, " z", "recovered")
    events: list[Event] = []
    for event in script.finish().events:
        if isinstance(event, Drafted):
            origin = "model" if event.round == 1 or built_s is None else "cache"
            event = replace(event, draft_s=draft_s[event.round - 1], origin=origin)
        if isinstance(event, Verified):
            event = replace(event, verify_s=pass_s)
            if built_s is not None:
                built = cache((guess(1, 0, " z", " a"),), 0, built_s, pass_s)
                event = replace(event, hit=event.round < len(rounds), outcome=(1, 2), speculation=built)
        events.append(event)
    return events


def against(ssd: list[Event], plain: list[Event]) -> Against:
    found = taught([*ssd, *plain])
    assert found is not None
    assert found.against is not None
    return found.against


def test_a_race_by_hand() -> None:
    found = taught(ssd_story())
    assert found is not None
    assert (found.hits, found.misses, found.hit_rate) == (1, 1, 0.5)
    assert found.guesses == pytest.approx((4 + 2) / 2)
    assert found.built_s == pytest.approx((0.012 + 0.025) / 2)
    assert found.known_s == pytest.approx(0.02)
    assert (found.late, found.overlap) == (0.5, "process")
    assert dict(found.recall_by_fan_out) == {1: 0.0, 2: 0.5, 4: 0.5, 8: 1.0, 16: 1.0}  # ranks 1 and 5
    assert dict(found.hit_rate_by_fan_out) == {1: 0.0, 2: 1.0}
    assert found.hidden_share == 1.0  # of the one that was hit: built in 12 ms, known after 20
    assert (found.tokens_on_hit, found.tokens_on_miss) == (4.0, 2.0)  # round 2 was ready; rounds 1 and 3 were not


def test_hidden_drafting_makes_it_faster() -> None:
    """Passes of 30 ms in both lanes; 10 ms of drafting a round in one, 1 ms in the other after the first."""
    ssd = lane("ssd", [KEEP_TWO] * 5, 0.03, [0.010, 0.001, 0.001, 0.001, 0.001], built_s=0.02)
    found = against(ssd, lane("speculative", [KEEP_TWO] * 5, 0.03, [0.010] * 5))
    assert found.verdict == "faster"
    assert found.speedup == pytest.approx(5 * 0.041 / (0.041 + 4 * 0.032))
    assert found.draft_s == pytest.approx(5 * 0.010 / 15)
    assert found.saved_s == pytest.approx(4 * 0.009 / 15)
    assert found.parts == {"draft": -found.saved_s, **dict.fromkeys(("verify", "tokens", "rest"), pytest.approx(0.0))}
    assert found.cause is None


def test_the_parts_add_up_to_the_difference() -> None:
    for rounds, pass_s in (([KEEP_TWO] * 5, 0.05), ([KEEP_ONE] * 8, 0.03), ([KEEP_ONE, KEEP_TWO] * 3, 0.045)):
        ssd = lane("ssd", rounds, pass_s, [0.002] * len(rounds), built_s=0.02)
        plain = lane("speculative", [KEEP_TWO] * 6, 0.04, [0.008] * 6)
        own, other = fold(ssd), fold(plain)
        assert own.tpot_s is not None
        assert other.tpot_s is not None
        assert sum(against(ssd, plain).parts.values()) == pytest.approx(own.tpot_s - other.tpot_s)


@pytest.mark.parametrize(
    ("ssd", "cause"),
    [
        pytest.param(lane("ssd", [KEEP_TWO] * 5, 0.05, [0.001] * 5, built_s=0.02), "verify", id="longer passes"),
        pytest.param(lane("ssd", [KEEP_TWO] * 5, 0.03, [0.023] * 5, built_s=0.06), "wait", id="late caches"),
        pytest.param(lane("ssd", [KEEP_TWO] * 5, 0.03, [0.1, *[0.001] * 4], built_s=0.02), "misses", id="misses"),
        pytest.param(lane("ssd", [KEEP_ONE] * 7, 0.03, [0.009] * 7, built_s=0.02), "tokens", id="shorter rounds"),
    ],
)
def test_the_greatest_cost_is_named(ssd: list[Event], cause: str) -> None:
    found = against(ssd, lane("speculative", [KEEP_TWO] * 5, 0.03, [0.009] * 5))
    assert found.verdict == "slower"
    assert found.cause == cause


def test_close_to_one_is_neither_faster_nor_slower() -> None:
    ssd = lane("ssd", [KEEP_TWO] * 5, 0.0301, [0.009] * 5, built_s=0.02)
    assert against(ssd, lane("speculative", [KEEP_TWO] * 5, 0.03, [0.009] * 5)).verdict == "even"


def test_without_a_lane_beside_it_nothing_is_compared() -> None:
    found = taught(ssd_story(), beside=None)
    assert found is not None
    assert found.against is None


def test_nothing_is_said_of_a_lane_that_never_drafted_ahead() -> None:
    assert taught(ssd_story(), lane="speculative") is None
    assert taught([]) is None
