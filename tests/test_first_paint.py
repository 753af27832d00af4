"""The recorded race that stands on the page before any model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from race_logs import RECORDED, log_of, shown, story

from specdemo import trace
from specdemo.metrics import fold, speedup
from specdemo.ui.recorded import TRACES, first_race

if TYPE_CHECKING:
    from stage_tab import OpenStage

pytest_plugins = ("stage_tab",)


def lines(log: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.splitlines()]


def keep(folder: Path) -> None:
    trace.write(folder / "first-race.jsonl", story(settings={"max_new_tokens": 64, "temperature": 0.0}))
    (folder / "first-race.json").write_text(json.dumps(RECORDED))


def test_the_committed_race_is_whole_and_says_where_it_was_recorded() -> None:
    told = lines(first_race())
    assert [line["k"] for line in told[:3]] == ["log", "recorded", "race"]
    about = told[1]
    assert {"prompt", "date", "processor", "cores", "torch"} <= set(about)
    assert told[-1] == {"k": "done", "ok": True}
    events = list(trace.read(TRACES / "first-race.jsonl"))
    lanes = [fold(event for event in events if event.lane == lane) for lane in ("standard", "speculative")]
    ratio = speedup(*lanes)
    assert ratio is not None
    assert next(line["v"] for line in reversed(told) if line["k"] == "ratio") == pytest.approx(ratio, rel=1e-3)
    assert next(line for line in told if line["k"] == "insight")


def test_the_page_does_without_a_recorded_race(tmp_path: Path) -> None:
    assert first_race(tmp_path) == ""


@pytest.mark.parametrize("damage", ["not a trace\n", '{"type": "started"}\n', "\n"])
def test_a_damaged_recording_is_left_out(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    keep(tmp_path)
    assert lines(first_race(tmp_path))[1]["processor"] == "Abacus 9000"
    (tmp_path / "first-race.jsonl").write_text(damage)
    assert first_race(tmp_path) == ""
    assert "cannot be shown" in caplog.text


@pytest.mark.browser
def test_it_plays_at_once_and_is_labelled(stage: OpenStage) -> None:
    tab = stage(log_of(story(), recorded=True))
    label = tab.locator(".sd-recorded").inner_text()
    for word in ("recorded", "2 cores", "Abacus 9000", "Nov 29, 2026", "Count to seven."):
        assert word.lower() in label.lower(), word
    assert "Pause" in tab.locator(".sd-play").inner_text()
    assert tab.locator(".sd-speed-choice").input_value() == "0.05"  # slowed down until one can follow
    tab.locator(".sd-play").click()
    tab.evaluate("specdemo.stage.player.finish()")
    assert shown(tab, "speculative") == "A b c d e f g"
    assert tab.locator(".sd-lesson").is_visible()


@pytest.mark.browser
def test_it_stands_still_for_those_who_want_no_motion(stage: OpenStage) -> None:
    tab = stage(log_of(story(), recorded=True), reduced_motion="reduce")
    assert "Play" in tab.locator(".sd-play").inner_text()
    assert shown(tab, "standard") == "A b c d e f g"


@pytest.mark.browser
def test_a_race_of_ones_own_takes_its_place(stage: OpenStage) -> None:
    tab = stage(log_of(story(), recorded=True))
    tab.evaluate("log => specdemo.stage.read(log)", log_of(story()).replace('"a race"', '"another"'))
    assert tab.locator(".sd-recorded").is_hidden()
    assert tab.locator(".sd-lesson").is_visible()
    assert "Play" in tab.locator(".sd-play").inner_text()


@pytest.mark.browser
def test_a_hostile_recorded_prompt_stays_text(stage: OpenStage) -> None:
    hostile = "<img src=x onerror='window.pwned=1'>${window.pwned=1}{{x}}"
    log = log_of(story(), recorded=True).replace('"Count to seven."', json.dumps(hostile).replace("<", "\\u003c"))
    tab = stage(log)
    assert tab.locator(".sd-recorded-prompt").inner_text() == hostile
    assert tab.evaluate("window.pwned") is None
