"""A race with SSD as the page's log: what was drafted ahead, hits, both ratios, what it teaches."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args

import pytest
from fake_lanes import Script, interleaved
from ssd_logs import ssd_story

from specdemo.events import Event, Overlap, Started, Verified
from specdemo.metrics import fold, speedup
from specdemo.projection import MEASURED, PROFILES, project
from specdemo.settings import Settings
from specdemo.ssd_insight import SsdFold, ssd_insight
from specdemo.ui.assets import strings
from specdemo.ui.export import Recording, as_lines, as_page, read, replayed
from specdemo.ui.view import LANES, RaceView


def records(events: Iterable[Event], greedy: bool = True) -> list[dict[str, Any]]:
    view = RaceView(64, greedy)
    log = ""
    for event in events:
        view.add(event)
        log += view.flush()
    return [json.loads(line) for line in (log + view.done()).splitlines()]


def of(log: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in log if record["k"] == kind]


def test_a_cache_is_told_as_it_was_built() -> None:
    hit, miss = of(records(ssd_story("<b>")), "cache")
    assert (hit["l"], hit["n"], hit["h"], hit["o"], hit["r"], hit["p"]) == (2, 1, True, [1, " c"], 1, "process")
    assert hit["f"] == [1, 2, 0, 1]
    assert hit["g"] == [
        [0, " B", " one two", False],
        [1, "<b>", " d", False],
        [1, " c", " d e f", True],
        [3, " y", "", False],
    ]
    assert (hit["b"], hit["d"]) == ([0.012, 0.02], 1.0)
    assert (miss["h"], miss["o"], miss["r"], miss["d"]) == (False, [3, " g"], 5, 0.8)


def test_both_ratios_are_those_of_the_folds() -> None:
    events = ssd_story()
    standard, speculative, ssd = (fold(event for event in events if event.lane == lane) for lane in LANES)
    told = of(records(events), "ratio")[-1]
    assert told["v"] == pytest.approx(speedup(standard, ssd), rel=1e-3)
    assert told["w"] == pytest.approx(speedup(speculative, ssd), rel=1e-3)
    numbers = [record for record in of(records(events), "numbers") if record["l"] == 2][-1]
    assert numbers["hits"] == ssd.hit_rate == 0.5


def test_what_it_teaches_is_the_fold_of_its_events() -> None:
    events = ssd_story()
    folded = SsdFold()
    for event in events:
        if event.lane == "ssd":
            folded.add(event)
    speculative, ssd = (fold(event for event in events if event.lane == lane) for lane in LANES[1:])
    found = ssd_insight(folded, ssd, speculative)
    assert found is not None
    assert found.against is not None
    (told,) = of(records(events), "ssd")
    assert told["hits"] == found.hits
    assert told["recall_by_fan_out"] == [list(pair) for pair in found.recall_by_fan_out]
    assert told["against"]["speedup"] == pytest.approx(found.against.speedup, rel=1e-3)
    assert told["against"]["parts"].keys() == found.against.parts.keys()


def test_the_race_is_about_the_ssd_lane() -> None:
    """What the page compares and explains is the standard lane and SSD, not the lane between them."""
    events = [
        replace(event, extra=replace(event.extra, id=7))
        if isinstance(event, Verified) and event.lane == "speculative" and event.extra
        else event
        for event in ssd_story()
    ]
    log = records(event for event in events if event.type != "finished")
    assert of(log, "same")[-1]["at"] is None
    (insight,) = of(records(ssd_story()), "insight")
    ssd = fold(event for event in ssd_story() if event.lane == "ssd")
    assert insight["histogram"] == list(ssd.accepted_histogram)


SAMPLED: dict[str, object] = {"temperature": 1.0}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, True),
        ({"saguaro": 0.5}, False),
        ({"fallback": "prompt-lookup"}, False),
        ({"adaptive": True}, False),
        ({"verification": "block"}, False),
    ],
)
def test_a_sampled_race_tells_whether_ssd_drew_what_speculative_decoding_drew(
    settings: dict[str, object], told: bool
) -> None:
    """With equal seeds they draw alike, unless the settings make them propose differently."""
    log = records(ssd_story(settings={**SAMPLED, **settings}), greedy=False)
    assert of(log, "same") == []
    twins = of(log, "twin")
    assert bool(twins) == told
    if told:
        assert twins[-1] == {"k": "twin", "n": 9, "at": None, "final": True, "cut": False}


def test_a_lane_beside_it_that_drafts_otherwise_draws_otherwise() -> None:
    events = [
        replace(event, method="prompt-lookup") if isinstance(event, Started) and event.lane == "speculative" else event
        for event in ssd_story(settings=SAMPLED)
    ]
    assert of(records(events, greedy=False), "twin") == []


def test_a_projection_is_that_of_the_events_and_says_whose_latencies() -> None:
    events = ssd_story()
    found = of(records(events), "projection")
    assert [record["profile"] for record in found] == [MEASURED, *PROFILES]
    for record in found:
        expected = project(events, record["profile"])
        assert record["error"] == pytest.approx(expected.error, rel=1e-2)
        assert [row[0] for row in record["lanes"]] == list(LANES)
        assert [row[1] for row in record["lanes"]] == [
            pytest.approx(1 / lane.tpot_s, rel=1e-3) for lane in expected.lanes
        ]
        assert [row[3] for row in record["lanes"]] == [lane.devices for lane in expected.lanes]
        assert record["lanes"][0][2] == 1.0


def test_what_was_measured_with_a_card_for_each_model_is_not_projected() -> None:
    events = [
        replace(event, speculation=replace(event.speculation, overlap="card"))
        if isinstance(event, Verified) and event.speculation
        else event
        for event in ssd_story()
    ]
    log = records(events)
    assert [record["profile"] for record in of(log, "projection")] == [*PROFILES]
    assert {record["p"] for record in of(log, "cache")} == {"card"}
    assert of(log, "ssd")[-1]["overlap"] == "card"


def test_each_way_to_draft_ahead_has_its_words() -> None:
    for language in ("en", "zh"):
        keys = {f"{about}_{way}" for about in ("ssd_overlap", "ssd_cause_verify") for way in get_args(Overlap)}
        assert keys <= set(strings(language))


def test_a_projection_that_does_not_hold_shows_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdemo.projection.GREATEST_ERROR", 0.01)
    (found,) = of(records(ssd_story()), "projection")
    assert found["lanes"] == []
    assert found["error"] > 0.01


def test_nothing_is_projected_of_a_race_that_lacks_a_lane() -> None:
    events = [event for event in ssd_story() if event.lane != "speculative"]
    assert of(records(events), "projection") == []


def test_a_race_of_two_lanes_tells_nothing_of_a_third() -> None:
    lanes = [Script(name).start().first("a").round(extra=" b").round(extra=" c").finish() for name in LANES[:2]]
    log = records(interleaved(*lanes))
    assert not of(log, "cache") + of(log, "ssd") + of(log, "twin")
    assert {record["l"] for record in log if "l" in record} == {0, 1}
    assert "w" not in of(log, "ratio")[-1]


@pytest.mark.parametrize("write", [as_lines, as_page], ids=["lines", "page"])
def test_a_kept_race_shows_the_same(write: Any) -> None:
    recording = Recording(ssd_story(settings={"max_new_tokens": 64, "temperature": 0.0}), "Count.")
    back = read(write(recording))
    kinds = ("cache", "ratio", "ssd", "round")
    logs = [list(map(json.loads, replayed(one).splitlines())) for one in (recording, back)]
    assert [of(logs[0], kind) for kind in kinds] == [of(logs[1], kind) for kind in kinds]
    assert of(logs[0], "ssd")


def test_a_single_ssd_lane_of_the_command_line_is_shown_as_one() -> None:
    events = [event for event in ssd_story(settings={"max_new_tokens": 64}) if event.lane == "ssd"]
    log = list(map(json.loads, replayed(read(as_lines(Recording(events)))).splitlines()))
    assert {record["l"] for record in log if "l" in record} == {2}
    (told,) = of(log, "ssd")
    assert told["against"] is None


def test_the_settings_of_ssd_have_defaults_in_the_form_that_are_those_of_a_run() -> None:
    from specdemo.ui.form import DEFAULTS

    usual = Settings()
    for name in ("fan_out", "fan_out_budget", "saguaro", "fallback"):
        assert DEFAULTS[name] == getattr(usual, name)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_race_that_was_really_run(temperature: float) -> None:
    """What the engines tell is what the page understands, and what SSD draws is what speculative decoding draws."""
    from tiny import TableLM, decode, letters, make_job, random_table

    table = random_table(0, 8)
    target, draft = TableLM(table, context=2000), TableLM(table + random_table(5, 8, scale=0.8), context=2000)
    settings = Settings(temperature=temperature, max_new_tokens=40, draft_length=3, fan_out_budget=4)
    events: list[Event] = []
    for lane in LANES:
        job = make_job(target, [0, 1, 2], settings, letters(8), lane=lane, method=lane)
        events += decode(job, lane, draft)
    log = records(read(as_lines(Recording(events))).events, greedy=temperature == 0.0)
    caches = of(log, "cache")
    assert {record["h"] for record in caches} == {True, False}
    for record in caches:
        assert sum(taken for _, _, _, taken in record["g"]) == record["h"]
        assert record["f"] == [sum(kept == place for kept, *_ in record["g"]) for place in range(len(record["f"]))]
        if record["h"]:
            (taken,) = [guess for guess in record["g"] if guess[3]]
            assert taken[:2] == record["o"]
    hits = {record["n"]: record["h"] for record in caches}
    drafts = [record for record in of(log, "why") if record["l"] == 2 and record.get("o")]
    assert [record["o"] == "cache" for record in drafts] == [hits.get(record["n"] - 1, False) for record in drafts]
    same = of(log, "same" if temperature == 0.0 else "twin")[-1]
    assert (same["at"], same["n"], same["final"]) == (None, 40, True)
    (told,) = of(log, "ssd")
    assert told["hits"] + told["misses"] == len(caches)
    assert told["against"]["parts"]
