"""The benchmark of the page's stream: its script tells what it promises, on time, and its figures are read rightly."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

from bench import page_stream
from bench.page_stream import LANES, ScriptedArena, cpu_seconds, descendants, growth_of, scripted, speeds_of
from specdemo import trace
from specdemo.events import Finished, Verified
from specdemo.ui.form import DEFAULTS
from specdemo.ui.page import Page, build
from specdemo.ui.view import RaceView


@pytest.mark.parametrize(("tokens", "rate"), [(200, 50.0), (2000, 200.0)])
def test_the_script_writes_half_of_the_tokens_in_each_lane_on_time(tokens: int, rate: float) -> None:
    timed = scripted(tokens, rate)
    events = [event for _, event in timed]
    trace.check(list(trace.with_metrics(events)))
    ends = {event.lane: event for event in events if isinstance(event, Finished)}
    assert {lane: len(ends[lane].token_ids) for lane in LANES} == dict.fromkeys(LANES, tokens // 2)
    assert all(a <= b for (a, _), (b, _) in pairwise(timed))
    assert max(due for due, _ in timed) == pytest.approx(tokens / rate)
    fates = {token.fate for event in events if isinstance(event, Verified) for token in event.judged}
    assert fates == {"accepted", "rejected", "discarded"}


def test_the_page_stands_over_the_scripted_race() -> None:
    arena = ScriptedArena(8, 1000.0)
    assert build(arena).fns
    *_, log = Page(arena).race("v", page_stream.form(8))
    assert [line for line in log.splitlines() if '"k":"end"' in line and '"why":"length"' in line][1:]


def test_growth_is_of_the_stream_and_not_of_its_last_message() -> None:
    even = [(5.0 + i / 20, 1000) for i in range(200)]
    assert growth_of([*even, (15.2, 250_000)], 10.0) == pytest.approx(1.0, abs=0.1)
    assert growth_of([(at, size * (i + 1)) for i, (at, size) in enumerate(even)], 10.0) > 3


def test_speeds_are_the_last_that_the_log_tells() -> None:
    view, log = RaceView(100, True), ""
    for _, event in scripted(200, 50.0):
        view.add(event)
        log += view.flush()
    speeds = speeds_of(log + view.done())
    assert speeds == {lane: pytest.approx(25.0, rel=0.02) for lane in LANES}


def test_the_measured_race_asks_for_what_the_form_has() -> None:
    assert set(page_stream.form(64)) == {"prompt", *DEFAULTS}
    assert page_stream.form(64)["max_new_tokens"] == 64


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the bench reads Linux's counters")
def test_processor_time_is_that_of_the_process() -> None:
    before = cpu_seconds(os.getpid())
    while cpu_seconds(os.getpid()) < before + 0.05:
        sum(range(10_000))
    assert os.getpid() not in descendants(os.getpid())
    assert cpu_seconds(2**22 + 1) == 0.0
