"""What a race teaches, against figures worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from fake_lanes import Judged, Script

from specdemo.insight import Insight, insight, theory
from specdemo.metrics import fold

KEEP_TWO: Judged = [(" a", "accepted"), (" b", "accepted")]
KEEP_ONE: Judged = [(" a", "accepted"), (" x", "rejected")]
KEEP_NONE: Judged = [(" x", "rejected"), (" y", "discarded")]


def race(rounds: Sequence[Judged], round_s: float = 0.05, forward_s: float = 0.04) -> Insight | None:
    """What a race of these rounds teaches. In every round of the scripts drafting takes 1 ms, the rest 1 ms."""
    standard = Script("standard", seconds_a_round=forward_s + 0.002).start().first("A")
    speculative = Script("speculative", seconds_a_round=round_s).start().first("A")
    for judged in rounds:
        speculative.round(judged, " z", "bonus" if all(fate == "accepted" for _, fate in judged) else "recovered")
    for _ in speculative.ids[1:]:
        standard.round(extra=" w")
    folds = [fold(script.finish().events) for script in (standard, speculative)]
    return insight(folds[0], folds[1], sum(bool(judged) for judged in rounds))


def found(rounds: Sequence[Judged], **costs: float) -> Insight:
    result = race(rounds, **costs)
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("a", "k", "c", "v", "expected"),
    [
        (0.0, 5, 0.1, 1.0, 1 / 1.5),  # nothing kept: one token for all that work
        (1.0, 5, 0.1, 1.0, 6 / 1.5),
        (0.5, 2, 0.0, 1.0, 1.75),  # 1 + 1/2 + 1/4
        (0.5, 2, 0.25, 1.5, 1.75 / 2),
        (0.9, 0, 0.3, 1.0, 1.0),
    ],
)
def test_theory_by_hand(a: float, k: float, c: float, v: float, expected: float) -> None:
    assert theory(a, k, c, v) == pytest.approx(expected)


def test_theory_has_no_jump_where_everything_is_kept() -> None:
    assert theory(1 - 1e-9, 4, 0.1, 1.2) == pytest.approx(theory(1.0, 4, 0.1, 1.2), rel=1e-6)


def test_measured_costs_and_the_curve_through_them() -> None:
    result = found([KEEP_TWO, KEEP_NONE] * 4)
    # a forward of one position takes 40 ms, one of three 48, a drafted token half of 1 ms
    assert result.draft_length == 2
    assert result.verify_cost == pytest.approx(48 / 40)
    assert result.cost_ratio == pytest.approx(0.5 / 40)
    assert result.alpha == pytest.approx(2 / 3)
    assert result.theory == pytest.approx(theory(2 / 3, 2, 0.5 / 40, 48 / 40))
    assert result.curve is not None
    assert result.curve[0] == (0.0, pytest.approx(1 / (2 * 0.5 / 40 + 48 / 40)))
    assert result.curve[-1] == (1.0, pytest.approx(3 / (2 * 0.5 / 40 + 48 / 40)))


def test_losses_add_up_to_the_whole_distance_from_the_ideal() -> None:
    for rounds in ([KEEP_TWO, KEEP_NONE] * 4, [KEEP_ONE] * 5, [KEEP_ONE, [], []] * 3):
        result = found(rounds)
        ideal = result.draft_length + 1
        assert sum(result.losses.values()) == pytest.approx(math.log(ideal / result.speedup), rel=1e-6)


@pytest.mark.parametrize(
    ("rounds", "costs", "limit"),
    [
        ([KEEP_NONE] * 6, {}, "acceptance"),
        ([KEEP_TWO] * 6, {"round_s": 0.2}, "verify"),
        ([KEEP_TWO] * 6, {"round_s": 0.0405, "forward_s": 0.0385}, "draft"),
        ([KEEP_TWO, [], [], [], []] * 3, {}, "matches"),
    ],
)
def test_the_greatest_loss_is_named(rounds: list[Judged], costs: dict[str, float], limit: str) -> None:
    assert found(rounds, **costs).limit == limit


def test_a_race_predicts_itself() -> None:
    """At the K that was run the prediction is the measurement, and without drafts it is standard decoding."""
    for rounds in ([KEEP_TWO, KEEP_NONE, KEEP_ONE] * 4, [KEEP_TWO] * 5, [KEEP_ONE, []] * 5):
        result = found(rounds)
        predicted = dict(result.predicted)
        assert predicted[2] == pytest.approx(result.speedup, rel=1e-6)
        assert predicted[0] == pytest.approx(42 / 41)  # a scripted standard round has 1 ms of drafting; K = 0 has none


def test_best_draft_length_follows_acceptance() -> None:
    assert found([KEEP_NONE] * 8).best == 0
    assert found([KEEP_ONE] * 8).best == 1
    assert found([KEEP_TWO] * 8).best > 2  # what lies beyond the longest draft goes on as it was


def test_nothing_is_said_of_a_race_without_drafts_or_without_speed() -> None:
    assert race([[]] * 4) is None
    assert insight(fold([]), fold([]), 0) is None
    timeless = Script("standard", seconds_a_round=0.002).start().first("A").round(extra=" b").round(extra=" c").finish()
    drafting = Script("speculative").start().first("A").round(KEEP_TWO, " z").finish()
    assert insight(fold(timeless.events), fold(drafting.events), 1) is None  # passes that took no time at all


def test_block_verification_has_no_alpha_and_no_curve() -> None:
    standard = Script("standard").start().first("A").round(extra=" b").round(extra=" c").finish()
    speculative = Script("speculative", settings={"verification": "block"}).start().first("A").round(KEEP_TWO, " z")
    result = insight(fold(standard.events), fold(speculative.finish().events), 1)
    assert result is not None
    assert (result.alpha, result.curve, result.theory) == (None, None, None)
    assert len(result.predicted) == 17
