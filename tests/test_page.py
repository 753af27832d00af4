"""The page: its handlers alone, then all of it in Chromium against scripted races."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import gradio as gr
import pytest
from fake_lanes import FakeArena, FakeStatus, Script, echo_race, interleaved
from race_logs import RECORDED, log_of, story

from specdemo.errors import BadRequest
from specdemo.events import Failed
from specdemo.metrics import fold
from specdemo.ui import page as page_module
from specdemo.ui.form import DEFAULTS
from specdemo.ui.page import Line, Page, build, launch_options, race_request, strings

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext
    from playwright.sync_api import Page as Tab

FORM: dict[str, Any] = {**DEFAULTS, "prompt": "one two three four five six seven", "max_new_tokens": 64}

HOSTILE = (
    '<img src=x onerror="window.pwned=1"> </div></span><style>body{display:none}</style> ${window.pwned=1} '
    "{{#each value}}{{this}}{{/each}} <script>window.pwned=1</script> \\` &lt;b&gt; `${alert(1)}` end"
)


# -- handlers ---------------------------------------------------------------------------------------------------


def read(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines()]


def run(page: Page, visitor: str = "v", **changes: Any) -> list[dict[str, Any]]:
    """The records of a whole race."""
    *_, log = page.race(visitor, {**FORM, **changes})
    return read(log)


def test_form_becomes_a_request() -> None:
    request = race_request({**FORM, "draft_length": 3.0, "temperature": 0.5, "stop": "END\n\nStop it", "raw": True})
    assert (request.prompt, request.method, request.raw) == (FORM["prompt"], "speculative", True)
    assert (request.settings.draft_length, request.settings.temperature) == (3, 0.5)
    assert request.settings.stop == ("END", "Stop it")


@pytest.mark.parametrize("name", FORM)
def test_whatever_is_posted_gets_a_sentence_or_a_race(name: str) -> None:
    """Handlers are reached by raw posts too, where any JSON can stand for any field."""
    for value in (None, [], {"a": 1}, 1e400, "<b>", -1, 0.5, True):
        log = run(Page(FakeArena(0)), **{name: value})
        errors = [record["message"] for record in log if record["k"] == "error"]
        assert all("fault of ours" not in message for message in errors)
        assert bool(errors) != any(record["k"] == "race" for record in log)
        assert log[-1]["k"] == "done"


def test_missing_fields_get_a_sentence() -> None:
    *_, log = Page(FakeArena(0)).race("v", {})
    assert [record["k"] for record in read(log)] == ["log", "error", "done"]


def test_log_only_grows() -> None:
    logs = list(Page(FakeArena(0.01)).race("v", FORM))
    assert len(logs) > 3
    assert all(b.startswith(a) for a, b in pairwise(logs))
    assert len({log.split("\n", 1)[0] for log in logs}) == 1


def test_each_race_has_a_log_of_its_own() -> None:
    page = Page(FakeArena(0))
    assert run(page)[0] != run(page)[0]


def test_updates_keep_their_distance() -> None:
    """At most 20 a second, and fewer where the consumer is slow, so that the page never takes the race's time."""
    arena, times = FakeArena(0.001), []
    arena.scripts["long"] = echo_race([f"w{i}" for i in range(300)])
    for _ in Page(arena).race("v", {**FORM, "prompt": "long"}):
        times.append(time.monotonic())
    assert min(b - a for a, b in pairwise(times[:-1])) >= 0.045

    began = time.monotonic()
    count = 0
    for _ in Page(arena).race("v", {**FORM, "prompt": "long"}):
        time.sleep(0.02)
        count += 1
    assert 0.02 * count < 0.2 * (time.monotonic() - began)


def test_the_queue_rests_between_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left alone, Gradio looks at it a thousand times a second: a tenth of a processor, taken from the models."""
    sleep, slept = asyncio.sleep, []

    async def counted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(seconds)

    async def loops() -> None:
        queue = build(FakeArena(0))._queue
        monkeypatch.setattr(asyncio, "sleep", counted)
        looking = asyncio.gather(queue.start_processing(), queue.start_progress_updates())
        await sleep(0.5)
        queue.close()
        await looking

    asyncio.run(loops())
    assert 2 <= len(slept) <= 20  # else the queue was not looked after, or too much


def test_a_crash_becomes_a_sentence_and_the_next_race_runs() -> None:
    arena = FakeArena(0)
    page = Page(arena)
    assert "fault of ours (RuntimeError)" in run(page, prompt="crash")[-2]["message"]
    assert arena.running == 0
    assert run(page)[-1] == {"k": "done", "ok": True}


def test_an_abandoned_race_frees_models_and_line() -> None:
    arena = FakeArena(0)
    page = Page(arena)
    race = page.race("gone", {**FORM, "prompt": "slow"})
    next(race), next(race)
    assert arena.running == 1
    race.close()
    assert arena.running == 0
    assert page.line.place("gone") is None
    assert run(page, "next")[-1]["ok"]


def test_line_is_first_come_first_served_and_bounded() -> None:
    line = Line(room=2)
    for visitor in "abc":
        line.join(visitor)
    assert [line.place(visitor) for visitor in "abcd"] == [0, 1, 2, None]
    with pytest.raises(BadRequest, match=r"full \(2 people"):
        line.join("d")
    with pytest.raises(BadRequest, match="not ended yet"):
        line.join("b")
    line.leave("a")
    assert [line.place(visitor) for visitor in "bc"] == [0, 1]
    line.join("d")


def test_one_who_waits_is_told_the_place_and_can_leave() -> None:
    page = Page(FakeArena(0))
    page.line.join("first")
    race = page.race("second", FORM)
    assert read(next(race))[-1] == {"k": "wait", "why": "line", "place": 1}
    page.stop("second")
    *_, log = race
    assert [record["k"] for record in read(log)][-2:] == ["wait", "done"]
    assert read(log)[-2]["why"] == "stopped"
    assert page.line.place("second") is None


def test_a_new_race_of_the_same_visitor_ends_the_old_one() -> None:
    arena = FakeArena(0)
    page = Page(arena)
    logs: list[str] = []
    old = threading.Thread(target=lambda: logs.extend(page.race("v", {**FORM, "prompt": "slow"})))
    old.start()
    while not arena.running:
        time.sleep(0.01)
    assert run(page, "v")[-1]["ok"]
    old.join(timeout=5)
    assert [record["why"] for record in read(logs[-1]) if record["k"] == "end"] == ["cancelled", "cancelled"]
    assert arena.most_running == 1


def test_stop_does_not_reach_other_visitors() -> None:
    page = Page(FakeArena(0))
    race = page.race("a", {**FORM, "prompt": "slow"})
    next(race), next(race)
    page.stop("b")
    log = next(race)
    assert read(log)[-1]["k"] != "done"
    page.stop("a")
    *_, log = race
    assert [record["why"] for record in read(log) if record["k"] == "end"] == ["cancelled", "cancelled"]


def test_a_stop_from_before_does_not_end_the_next_race() -> None:
    page = Page(FakeArena(0))
    page.stop("v")
    assert run(page)[-1]["ok"]


def test_models_that_cannot_load_are_reported() -> None:
    arena = FakeArena(0)
    arena.status = FakeStatus("failed", "No network.")
    assert run(Page(arena))[-2]["message"].endswith("No network.")


def test_status_line_says_ready_while_others_race() -> None:
    arena = FakeArena(0)
    page = Page(arena)
    assert json.loads(page.status()) == {"state": "ready", "message": "tiny-target on cpu"}
    arena.status = FakeStatus("busy", "A race is running")
    assert json.loads(page.status()) == {"state": "ready", "message": "tiny-target on cpu"}
    arena.status = FakeStatus("loading", "Fetching", 0.25)
    assert json.loads(page.status())["progress"] == 0.25


def test_every_text_the_script_asks_for_exists() -> None:
    source = page_module.script()
    asked = set(re.findall(r'\btext\("([a-z_-]+)"', source))
    assert asked
    assert asked <= set(strings())


def test_nothing_of_gradio_runs_that_was_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSR_MODE", "MCP_SERVER", "RUN_HISTORY", "ANALYTICS_ENABLED", "SHARE"):
        monkeypatch.setenv(f"GRADIO_{name}", "True")

    async def inside_a_loop() -> gr.Blocks:  # outside one, Gradio makes loops of its own and never closes them
        return build(FakeArena(0))

    blocks = asyncio.run(inside_a_loop())
    assert blocks.analytics_enabled is False
    options = launch_options()
    wanted_off = ("ssr_mode", "mcp_server", "run_history", "enable_monitoring", "pwa", "show_error")
    assert [options[name] for name in wanted_off] == [False] * len(wanted_off)
    assert [fn.api_name for fn in blocks.fns.values() if fn.api_visibility != "private"] == ["race"]


# -- in a browser -----------------------------------------------------------------------------------------------


def in_browser(test: Callable[..., None]) -> Callable[..., None]:
    # Gradio's server counts its calls with pandas, in ways that pandas is about to drop
    quiet = pytest.mark.filterwarnings("ignore:.*(no_silent_downcasting|copy keyword is deprecated):DeprecationWarning")
    return pytest.mark.browser(quiet(test))


@dataclass
class Site:
    arena: FakeArena
    url: str


@pytest.fixture(scope="module")
def site(browser: Browser) -> Iterator[Site]:
    """A server with scripted races. Playwright's event loop is the one that Gradio finds: it must start first."""
    arena = FakeArena()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_module, "first_race", lambda: log_of(story(), recorded=True))
        blocks = build(arena)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    _, url, _ = blocks.launch(
        server_name="127.0.0.1", server_port=port, share=False, prevent_thread_lock=True, **launch_options()
    )
    yield Site(arena, url)
    blocks.close(verbose=False)


@pytest.fixture(scope="module")
def visit(site: Site, browser: Browser) -> Iterator[Callable[[], Tab]]:
    """Open the page as a new visitor. Errors in its script, and requests to any other server, fail the module."""
    faults: list[str] = []
    visitors: list[BrowserContext] = []

    def ours(url: str) -> bool:
        return url.startswith((site.url, "data:", "blob:"))

    def open_tab() -> Tab:
        # a browser of one's own each: tabs of one browser share six connections, and each tab holds two
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.set_default_timeout(40_000)
        visitors.append(context)
        tab = context.new_page()
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("request", lambda request: faults.append(request.url) if not ours(request.url) else None)
        tab.goto(site.url)
        tab.wait_for_selector('[data-lane="speculative"]')
        tab.wait_for_selector(".sd-status[data-state]")
        return tab

    yield open_tab
    for context in visitors:
        context.close()
    assert faults == []


@pytest.fixture(scope="module")
def tab(visit: Callable[[], Tab]) -> Tab:
    """One visitor for all tests that leave the page idle."""
    return visit()


def race(tab: Tab, prompt: str) -> None:
    tab.locator("#ask textarea").fill(prompt)
    tab.locator("#race-button").click()


def finish(tab: Tab) -> None:
    tab.wait_for_function("document.body.dataset.race === 'idle'")


def kept(tab: Tab, lane: str) -> str:
    """The lane's text by the document itself."""
    spans = tab.locator(f'[data-lane="{lane}"] .sd-token:not([aria-hidden])').all_text_contents()
    return "".join(spans)


def state(tab: Tab, lane: str) -> str:
    return tab.locator(f'[data-lane="{lane}"]').get_attribute("data-state") or ""


def stat(tab: Tab, lane: str, name: str) -> str:
    return tab.locator(f'[data-lane="{lane}"] [data-stat="{name}"] dd').inner_text()


def banner(tab: Tab) -> str:
    return tab.locator(".sd-banner").inner_text()


PROMPT = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


@in_browser
def test_a_race_is_drawn_in_both_lanes(tab: Tab) -> None:
    race(tab, PROMPT)
    finish(tab)
    assert kept(tab, "standard") == kept(tab, "speculative") == PROMPT
    fates = tab.locator('[data-lane="speculative"] .sd-output .sd-token').evaluate_all(
        "spans => spans.map(span => span.dataset.fate)"
    )
    assert {"accepted", "rejected", "discarded", "recovered", "bonus", "plain"} <= set(fates)
    rejected = tab.locator('[data-lane="speculative"] .sd-output .sd-rejected').first
    assert rejected.get_attribute("aria-hidden") == "true"
    style = "span => [getComputedStyle(span).textDecorationLine, getComputedStyle(span).userSelect]"
    assert rejected.evaluate(style) == ["line-through", "none"]
    assert not tab.locator('[data-lane="standard"] .sd-output .sd-rejected').count()

    assert stat(tab, "standard", "tokens") == stat(tab, "speculative", "tokens") == "14"
    for name in ("ttft", "time", "acceptance", "alpha", "length", "rounds"):
        assert re.match(r"\d", stat(tab, "speculative", name)), name
    speeds = [float(tab.locator(f'[data-score="{lane}"] .sd-speed-value').inner_text()) for lane in LANE_NAMES]
    ratio = float(tab.locator(".sd-ratio-value").inner_text().rstrip("×"))
    assert ratio == pytest.approx(speeds[1] / speeds[0], abs=0.02)
    assert "Texts equal, token for token: 14 tokens" in tab.locator(".sd-same").inner_text()
    runs = tab.locator('[data-lane="speculative"] .sd-runs').inner_text()
    assert all(word in runs for word in ("tiny-target", "float32", "lean", "cpu", "prompt lookup", "Scripted"))


LANE_NAMES = ("standard", "speculative")


@in_browser
def test_what_was_not_kept_can_be_hidden(tab: Tab) -> None:
    race(tab, PROMPT)
    finish(tab)
    refused = tab.locator('[data-lane="speculative"] .sd-output [aria-hidden]')
    assert refused.first.is_visible()
    tab.locator(".sd-only-kept").check()
    assert not any(span.is_visible() for span in refused.all())
    assert tab.locator('[data-lane="speculative"] .sd-output').inner_text() == PROMPT


@in_browser
def test_stop_ends_the_race_and_the_next_one_runs(site: Site, tab: Tab) -> None:
    race(tab, "slow")
    tab.wait_for_function(
        "Number(document.querySelector('[data-lane=standard] [data-stat=tokens] dd').textContent) > 5"
    )
    assert tab.locator("#race-button").is_disabled()
    pressed = time.monotonic()
    tab.locator("#stop-button").click()
    finish(tab)
    assert time.monotonic() - pressed < 5  # of forty
    assert {state(tab, lane) for lane in LANE_NAMES} == {"cancelled"}
    assert "as far as both lanes got" in tab.locator(".sd-same").inner_text()
    assert site.arena.running == 0
    race(tab, PROMPT)
    finish(tab)
    assert kept(tab, "speculative") == PROMPT


@in_browser
def test_closing_the_tab_frees_the_models(site: Site, visit: Callable[[], Tab]) -> None:
    tab = visit()
    race(tab, "slow")
    tab.wait_for_selector(".sd-bonus, .sd-accepted")
    site.arena.most_running = 0
    tab.close()
    other = visit()
    race(other, PROMPT)
    finish(other)
    assert kept(other, "standard") == PROMPT
    assert site.arena.running == 0
    assert site.arena.most_running == 1


@in_browser
def test_second_visitor_sees_the_place_and_gets_the_turn(site: Site, visit: Callable[[], Tab]) -> None:
    first, second, third = visit(), visit(), visit()
    race(first, "slow")
    first.wait_for_selector('[data-lane="standard"][data-state="running"]')
    race(second, PROMPT)
    second.wait_for_function("document.querySelector('.sd-banner').textContent.includes('next in line')")
    race(third, "slow")
    third.wait_for_function("document.querySelector('.sd-banner').textContent.includes('number 2 in line')")
    third.locator("#stop-button").click()
    finish(third)
    assert "before the race began" in banner(third)
    assert state(first, "standard") == "running"
    first.locator("#stop-button").click()
    finish(second)
    assert kept(second, "speculative") == PROMPT
    assert site.arena.running == 0


@in_browser
def test_hostile_text_stays_text(site: Site, tab: Tab) -> None:
    site.arena.scripts["fails"] = [*Script("standard").start().first(HOSTILE).events, Failed("speculative", 0, HOSTILE)]
    for prompt in (HOSTILE, "fails"):
        race(tab, prompt)
        finish(tab)
        assert kept(tab, "standard") == HOSTILE
        assert tab.evaluate("window.pwned") is None
        assert not tab.locator("#stage img, #stage style, #stage script, #stage b").count()
        assert tab.locator("#race-button").is_visible()
    assert tab.locator('[data-lane="speculative"] .sd-lane-error').inner_text() == re.sub(r" +", " ", HOSTILE)


@in_browser
def test_copy_is_the_generated_text(site: Site, tab: Tab) -> None:
    text = "first\u00a0line \n\n\ttabbed  👩‍👩‍👧 é</div>&amp; مرحبا  two  spaces\n\nand\r a line\u2028more \n"
    pieces = re.findall(r"\s*\S+|\s+$", text)
    site.arena.scripts["odd"] = echo_race(pieces)
    assert any(
        event.type == "verified" and event.num_accepted < len(event.judged) for event in site.arena.scripts["odd"]
    )
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    race(tab, "odd")
    finish(tab)
    clipboard = "navigator.clipboard.readText()"
    for lane in LANE_NAMES:
        tab.locator(f'[data-lane="{lane}"] .sd-copy').click()
        tab.wait_for_selector(f'[data-lane="{lane}"] .sd-copy:text("Copied")')
        assert tab.evaluate(clipboard) == text
    tab.evaluate("navigator.clipboard.writeText('')")
    tab.evaluate("getSelection().selectAllChildren(document.querySelector('[data-lane=speculative] .sd-output'))")
    tab.keyboard.press("Control+c")
    assert tab.evaluate(clipboard) == text
    part = """() => {
        const output = document.querySelector('[data-lane=speculative] .sd-output');
        const spans = output.querySelectorAll('.sd-token:not([aria-hidden])');
        getSelection().setBaseAndExtent(spans[0].firstChild, 2, spans[spans.length - 1].firstChild, 0); }"""
    tab.evaluate(part)
    tab.keyboard.press("Control+c")
    assert tab.evaluate(clipboard) == text[2 : -len(pieces[-1])]


@in_browser
def test_late_stop_string_leaves_what_the_lane_ends_with(site: Site, tab: Tab) -> None:
    scripts = []
    for lane in LANE_NAMES:
        script = Script(lane).start().first("🎉 Done").round([(" EN", "accepted"), ("D", "accepted")], " not this")
        scripts.append(script.finish("stop", "🎉 Done ", tokens=2))
    site.arena.scripts["late"] = interleaved(*scripts)
    race(tab, "late")
    finish(tab)
    assert kept(tab, "standard") == kept(tab, "speculative") == "🎉 Done "
    clipped = tab.locator('[data-lane="speculative"] .sd-clipped[aria-hidden]').all_text_contents()
    assert clipped[:3] == ["EN", "D", " not this"]
    assert stat(tab, "speculative", "tokens") == "2"


@in_browser
def test_replay_runs_both_lanes_by_their_own_clocks(visit: Callable[[], Tab]) -> None:
    tab = visit()
    race(tab, PROMPT)
    finish(tab)
    events = echo_race(PROMPT.split(" "))
    tokens = {
        (lane, t): fold(event for event in events if event.lane == lane and event.t <= t).tokens
        for lane in LANE_NAMES
        for t in (0.11, 0.25)
    }
    tab.clock.install(time=0)
    tab.clock.pause_at(1)
    tab.locator(".sd-replay").click()
    assert tab.locator(".sd-replay-note").is_visible()
    for now, step in ((0.11, 110), (0.25, 140)):
        tab.clock.run_for(step)
        for lane in LANE_NAMES:
            drawn = tab.locator(f'[data-lane="{lane}"] .sd-output .sd-token:not([aria-hidden])').count()
            assert abs(drawn - tokens[lane, now]) <= 1  # a frame is 16 ms
    assert len(kept(tab, "standard")) < len(kept(tab, "speculative")) < len(PROMPT)
    tab.clock.run_for(1000)
    assert not tab.locator(".sd-replay-note").is_visible()
    assert kept(tab, "standard") == kept(tab, "speculative") == PROMPT
    tab.locator(".sd-replay").click()
    assert kept(tab, "standard") == ""
    tab.locator(".sd-replay").click()  # skip to the end
    assert kept(tab, "standard") == PROMPT


@in_browser
def test_errors_are_a_sentence_and_the_prompt_stays(tab: Tab) -> None:
    for prompt, message in (("   ", "The prompt is empty"), ("crash", "fault of ours (RuntimeError)")):
        race(tab, prompt)
        tab.wait_for_selector('.sd-banner[role="alert"]')
        finish(tab)
        assert message in banner(tab)
        assert tab.locator("#ask textarea").input_value() == prompt
    race(tab, PROMPT)
    finish(tab)
    assert kept(tab, "standard") == PROMPT
    assert not tab.locator(".sd-banner").is_visible()


@in_browser
def test_races_wait_for_models_that_load(site: Site, visit: Callable[[], Tab]) -> None:
    site.arena.status = FakeStatus("loading", "Fetching the model", 0.4)
    try:
        tab = visit()
        assert "Loading the models" in tab.locator(".sd-status").inner_text()
        assert "Fetching the model" in tab.locator(".sd-status").inner_text()
        # meanwhile a recorded race is there to look at
        assert RECORDED["processor"] in tab.locator(".sd-recorded").inner_text()
        assert tab.locator(".sd-lesson").is_visible()
        race(tab, PROMPT)
        tab.wait_for_function("document.querySelector('.sd-banner').textContent.includes('still loading')")
    finally:
        site.arena.status = FakeStatus("ready", "tiny-target on cpu")
    tab.wait_for_selector('.sd-status[data-state="ready"]')
    finish(tab)
    assert kept(tab, "standard") == PROMPT
    assert tab.locator(".sd-recorded").is_hidden()


@in_browser
def test_one_click_races_the_draft_length_that_a_race_recommends(site: Site, tab: Tab) -> None:
    race(tab, PROMPT)
    finish(tab)
    tab.locator("#ask textarea").fill("something else meanwhile")
    recommended = tab.evaluate("specdemo.stage.story.insight.best")
    asked, log = len(site.arena.requests), tab.evaluate("specdemo.stage.log.head")
    tab.locator(".sd-race-best").click()
    tab.wait_for_function("log => specdemo.stage.log.head !== log", arg=log)
    finish(tab)
    assert len(site.arena.requests) == asked + 1
    request = site.arena.requests[-1]
    assert (request.prompt, request.settings.draft_length) == (PROMPT, recommended)
    assert kept(tab, "speculative") == PROMPT


@in_browser
def test_a_token_of_a_running_race_answers_why(tab: Tab) -> None:
    race(tab, "slow")
    tab.wait_for_selector('[data-lane="speculative"] .sd-bonus')
    tab.wait_for_function("specdemo.stage.story.round(1, 1)?.why")  # it may come a message later than the round
    tab.locator('[data-lane="speculative"] .sd-text').focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    assert "accepted" in tab.locator(".sd-why").inner_text()
    assert tab.locator(".sd-after").is_hidden()
    tab.keyboard.press("Escape")
    tab.locator("#stop-button").click()
    finish(tab)
    assert tab.locator(".sd-after").is_visible()


@in_browser
def test_examples_of_every_category_fill_the_prompt(tab: Tab) -> None:
    for category in ("chat", "code", "grounded", "creative", "multilingual", "hostile"):
        tab.locator(f'.sd-tab[data-category="{category}"]').click()
        tab.locator(".sd-example").first.click()
        tab.wait_for_function("document.querySelector('#ask textarea').value === specdemo.picked")
    assert tab.locator("#ask textarea").input_value().startswith("Repeat exactly: <img")
    assert tab.locator(".sd-example img").count() == 0


@in_browser
def test_a_phone_shows_all_without_scrolling_sideways(tab: Tab) -> None:
    tab.set_viewport_size({"width": 390, "height": 844})
    race(tab, PROMPT + " " + "x" * 300)
    finish(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    # both boxes at one moment: the page may still be scrolling
    boxes = (
        "names => names.map(name => document.querySelector(`[data-lane='${name}']`).getBoundingClientRect().toJSON())"
    )
    lanes = tab.evaluate(boxes, list(LANE_NAMES))
    assert lanes[1]["y"] >= lanes[0]["y"] + lanes[0]["height"]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in lanes)


@in_browser
def test_bytes_on_the_wire_grow_with_the_text_not_with_its_square(site: Site, tab: Tab) -> None:
    site.arena.scripts["long"] = echo_race([f" word{i}" for i in range(300)])
    session, received = tab.context.new_cdp_session(tab), [0]
    session.send("Network.enable")
    session.on("Network.dataReceived", lambda event: received.__setitem__(0, received[0] + event["dataLength"]))
    tab.evaluate("""() => { window.updates = []; const read = specdemo.stage.read.bind(specdemo.stage);
        specdemo.stage.read = (log) => { updates.push([performance.now(), log.length]); read(log); }; }""")
    race(tab, "long")
    finish(tab)
    tab.wait_for_timeout(200)
    updates = tab.evaluate("updates")
    size = updates[-1][1]
    assert size > 20_000
    assert len(updates) > 10
    # the log once in pieces and once whole in Gradio's last message, escaped as JSON in JSON
    assert size < received[0] < 3.5 * size
    seconds = (updates[-1][0] - updates[0][0]) / 1000
    assert len(updates) / seconds <= 21


@in_browser
def test_the_settings_of_ssd_are_shown_where_they_matter(site: Site, visit: Callable[[], Tab]) -> None:
    tab = visit()
    own, factor = tab.locator("#ssd-settings"), tab.locator("#saguaro-setting")
    assert not own.is_visible()
    tab.locator("#settings label", has_text=re.compile(r"^\s*SSD\s*$")).click()
    own.wait_for(state="visible")
    assert not factor.is_visible()  # nothing is drawn at temperature 0
    temperature = tab.locator("#settings .block", has_text="Temperature").locator("input[type=number]")
    temperature.fill("0.8")
    temperature.press("Tab")
    factor.wait_for(state="visible")
    budget = own.locator(".block", has_text="Fan-out budget").locator("input[type=number]")
    budget.fill("8")
    budget.press("Tab")
    own.locator("label", has_text="geometrically").click()
    own.locator("label", has_text="prompt lookup first").click()
    race(tab, PROMPT)
    finish(tab)
    settings, method = site.arena.requests[-1].settings, site.arena.requests[-1].method
    assert (method, settings.temperature, settings.fan_out_budget, settings.saguaro) == ("ssd", 0.8, 8, 1)
    assert (settings.fan_out, settings.fallback) == ("geometric", "prompt-lookup")
    tab.locator("#settings label", has_text="Draft model").first.click()
    own.wait_for(state="hidden")


@in_browser
def test_raw_posts_are_checked_as_the_form_is(site: Site) -> None:
    """Private handlers answer anyone who can post: garbage gets a sentence, not a traceback."""
    config = json.load(urllib.request.urlopen(f"{site.url}config"))
    widest = max(config["dependencies"], key=lambda dependency: len(dependency["inputs"]))

    def post(data: list[Any]) -> list[dict[str, Any]]:
        body = {"data": data, "fn_index": widest["id"], "session_hash": f"raw{len(data)}"}
        request = urllib.request.Request(
            f"{site.url}gradio_api/queue/join", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request).close()
        with urllib.request.urlopen(f"{site.url}gradio_api/queue/data?session_hash=raw{len(data)}") as stream:
            messages = [json.loads(line[6:]) for line in stream if line.startswith(b"data: ")]
        return [message for message in messages if message["msg"] == "process_completed"]

    values = [FORM[name] for name in FORM]
    for position, garbage in ((0, {"a": [None]}), (1, "no-such-method"), (2, 10**9), (4, "hot")):
        data = [*values]
        data[position] = garbage
        (done,) = post(data)
        assert done["success"]
        assert '"k":"error"' in done["output"]["data"][0]
        assert "fault of ours" not in done["output"]["data"][0]
