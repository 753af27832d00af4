"""The race for everyone: any screen, any theme, any script, by keys, by ear, without motion, for a room."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from fake_lanes import echo_race
from race_logs import log_of, shown, story

from specdemo.events import Verified

if TYPE_CHECKING:
    from playwright.sync_api import Page as Tab
    from stage_tab import OpenStage

pytest_plugins = ("stage_tab",)
pytestmark = pytest.mark.browser

WORDS = [f"w{i} " for i in range(40)]
CONTRAST = 4.5  # WCAG 2.2, 1.4.3

# the contrast of an element's text with what lies behind it, translucent backgrounds laid over each other
CONTRAST_OF = """element => {
    const parse = (color) => {
        const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
        return [r, g, b, a / 255];
    };
    const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
    const layers = [];
    for (let node = element; node; node = node.parentElement) {
        layers.unshift(parse(getComputedStyle(node).backgroundColor));
    }
    const back = layers.reduce((below, layer) => over(layer, below), [255, 255, 255]);
    const text = over(parse(getComputedStyle(element).color), back);
    const light = (rgb) => rgb.map((c) => c / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const [a, b] = [light(text), light(back)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
}"""

READ = (
    ".sd-output .sd-accepted",
    ".sd-output .sd-rejected",
    ".sd-output .sd-recovered",
    ".sd-output .sd-bonus",
    ".sd-where",
    ".sd-fine",
    ".sd-box-text",
    ".sd-box-note",
    ".sd-verdict-word",
    ".sd-rollback",
    ".sd-time-detail",
    ".sd-tick",
    ".sd-lesson",
    ".sd-loss-legend li",
    ".sd-chart figcaption p",
    ".sd-why-sentence",
    ".sd-why-where",
    ".sd-top-value",
    ".sd-recorded",
)


def ask(tab: Tab) -> None:
    tab.evaluate("specdemo.stage.player.seek(0.15)")
    tab.locator('[data-lane="speculative"] .sd-rejected').first.click()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everything_can_be_read_in_both_themes(stage: OpenStage, theme: str) -> None:
    tab = stage(log_of(story(), recorded=True), reduced_motion="reduce")
    tab.evaluate("theme => document.documentElement.classList.toggle('dark', theme === 'dark')", theme)
    tab.evaluate("specdemo.stage.player.seek(0.25)")
    contrasts = {name: tab.locator(name).first.evaluate(CONTRAST_OF) for name in READ[:4]}
    ask(tab)
    contrasts |= {name: tab.locator(name).first.evaluate(CONTRAST_OF) for name in READ[4:]}
    assert {name: round(value, 2) for name, value in contrasts.items() if value < CONTRAST} == {}


def test_a_phone_shows_all_parts_without_scrolling_sideways(stage: OpenStage) -> None:
    tab = stage(log_of(echo_race(WORDS)), width=390, height=844)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    for part in (".sd-player", ".sd-round", ".sd-timeline", ".sd-verdict-card", ".sd-chart"):
        box = tab.locator(part).first.bounding_box()
        assert box is not None
        assert box["x"] >= 0, part
        assert box["x"] + box["width"] <= 390, part
    assert tab.locator(".sd-chart").count() == 5


def test_a_long_draft_scrolls_inside_its_picture(stage: OpenStage) -> None:
    events = story()
    for index, event in enumerate(events):
        if isinstance(event, Verified) and event.round == 1 and event.judged:
            events[index] = replace(
                event, judged=tuple(replace(token, text="漢字かな交じり文" * 8) for token in event.judged)
            )
    tab = stage(log_of(events), width=390, height=844)
    ask(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_race_is_explored_by_keys_alone(stage: OpenStage) -> None:
    tab = stage(log_of(story()))
    reached: dict[str, int] = {}
    wanted = (
        ".sd-text",
        ".sd-play",
        ".sd-scrub",
        ".sd-speed-choice",
        ".sd-present",
        ".sd-only-kept",
        ".sd-box",
        ".sd-time-strip",
    )
    for presses in range(60):
        tab.keyboard.press("Tab")
        for name in wanted:
            if name not in reached and tab.evaluate("name => document.activeElement.matches(name)", name):
                reached[name] = presses
                outline = tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert outline != "none", name
    assert list(reached) == list(wanted)
    tab.locator(".sd-play").focus()
    tab.evaluate("specdemo.stage.player.seek(0)")
    tab.keyboard.press("Tab")
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")  # one round on
    assert shown(tab, "speculative") == "A"


def test_a_listener_hears_little_and_enough(stage: OpenStage) -> None:
    tab = stage(log_of(echo_race(WORDS)))
    log = tab.locator('.sd-stage-inner > .sd-spoken[role="log"]')
    assert log.get_attribute("aria-live") == "polite"
    assert [line.strip() for line in log.locator("p").all_text_contents()] == [
        "The race has begun.",
        f"The race is over. Speedup: {tab.locator('.sd-ratio-value').inner_text()}.",
    ]
    assert tab.locator('.sd-lanes [aria-live], .sd-lanes [role="log"]').count() == 0
    assert tab.locator(".sd-output .sd-rejected:not([aria-hidden])").count() == 0
    unnamed = tab.locator("#stage button, #stage input, #stage select").evaluate_all(
        "all => all.filter(one => !one.textContent.trim() && !one.ariaLabel && !one.closest('label')).length"
    )
    assert unnamed == 0


def test_forced_colours_keep_fates_apart(stage: OpenStage) -> None:
    tab = stage(log_of(story()), forced_colors="active")
    ask(tab)
    marks = {
        fate: tab.locator(f".sd-legend .sd-{fate}").evaluate(
            "one => { const s = getComputedStyle(one); return s.textDecorationLine + ' ' + s.textDecorationStyle; }"
        )
        for fate in ("accepted", "rejected", "discarded", "recovered", "bonus", "clipped")
    }
    assert len(set(marks.values())) == len(marks)
    fills = [
        tab.locator(f'[data-time="speculative"] path.sd-phase-{phase}').first.evaluate("p => getComputedStyle(p).fill")
        for phase in ("draft", "verify", "judge")
    ]
    assert len(set(fills)) == 3


def test_nothing_moves_for_those_who_want_no_motion(stage: OpenStage) -> None:
    tab = stage(log_of(story(), recorded=True), reduced_motion="reduce")
    assert tab.evaluate("document.getAnimations().length") == 0
    assert tab.evaluate("specdemo.stage.player.playing") is None


@pytest.mark.parametrize(
    "words", [[" 今天", "天气", "很好", "。"] * 8, [" שלום", " עולם", " טוב", "."] * 8], ids=["CJK", "RTL"]
)
def test_any_script_reads_in_its_own_direction(stage: OpenStage, words: list[str]) -> None:
    tab = stage(log_of(echo_race(words)))
    assert shown(tab, "speculative") == "".join(words)
    direction = tab.locator('[data-lane="speculative"] .sd-output').evaluate("one => getComputedStyle(one).direction")
    assert direction == ("rtl" if "ש" in words[0] else "ltr")
    tab.evaluate("specdemo.stage.player.step(-1)")
    assert tab.locator(".sd-box").first.get_attribute("dir") == "auto"


def test_a_page_from_right_to_left_keeps_time_from_left_to_right(stage: OpenStage) -> None:
    tab = stage(log_of(story()), direction="rtl")
    assert tab.locator(".sd-time-strip").evaluate("one => getComputedStyle(one).direction") == "ltr"
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_presenter_mode_leaves_the_race_and_its_numbers(stage: OpenStage) -> None:
    tab = stage(log_of(story()))
    size = "one => parseFloat(getComputedStyle(one).fontSize)"
    before = {
        name: tab.locator(name).first.evaluate(size) for name in (".sd-ratio-value", ".sd-speed-value", ".sd-output")
    }
    tab.locator(".sd-present").click()
    for name, plain in before.items():
        assert tab.locator(name).first.evaluate(size) > 1.3 * plain, name
    for name in (".sd-legend", ".sd-after", ".sd-clock-note", ".sd-runs"):
        assert tab.locator(name).first.is_hidden(), name
    assert tab.locator(".sd-play").is_visible()
    tab.keyboard.press("Escape")
    assert tab.locator(".sd-after").is_visible()


def test_another_language_draws_the_stage_again(stage: OpenStage) -> None:
    tab = stage(log_of(story()))
    tab.evaluate("specdemo.speak('zh')")
    assert tab.locator(".sd-why").count() == 1
    assert shown(tab, "speculative") == "A b c d e f g"
    ask(tab)
    tab.keyboard.press("Escape")
    assert tab.locator(".sd-why").is_hidden()
    assert not re.search(r"[A-Za-z]{4}", tab.locator(".sd-play").inner_text())


def test_no_text_is_missing(stage: OpenStage) -> None:
    for settings in ({}, {"temperature": 1.0}, {"verification": "block"}):
        tab = stage(log_of(story(settings=settings), greedy="temperature" not in settings, recorded=True))
        tab.evaluate("specdemo.stage.player.pause()")
        words: list[Any] = []
        for moment in (0.05, 0.15, 0.25, 0.35):
            tab.evaluate("t => specdemo.stage.player.seek(t)", moment)
            words.append(tab.locator("#stage").inner_text())
            for box in tab.locator(".sd-round-grid .sd-box").all():
                box.click()
                words.append(tab.locator(".sd-why").inner_text())
        keys = re.findall(r"\b[a-z]+_[a-z_]+\b|\{\w+\}|undefined|NaN", " ".join(words))
        assert keys == []
