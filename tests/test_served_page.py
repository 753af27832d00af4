"""The page over served lanes: its log, its file, and a race in Chromium against recorded servers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from race_logs import shown
from served_arenas import CODE, DATA, GROUNDED, Served, served

from bench.recorded_server import Recorded, read, running
from specdemo.errors import BadRequest
from specdemo.ui import export
from specdemo.ui.form import DEFAULTS
from specdemo.ui.line import Line
from specdemo.ui.page import WAITING_A_SEAT, Page, build, launch_options, limits_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from playwright.sync_api import Page as Tab

ROOT = Path(__file__).parents[1]
FORM: dict[str, Any] = {**DEFAULTS, "prompt": GROUNDED}


def log_of(both: Served, kind: str = "race", **changes: Any) -> list[dict[str, Any]]:
    page = Page(both.arena)
    both.arena.load()
    *_, log = getattr(page, kind)("v", {**FORM, **changes})
    return [json.loads(line) for line in log.splitlines()]


def of(records: list[dict[str, Any]], kind: str, lane: int = 1) -> list[dict[str, Any]]:
    return [record for record in records if record["k"] == kind and record.get("l") == lane]


# -- the log -----------------------------------------------------------------------------------------------------------


def test_pieces_come_first_and_rounds_at_the_end() -> None:
    with served() as both:
        records = log_of(both)
    kinds = [record["k"] for record in records if record.get("l") == 1]
    assert kinds.index("piece") < kinds.index("retold") < kinds.index("round") < kinds.index("end")
    text = "".join(record["x"] for record in of(records, "piece"))
    assert text.startswith("The old lighthouse keeper")
    rounds = of(records, "round")
    again = of(records, "first")[0]["x"] + "".join(
        "".join(string for string, fate in record["j"] if fate == "a") + record.get("x", "") for record in rounds
    )
    assert again == text
    assert records[-1] == {"k": "done", "ok": True}


def test_what_is_refused_is_a_counted_ghost_and_p_is_not_known() -> None:
    with served() as both:
        records = log_of(both, prompt=CODE)
    refused = [string for record in of(records, "round") for string, fate in record["j"] if fate in "rd"]
    assert set(refused) == {"□"}
    assert len(refused) == 168 - 27
    for why in of(records, "why"):
        assert why["x"][:2] == [None, None]
        assert all(token[:6] == [None] * 6 for token in why.get("j", []))
    assert "r" not in of(records, "why")[0]


def test_the_lane_says_that_it_is_measured_at_the_client() -> None:
    with served() as both:
        records = log_of(both)
    lane = of(records, "lane")[0]
    assert (lane["clock"], lane["method"], lane["path"]) == ("client", "served", "vLLM 0.32.0")
    assert lane["network"] > 0
    assert [record["served"] for record in records if record["k"] == "same"][-1]
    assert any("□" in note for note in of(records, "end")[0]["notes"])


def test_texts_without_ids_are_not_compared_token_by_token() -> None:
    with served("without", model=None) as both:
        for answer in both.speculative.answers.values():
            if "lines" in answer:
                answer["lines"] = [(t, line.replace('"token_ids"', '"ids"')) for t, line in answer["lines"]]
        records = log_of(both)
    assert not [record for record in records if record["k"] == "same" and record["final"]]
    assert of(records, "numbers")[-1]["tokens"] == 34
    assert of(records, "numbers")[-1]["rounds"] is None


def test_a_kept_race_holds_its_rounds_and_no_pieces() -> None:
    with served() as both:
        page = Page(both.arena)
        both.arena.load()
        for _ in page.race("v", FORM):
            pass
    recording = page.shelf.get("v")
    assert recording is not None
    lines = export.as_lines(recording)
    assert '"arrived"' not in lines
    for text in (lines, export.as_page(recording)):
        back = export.read(text)
        assert {event.type for event in back.events} >= {"started", "prefilled", "verified", "finished"}
        kinds = {json.loads(line)["k"] for line in export.replayed(back).splitlines()}
        assert not kinds & {"piece", "retold"}


def test_comparing_methods_is_not_offered() -> None:
    with served() as both:
        records = log_of(both, "compare")
    assert "no others to compare" in records[-2]["message"]


# -- many visitors -----------------------------------------------------------------------------------------------------


def test_a_line_with_seats_lets_so_many_race_in_order_of_arrival() -> None:
    line = Line(room=2, seats=3)
    for visitor in "abcde":
        line.join(visitor)
    assert [line.place(visitor) for visitor in "abcde"] == [0, 0, 0, 1, 2]
    with pytest.raises(BadRequest, match="The line is full"):
        line.join("f")
    line.leave("b", ran=30.0)
    assert [line.place(visitor) for visitor in "acde"] == [0, 0, 0, 1]
    assert line.expected_wait(1) == 10


def test_two_hundred_visitors_have_room_and_threads() -> None:
    limits = limits_of(public=False, seats=8)
    assert limits.waiting + 8 == (WAITING_A_SEAT + 1) * 8 == 200
    assert limits.waiting_an_address >= 200
    assert limits_of(public=True, seats=8).waiting_an_address < 20
    assert launch_options(seats=8)["max_threads"] > 200
    assert "max_threads" not in launch_options()


def test_what_a_server_decides_is_not_asked() -> None:
    async def inside_a_loop() -> Any:  # else Gradio makes loops that nobody closes
        return build(both.arena, seats=both.arena.seats)

    with served() as both:
        blocks = asyncio.run(inside_a_loop())
    visible = {c["props"].get("label"): c["props"].get("visible", True) for c in blocks.config["components"]}
    assert [visible[label] for label in ("Drafter", "Verification", "Adapt K to what gets accepted")] == [False] * 3
    assert visible["Temperature"]
    assert "models" not in {c["props"].get("elem_id") for c in blocks.config["components"]}


# -- in the browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The page as `app.py --served` starts it, before two recorded servers."""
    servers = [Recorded(read(DATA / f"vllm-{kind}.json"), 4.0) for kind in ("standard", "detailed")]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with running(servers[0]) as a, running(servers[1]) as b:
        app = subprocess.Popen(
            [sys.executable, str(ROOT / "app.py"), "--port", str(port), "--served", f"standard={a},speculative={b}"],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            text=True,
        )
        try:
            assert app.stdout is not None
            yield next(word for word in app.stdout.readline().split() if word.startswith("http"))
        finally:
            app.kill()
            app.communicate()


@pytest.fixture(scope="module")
def tab(browser: Browser, address: str) -> Iterator[Tab]:
    """A served race that is over."""
    tab = browser.new_page(viewport={"width": 1360, "height": 1600})
    tab.set_default_timeout(60_000)
    tab.goto(address)
    tab.wait_for_selector('.sd-status[data-state="ready"]')
    tab.fill("#ask textarea", CODE)
    tab.locator("#race-button").click()
    tab.wait_for_function("document.querySelectorAll('[data-place=piece]').length > 3")
    tab.wait_for_function("document.body.dataset.race === 'idle'")
    yield tab
    tab.close()


@pytest.mark.browser
def test_a_served_race_is_drawn_with_counted_ghosts(tab: Tab) -> None:
    lane = tab.locator('[data-lane="speculative"]')
    assert lane.locator(".sd-output .sd-untold").count() == 168 - 27
    assert lane.locator(".sd-output .sd-accepted").count() == 27
    assert tab.locator("[data-place=piece]").count() == 0
    assert shown(tab, "standard") == shown(tab, "speculative")
    said = lane.inner_text()
    assert "Measured at the client." in said
    assert "each is shown as □" in said
    assert "by the wall clock" in tab.locator(".sd-clock-note").inner_text()


@pytest.mark.browser
def test_the_panel_says_that_p_and_q_are_not_known(tab: Tab) -> None:
    for lane, kind in (("speculative", "rejected"), ("speculative", "accepted"), ("standard", "plain")):
        tab.locator(f'[data-lane="{lane}"] .sd-output .sd-{kind}', has_text=re.compile(r"\w|□")).last.click()
        panel = tab.locator(".sd-why")
        assert "p, q and the draw are not known here" in panel.inner_text()
        assert panel.locator(".sd-gauge, table").count() == 0
        tab.keyboard.press("Escape")


@pytest.mark.browser
def test_the_same_in_chinese(tab: Tab) -> None:
    tab.locator('.sd-language[data-language="zh"]').click()
    said = tab.locator('[data-lane="speculative"]').inner_text()
    assert "在客户端测量" in said
    assert "每个显示为 □" in said
    tab.locator('[data-lane="speculative"] .sd-output .sd-rejected').first.click()
    assert "这条泳道由服务器解码" in tab.locator(".sd-why").inner_text()
    tab.keyboard.press("Escape")
    tab.locator('.sd-language[data-language="en"]').click()
