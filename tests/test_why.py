"""What the log says to those who ask why: taken from the events as they are, and the residual by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from race_logs import log_of, story

from specdemo.events import Candidate, Committed, Drafted, DraftedToken, Event, Prefilled, Verified
from specdemo.ui.why import why_first, why_round

SAMPLED = {"temperature": 1.0}


def rounds(events: list[Event]) -> list[tuple[Drafted, Verified]]:
    """The drafts and verdicts of the right lane."""
    ours = [event for event in events if event.lane == "speculative"]
    drafts = [event for event in ours if isinstance(event, Drafted)]
    return list(zip(drafts, (event for event in ours if isinstance(event, Verified)), strict=True))


def test_every_figure_is_the_events_own() -> None:
    drafted, verified = rounds(story())[0]
    why = why_round(drafted, verified, residual=False)
    assert (why["n"], why["o"], len(why["j"])) == (1, "model", 3)
    p, q, raw_p, raw_q, acceptance, draw, target_top, draft_top = why["j"][1]
    assert (p, q, raw_p, raw_q, acceptance, draw) == (0.3, 0.6, 0.35, 0.55, 0.5, 0.75)
    assert target_top == [[" x", 0.35], [" other", 0.2], [" rare", 0.0001]]
    assert draft_top == [[" x", 0.55], [" other", 0.2], [" rare", 0.0001]]
    assert why["x"] == [0.4, 0.45, [[" c", 0.45], [" other", 0.2], [" rare", 0.0001]]]
    assert "r" not in why


def test_a_round_without_a_draft_tells_of_its_one_token() -> None:
    why = why_round(*rounds(story())[2], residual=True)
    assert set(why) == {"n", "x"}
    first = next(event for event in story() if isinstance(event, Prefilled))
    assert why_first(first)["n"] == 0


def refused(drafter: tuple[Candidate, ...]) -> list[list[Any]]:
    """The residual of a round in which id 1 was refused, where the target gives 0.5, 0.3, 0.1 to the ids 2, 3, 1."""
    (drafted, verified), *_ = rounds(story())
    target = (Candidate(2, 0.5, "two"), Candidate(3, 0.3, "three"), Candidate(1, 0.1, "one"))
    drafted = replace(drafted, tokens=(DraftedToken(1, "one", 1.0, None, drafter),))
    judged = (replace(verified.judged[1], id=1),)
    verified = replace(verified, judged=judged, num_accepted=0, extra=Committed(2, "two", 0.5, 0.5, target))
    rows: list[list[Any]] = why_round(drafted, verified, residual=True)["r"]
    return rows


def test_a_known_q_gives_one_figure_and_an_unknown_one_a_range() -> None:
    rows = refused((Candidate(1, 0.6, "one"), Candidate(3, 0.35, "three"), Candidate(9, 0.02, "nine")))
    assert rows == [
        ["two", 0.5, None, pytest.approx(0.48), 0.5],  # not among the draft's likeliest: q is 0.02 at most
        ["three", 0.3, 0.35, 0.0, 0.0],  # the draft gave it more, so none of it is left
        ["one", 0.1, 0.6, 0.0, 0.0],
    ]


def test_a_drafter_that_drew_nothing_takes_only_its_own_token() -> None:
    rows = refused(())
    assert rows == [["two", 0.5, 0.0, 0.5, 0.5], ["three", 0.3, 0.0, 0.3, 0.3], ["one", 0.1, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("settings", "greedy", "told"),
    [(SAMPLED, False, True), ({}, True, False), ({**SAMPLED, "verification": "block"}, False, False)],
)
def test_the_residual_is_told_where_the_token_was_drawn_from_it(
    settings: dict[str, object], greedy: bool, told: bool
) -> None:
    log = [json.loads(line) for line in log_of(story(settings=settings), greedy).splitlines()]
    assert any("r" in line for line in log if line["k"] == "why") == told


def test_every_round_of_both_lanes_is_explained_right_after_it() -> None:
    log = [json.loads(line) for line in log_of(story()).splitlines()]
    for line, following in pairwise(log):
        if line["k"] in ("first", "round"):
            assert following["k"] == "why"
            assert (following["l"], following["n"]) == (line["l"], line.get("n", 0))
            assert len(following.get("j", [])) == len(line.get("j", []))
