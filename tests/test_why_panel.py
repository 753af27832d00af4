"""Why this token? The one panel, reached by pointer, tap and keys, and the figures in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from race_logs import log_of, story

if TYPE_CHECKING:
    from playwright.sync_api import Locator
    from playwright.sync_api import Page as Tab
    from stage_tab import OpenStage

pytest_plugins = ("stage_tab",)
pytestmark = pytest.mark.browser

SAMPLED = {"temperature": 1.0}
HOSTILE = '<img src=x onerror="window.pwned=1">${window.pwned=1}{{pwned}}</span><script>window.pwned=1</script>'


@pytest.fixture(scope="module")
def tab(stage: OpenStage) -> Tab:
    """A sampled race, in which p, q and the draw decide."""
    return stage(log_of(story(settings=SAMPLED), greedy=False))


def token(tab: Tab, text: str, lane: str = "speculative") -> Locator:
    return tab.locator(f'[data-lane="{lane}"] .sd-output .sd-token', has_text=text).first


def panel(tab: Tab) -> str:
    return " ".join(tab.locator(".sd-why").inner_text().split())


def close(tab: Tab) -> None:
    tab.keyboard.press("Escape")
    assert tab.locator(".sd-why").is_hidden()


def test_a_token_pointed_at_tells_its_verdict(tab: Tab) -> None:
    token(tab, "x").hover()
    tab.wait_for_selector(".sd-why:not([hidden])")
    told = panel(tab)
    for figure in (
        "rejected",
        "round 1, position 2 of 4",
        "probability 0.500",
        "draw: 0.750",
        "0.300",
        "0.600",
        "0.350",
        "0.550",
    ):
        assert figure in told, figure
    assert tab.locator(".sd-why .sd-top").count() == 2
    assert tab.locator(".sd-chosen").inner_text().strip() == "x"
    tab.mouse.move(2, 2)
    tab.wait_for_selector(".sd-why", state="hidden")
    assert tab.locator(".sd-chosen").count() == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("A", "reading the prompt"),
        ("b", "The draw was 0.250: below it"),
        ("y", "never judged"),
        ("c", "norm(max(0, p − q))"),
        ("e", "so the guess stays"),
        ("f", "Every guess stayed (2 of 2)"),
        ("g", "no guess to check"),
    ],
)
def test_every_fate_has_its_reason(tab: Tab, text: str, told: str) -> None:
    token(tab, text).click()
    assert told in panel(tab)
    close(tab)


def test_a_greedy_race_gives_greedy_reasons(stage: OpenStage) -> None:
    tab = stage(log_of(story()))
    for text, told in (("b", "It is."), ("x", "the target refuses"), ("c", "own first choice")):
        token(tab, text).click()
        assert told in panel(tab)
        assert "norm" not in panel(tab)
        close(tab)


def test_a_block_is_explained_as_a_block(stage: OpenStage) -> None:
    tab = stage(log_of(story(settings={"temperature": 1.0, "verification": "block"}), greedy=False))
    for text in ("b", "x", "c"):
        token(tab, text).click()
        assert "block" in panel(tab)
        assert not tab.locator(".sd-residual").count()
        close(tab)


def test_the_residual_says_how_much_the_target_gives_more(tab: Tab) -> None:
    """The recovered token is in the target's top five and not in the draft's: its q is at most the draft's least."""
    token(tab, "c").click()
    rows = [row.inner_text().split() for row in tab.locator(".sd-residual tbody tr").all()]
    assert rows[0] == ["␣c", "0.450", "—", "0.450"]  # 0.45 less at most 0.0001
    assert rows[1] == ["␣other", "0.200", "0.200", "0"]
    close(tab)


def test_the_standard_lane_answers_too(tab: Tab) -> None:
    token(tab, "d", "standard").click()
    told = panel(tab)
    assert "round 3" in told
    assert "0.450" in told
    close(tab)


def test_a_tap_keeps_the_panel_until_it_is_sent_away(tab: Tab) -> None:
    token(tab, "d").click()
    token(tab, "x").hover()
    assert "accepted" in panel(tab)  # pointing elsewhere does not take it away
    token(tab, "f").click()
    assert "bonus" in panel(tab)
    token(tab, "f").click()
    assert tab.locator(".sd-why").is_hidden()
    token(tab, "f").click()
    tab.locator(".sd-why-close").click()
    assert tab.locator(".sd-why").is_hidden()
    token(tab, "f").click()
    tab.locator(".sd-legend").click()
    assert tab.locator(".sd-why").is_hidden()


def test_arrow_keys_walk_over_the_tokens_and_say_what_they_find(tab: Tab) -> None:
    lane = tab.locator('[data-lane="speculative"] .sd-text')
    lane.focus()
    said = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home"):
        tab.keyboard.press(key)
        said.append(tab.locator(".sd-chosen").inner_text().strip())
    assert said == ["A", "b", "x", "b", "g", "g", "A"]
    tab.keyboard.press("ArrowRight")
    spoken = tab.locator(".sd-why-spoken").text_content() or ""
    assert "accepted" in spoken
    assert "round 1, position 1 of 4" in spoken
    tab.keyboard.press("Tab")
    assert tab.locator(".sd-why").is_hidden()


def test_arrow_keys_follow_the_script_from_right_to_left(stage: OpenStage) -> None:
    tab = stage(log_of(story()), direction="rtl")
    tab.locator('[data-lane="speculative"] .sd-text').focus()
    tab.evaluate("document.querySelector('[data-lane=speculative] .sd-output').dir = 'rtl'")
    for _ in range(3):
        tab.keyboard.press("ArrowLeft")
    assert tab.locator(".sd-chosen").inner_text().strip() == "x"


def test_there_is_one_panel_and_no_tooltip_on_any_token(tab: Tab) -> None:
    assert tab.locator(".sd-why").count() == 1
    assert tab.locator(".sd-output [title]").count() == 0


def test_the_panel_stays_on_the_screen_beside_its_token(tab: Tab) -> None:
    for text in ("A", "g"):
        token(tab, text).click()
        boxes = [locator.bounding_box() for locator in (tab.locator(".sd-why"), token(tab, text))]
        panel_box, token_box = boxes
        assert panel_box is not None
        assert token_box is not None
        assert panel_box["x"] >= 0
        assert panel_box["x"] + panel_box["width"] <= 1280
        assert panel_box["y"] >= 0
        assert panel_box["y"] + panel_box["height"] <= 900
        above = panel_box["y"] + panel_box["height"] <= token_box["y"]
        below = panel_box["y"] >= token_box["y"] + token_box["height"]
        assert above or below
        close(tab)


def test_on_a_phone_the_panel_rests_at_the_bottom(stage: OpenStage) -> None:
    tab = stage(log_of(story(settings=SAMPLED), greedy=False), width=390, height=844, has_touch=True)
    token(tab, "c").tap()
    box = tab.locator(".sd-why").bounding_box()
    assert box is not None
    assert (box["x"], box["width"], round(box["y"] + box["height"])) == (0, 390, 844)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_hostile_alternatives_stay_text(stage: OpenStage) -> None:
    events = story(HOSTILE, SAMPLED)
    tab = stage(log_of(events, greedy=False))
    for text in ("b", "c", "f"):
        token(tab, text).click()
        assert HOSTILE.replace(" ", "") in panel(tab).replace(" ", "")
    assert tab.evaluate("window.pwned") is None
    assert not tab.locator("#stage img, #stage script").count()


def test_only_what_is_seen_can_be_walked_over(tab: Tab) -> None:
    tab.locator(".sd-only-kept").check()
    tab.locator('[data-lane="speculative"] .sd-text').focus()
    said = []
    for _ in range(4):
        tab.keyboard.press("ArrowRight")
        said.append(tab.locator(".sd-chosen").inner_text().strip())
    assert said == ["A", "b", "c", "d"]
    tab.locator(".sd-only-kept").uncheck()
