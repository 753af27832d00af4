"""What the page says a race teaches: the verdict, what held it back, its pictures, the draft length to try next."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from fake_lanes import Script, echo_race, interleaved
from race_logs import log_of, story

if TYPE_CHECKING:
    from playwright.sync_api import Page as Tab
    from stage_tab import OpenStage

pytest_plugins = ("stage_tab",)
pytestmark = pytest.mark.browser

PROMPT = "Count to <b>forty</b> ${1}."


@pytest.fixture(scope="module")
def log() -> str:
    return log_of(echo_race([f"w{i} " for i in range(40)]), prompt=PROMPT)


@pytest.fixture(scope="module")
def tab(stage: OpenStage, log: str) -> Tab:
    return stage(log)


@pytest.fixture(scope="module")
def insight(log: str) -> dict[str, Any]:
    found: dict[str, Any] = next(line for line in map(json.loads, log.splitlines()) if line["k"] == "insight")
    return found


def test_the_verdict_names_the_speedup_and_what_limits_it(tab: Tab, insight: dict[str, Any]) -> None:
    lesson = tab.locator(".sd-lesson").inner_text()
    assert f"Yes: {insight['speedup']:.2f}×" in lesson
    assert insight["limit"] == "acceptance"
    assert (
        f"of {insight['round']['drafted']:.1f} tokens drafted a round the target keeps {insight['round']['kept']:.1f}"
        in lesson
    )
    shares = tab.locator(".sd-loss-legend li").all_inner_texts()
    assert len(shares) == sum(share > 0 for share in insight["shares"].values())
    assert f"refused guesses {100 * insight['shares']['acceptance']:.0f} %" in " ".join(shares)


def test_a_loss_is_said_as_plainly_as_a_gain(stage: OpenStage) -> None:
    standard = Script("standard", seconds_a_round=0.02).start().first("a")
    speculative = Script("speculative", seconds_a_round=0.1).start().first("a")
    for _ in range(6):
        standard.round(extra=" b")
        speculative.round([(" x", "rejected"), (" y", "discarded")], " b", "recovered")
    tab = stage(log_of(interleaved(standard.finish(), speculative.finish())))
    assert "No: 0.20× the speed" in tab.locator(".sd-lesson").inner_text()
    assert "no speculation at all" in tab.locator(".sd-best").inner_text()
    assert tab.locator(".sd-race-best").count() == 0


def test_pictures_say_in_words_what_they_show(tab: Tab, insight: dict[str, Any]) -> None:
    spoken = tab.locator(".sd-chart-svg").evaluate_all("all => all.map(one => one.getAttribute('aria-label'))")
    assert len(spoken) == 5
    told = " ".join(spoken)
    assert ", ".join(f"{i}: {count}" for i, count in enumerate(insight["histogram"])) in told
    assert f"alpha {insight['alpha']:.2f} theory gives a speedup of {insight['theory']:.2f}×" in told
    assert f"best draft length: {insight['best']}" in told


def test_bars_are_as_high_as_their_figures(tab: Tab, insight: dict[str, Any]) -> None:
    charts = tab.locator(".sd-chart")
    heights = charts.nth(3).locator("rect").evaluate_all("bars => bars.map(bar => Number(bar.getAttribute('height')))")
    most = max(insight["histogram"])
    assert [height / max(heights) for height in heights] == pytest.approx(
        [count / most for count in insight["histogram"]]
    )
    predicted = (
        charts.nth(1).locator("rect").evaluate_all("bars => bars.map(bar => Number(bar.getAttribute('height')))")
    )
    speedups = [speedup for _, speedup in insight["predicted"]]
    assert [height / max(predicted) for height in predicted] == pytest.approx([s / max(speedups) for s in speedups])
    assert charts.nth(1).locator(".sd-column-best").count() == 1
    assert "predicted" in charts.nth(1).locator("h3").inner_text().lower()


def test_one_click_asks_for_the_best_draft_length(tab: Tab, insight: dict[str, Any]) -> None:
    tab.locator(".sd-race-best").click()
    assert tab.evaluate("window.asked") == [PROMPT, insight["best"]]


def test_a_race_that_drafted_nothing_teaches_nothing(stage: OpenStage) -> None:
    lanes = [
        Script(name).start().first("a").round(extra=" b").round(extra=" c").finish()
        for name in ("standard", "speculative")
    ]
    tab = stage(log_of(interleaved(*lanes)))
    assert tab.locator(".sd-lessons").inner_text() == ""
    assert tab.locator(".sd-timeline").is_visible()


def test_block_verification_has_no_theory_curve(stage: OpenStage) -> None:
    tab = stage(log_of(story(settings={"verification": "block"})))
    assert tab.locator(".sd-chart").count() == 4
