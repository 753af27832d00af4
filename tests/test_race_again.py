"""A race that is over, looked at again: the player, the lanes that follow it, the round as a picture, the timeline."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from race_logs import log_of, shown, story

from specdemo.events import Drafted, Verified

if TYPE_CHECKING:
    from playwright.sync_api import Page as Tab
    from stage_tab import OpenStage

pytest_plugins = ("stage_tab",)
pytestmark = pytest.mark.browser

# Right lane: A at 50 ms, then rounds that end at 150, 250 and 350 ms. Left lane: a token each 80 ms from 50 to 530 ms.


@pytest.fixture(scope="module")
def tab(stage: OpenStage) -> Tab:
    return stage(log_of(story()))


def press(tab: Tab, key: str) -> None:
    tab.locator(f'.sd-player [data-key="{key}"]').click()


def seek(tab: Tab, seconds: float) -> None:
    tab.evaluate("seconds => specdemo.stage.player.seek(seconds)", seconds)


def boxes(tab: Tab, kind: str) -> list[str]:
    return tab.locator(f".sd-round-grid {kind} .sd-box-text").all_text_contents()


def test_stepping_moves_both_lanes_to_the_end_of_a_round(tab: Tab) -> None:
    seek(tab, 0)
    seen = []
    for _ in range(5):
        press(tab, "forth")
        seen.append((shown(tab, "standard"), shown(tab, "speculative")))
    assert seen == [
        ("A", "A"),
        ("A b", "A b c"),
        ("A b c", "A b c d e f"),
        ("A b c d", "A b c d e f g"),
        ("A b c d e f g", "A b c d e f g"),
    ]
    back = []
    for _ in range(5):
        press(tab, "back")
        back.append(shown(tab, "speculative"))
    assert back == ["A b c d e f g", "A b c d e f", "A b c", "A", ""]


def test_scrubbing_shows_any_moment_and_arrow_keys_step(tab: Tab) -> None:
    scrub = tab.locator(".sd-scrub")
    scrub.fill("500")  # half of 530 ms
    assert (shown(tab, "standard"), shown(tab, "speculative")) == ("A b c", "A b c d e f")
    assert tab.locator('[data-lane="standard"] [data-stat="tokens"] dd').inner_text() == "3"
    assert tab.locator('[data-lane="speculative"]').get_attribute("data-state") == "replay"
    scrub.focus()
    tab.keyboard.press("ArrowRight")
    assert shown(tab, "speculative") == "A b c d e f g"
    tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("ArrowLeft")
    assert shown(tab, "speculative") == "A b c"
    assert "round 1 of 3" in (scrub.get_attribute("aria-valuetext") or "")
    scrub.fill("1000")
    assert tab.locator('[data-lane="speculative"]').get_attribute("data-state") == "eos"


def test_playing_keeps_the_chosen_pace(stage: OpenStage) -> None:
    tab = stage(log_of(story()))
    tab.clock.install(time=0)
    tab.clock.pause_at(1)
    for choice, milliseconds, text in (
        ("1", 160, "A b c"),
        ("0.1", 1600, "A b c"),
        ("round", 2500, "A b c"),
        ("2", 140, "A b c d e f"),
    ):
        seek(tab, 0)
        tab.locator(".sd-speed-choice").select_option(choice)
        tab.locator(".sd-play").click()
        tab.clock.run_for(milliseconds)
        assert shown(tab, "speculative") == text, choice
        tab.locator(".sd-play").click()
        tab.clock.run_for(3000)
        assert shown(tab, "speculative") == text, choice  # paused
    tab.locator(".sd-play").click()
    tab.clock.run_for(2000)
    assert "Play" in tab.locator(".sd-play").inner_text()  # it came to its end and rests


def test_a_round_is_drawn_with_draft_pass_verdicts_and_rollback(tab: Tab) -> None:
    seek(tab, 0.15)
    assert tab.locator(".sd-round h3").inner_text() == "Round 1"
    assert boxes(tab, ".sd-drafted") == ["␣b", "␣x", "␣y"]
    assert "4 positions" in tab.locator(".sd-pass").inner_text()
    words = [word.split()[1] for word in tab.locator(".sd-verdict:not(.sd-verdict-extra)").all_inner_texts()]
    assert words == ["accepted", "rejected", "discarded"]
    assert boxes(tab, ".sd-accepted") == ["␣b"]
    assert boxes(tab, ".sd-recovered") == ["␣c"]
    assert "2 rolled back" in tab.locator(".sd-rollback").inner_text()
    assert "1 of 3 guesses stay" in tab.locator(".sd-round-story").inner_text()


def test_a_round_without_refusal_or_without_draft(tab: Tab) -> None:
    seek(tab, 0.25)
    assert boxes(tab, ".sd-bonus") == ["␣f"]
    assert tab.locator(".sd-rollback").count() == 0
    seek(tab, 0.35)
    assert boxes(tab, ".sd-drafted") == []
    assert "one position" in tab.locator(".sd-pass").inner_text()
    seek(tab, 0)
    assert tab.locator(".sd-round h3").inner_text() == "Reading the prompt"


def test_a_box_of_the_picture_answers_why(tab: Tab) -> None:
    seek(tab, 0.15)
    tab.locator(".sd-round-grid .sd-drafted", has_text="x").click()
    assert "rejected" in tab.locator(".sd-why").inner_text()
    assert tab.locator(".sd-chosen").inner_text().strip() == "x"
    tab.keyboard.press("Escape")


def extents(tab: Tab, lane: str, phase: str) -> list[tuple[float, float]]:
    """Begin and end of each bar of a phase, in seconds."""
    paths = tab.locator(f'[data-time="{lane}"] path.sd-phase-{phase}').evaluate_all(
        "paths => paths.map(p => p.getAttribute('d'))"
    )
    found = [(float(a), float(b)) for path in paths for a, b in re.findall(r"M([\d.e-]+) 0H([\d.e-]+)V", path)]
    return sorted(found)


def test_the_timeline_is_drawn_from_the_measured_phases(tab: Tab) -> None:
    events = [event for event in story() if event.lane == "speculative"]
    drafts = {event.round: event.draft_s for event in events if isinstance(event, Drafted)}
    passes = {event.round: event.verify_s for event in events if isinstance(event, Verified)}
    begins = {1: 0.05, 2: 0.15, 3: 0.25}
    bars = extents(tab, "speculative", "draft")
    assert [pytest.approx(bar, abs=1e-4) for bar in bars] == [(t, t + drafts[n]) for n, t in begins.items()]
    target = extents(tab, "speculative", "verify")
    expected = [(0.0, 0.05), *((t + drafts[n], t + drafts[n] + passes[n]) for n, t in begins.items())]
    assert [pytest.approx(bar, abs=1e-4) for bar in target] == expected
    assert len(extents(tab, "standard", "verify")) == 7


def view_of(tab: Tab) -> tuple[float, float]:
    box = tab.locator('[data-time="speculative"] svg').get_attribute("viewBox") or ""
    x, _, width, _ = map(float, box.split())
    return x, width


def test_the_timeline_zooms_pans_and_points_at_a_moment(tab: Tab) -> None:
    seek(tab, 0.2)
    strip = tab.locator(".sd-time-strip")
    strip.scroll_into_view_if_needed()
    assert view_of(tab) == (0, pytest.approx(0.53))
    tab.locator('[data-zoom="in"]').click()
    x, width = view_of(tab)
    assert width == pytest.approx(0.265)
    assert x == pytest.approx(0.1)  # the moment on show stays where it was
    strip.focus()
    tab.keyboard.press("ArrowRight")
    assert view_of(tab)[0] > x
    box = strip.bounding_box()
    assert box is not None
    before = view_of(tab)[0]
    tab.mouse.move(box["x"] + 300, box["y"] + 20)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 400, box["y"] + 20)
    tab.mouse.up()
    assert view_of(tab)[0] == pytest.approx(before - 100 / box["width"] * 0.265, abs=1e-3)
    tab.locator('[data-zoom="all"]').click()
    assert view_of(tab) == (0, pytest.approx(0.53))
    tab.mouse.click(box["x"] + box["width"] * 0.3, box["y"] + 60)
    assert tab.evaluate("specdemo.stage.player.t") == pytest.approx(0.159, abs=0.002)
    assert shown(tab, "speculative") == "A b c"
    tab.mouse.move(box["x"] + box["width"] * 0.1, box["y"] + 60)
    detail = tab.locator(".sd-time-detail").inner_text()
    assert "round 1" in detail
    assert "tokens: 2" in detail


def test_the_timeline_tells_its_sum_to_those_who_do_not_see_it(tab: Tab) -> None:
    label = tab.locator(".sd-time-strip").get_attribute("aria-label") or ""
    assert "Speculative decoding: 3 rounds in 350 ms" in label


HOSTILE = '<b onclick="1">x</b>${1}{{2}}<script>window.pwned=1</script>'


def test_hostile_tokens_stay_text_in_the_picture(stage: OpenStage) -> None:
    events = story()
    for index, event in enumerate(events):
        if isinstance(event, Verified) and event.judged and event.round == 1:
            events[index] = replace(event, judged=tuple(replace(token, text=HOSTILE) for token in event.judged))
    tab = stage(log_of(events))
    seek(tab, 0.15)
    assert boxes(tab, ".sd-drafted") == [HOSTILE] * 3
    assert tab.evaluate("window.pwned") is None
    assert not tab.locator("#stage b, #stage script").count()


def test_a_race_without_rounds_offers_nothing_to_look_at(stage: OpenStage) -> None:
    tab = stage(log_of(story()[:2]))
    assert tab.locator(".sd-after").is_hidden()
    assert tab.locator(".sd-play").is_disabled()
