"""SSD on the page: three lanes, the cache as a tree, the overlap on the timeline, hits, and whether it paid."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from race_logs import log_of, story
from ssd_logs import ssd_story

from specdemo.events import Drafted, Event, Verified
from specdemo.ui.assets import strings

if TYPE_CHECKING:
    from playwright.sync_api import Page as Tab
    from stage_tab import OpenStage

pytest_plugins = ("stage_tab",)
pytestmark = pytest.mark.browser

HOSTILE = '<img src=x onerror="window.pwned=1">${window.pwned=1}{{pwned}}</span><script>window.pwned=1</script>'

# The SSD lane: A at 50 ms, then rounds of 22 ms that end at 72 (hit), 94 (miss) and 116 ms.
HIT, MISS, LAST = 0.072, 0.094, 0.116


@pytest.fixture(scope="module")
def log() -> str:
    return log_of(ssd_story())


@pytest.fixture(scope="module")
def tab(stage: OpenStage, log: str) -> Tab:
    return stage(log)


def told(log: str, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = [line for line in map(json.loads, log.splitlines()) if line["k"] == kind][-1]
    return found


def seek(tab: Tab, seconds: float) -> None:
    tab.evaluate("seconds => specdemo.stage.player.seek(seconds)", seconds)


def words(tab: Tab, selector: str) -> str:
    return " ".join(tab.locator(selector).inner_text().split())


def test_ssd_races_beside_both_that_it_is_measured_against(tab: Tab, log: str) -> None:
    seek(tab, 1.0)
    lanes = tab.locator(".sd-lane")
    assert [lane.get_attribute("data-lane") for lane in lanes.all() if lane.is_visible()] == [
        "standard",
        "speculative",
        "ssd",
    ]
    assert [score.is_visible() for score in tab.locator(".sd-score").all()] == [True, True, True]
    ratio = told(log, "ratio")
    assert tab.locator(".sd-ratio-value").inner_text() == f"{ratio['v']:.2f}×"
    assert f"{ratio['w']:.2f}× the speed of speculative decoding" in words(tab, ".sd-ratio-second")
    assert tab.locator('[data-lane="ssd"] [data-stat="hits"] dd').inner_text() == "50 %"
    assert "SSD with the draft model" in words(tab, '[data-lane="ssd"] .sd-runs')


def test_a_race_without_ssd_has_two_lanes_and_no_cache(stage: OpenStage) -> None:
    tab = stage(log_of(story()))
    assert [lane.is_visible() for lane in tab.locator(".sd-lane").all()] == [True, True, False]
    assert [score.is_visible() for score in tab.locator(".sd-score").all()] == [True, True, False]
    assert tab.locator(".sd-ratio-second").inner_text() == ""
    assert not tab.locator(".sd-cache").is_visible()
    assert [row.is_visible() for row in tab.locator(".sd-time-row").all()] == [True, True, False]
    assert not tab.locator(".sd-time-legend .sd-phase-hidden").is_visible()
    assert not tab.locator(".sd-ssd-card").count()


def test_the_branch_that_came_true_is_lit(tab: Tab) -> None:
    seek(tab, HIT)
    assert tab.locator(".sd-cache h3").inner_text() == "Drafted ahead in round 1"
    said = words(tab, ".sd-cache-story")
    assert "Hit: with 1 drafted tokens kept the target wrote “␣c”, one of 2 guesses there" in said
    assert "100 % of the work was hidden" in said
    trunk = tab.locator(".sd-tree .sd-trunk .sd-box-text").all_inner_texts()
    assert trunk == ["start", "␣b", "␣x", "␣y"]
    assert tab.locator(".sd-tree .sd-trunk-kept").count() == 2  # the start, and the token that was kept
    columns = [column.locator(".sd-branch-token").all_inner_texts() for column in tab.locator(".sd-tree-column").all()]
    assert columns == [["␣B"], ["␣other", "␣c"], [], ["␣y"]]
    lit = tab.locator(".sd-tree .sd-branch-taken")
    assert lit.count() == 1
    assert lit.locator(".sd-branch-token").inner_text() == "␣c"
    assert lit.locator(".sd-branch-draft").inner_text() == "→ ␣d e f"
    assert "came true" in (lit.text_content() or "")
    assert strings()["tree_unfinished"] in (tab.locator(".sd-tree-column").last.text_content() or "")


def test_a_miss_shows_what_was_not_prepared(tab: Tab) -> None:
    seek(tab, MISS)
    said = words(tab, ".sd-cache-story")
    assert "Miss: with 3 drafted tokens kept the target wrote “␣g”, the draft model's choice number 6 there" in said
    assert "80 % of the work was hidden" in said
    assert not tab.locator(".sd-tree .sd-branch-taken").count()
    missed = tab.locator(".sd-tree-column").last.locator(".sd-branch-missed")
    assert missed.locator(".sd-branch-token").inner_text() == "␣g"
    assert strings()["tree_missing"] in (missed.text_content() or "")
    seek(tab, LAST)
    assert words(tab, ".sd-cache-story") == strings()["tree_none"]


def test_hits_and_misses_stand_in_a_row_and_lead_to_their_rounds(tab: Tab) -> None:
    squares = tab.locator(".sd-hits button")
    assert squares.evaluate_all("all => all.map(one => [one.textContent, one.getAttribute('aria-label')])") == [
        ["✓", "round 1: hit"],
        ["✗", "round 2: miss"],
    ]
    squares.first.click()
    assert tab.evaluate("specdemo.stage.player.t") == pytest.approx(HIT)
    assert squares.first.get_attribute("aria-current") == "step"
    squares.last.focus()
    tab.keyboard.press("Enter")
    assert tab.locator(".sd-cache h3").inner_text() == "Drafted ahead in round 2"
    assert squares.first.get_attribute("aria-current") is None
    assert squares.evaluate_all("all => all.map(one => one.tabIndex)") == [-1, 0]
    for key, number in (("ArrowLeft", 1), ("ArrowLeft", 1), ("ArrowRight", 2), ("ArrowRight", 2)):
        tab.keyboard.press(key)
        assert tab.locator(".sd-cache h3").inner_text() == f"Drafted ahead in round {number}"


def test_the_round_says_where_its_draft_came_from(tab: Tab) -> None:
    for moment, source in ((HIT, "draft model"), (MISS, "ready in advance"), (LAST, "draft model, after a miss")):
        seek(tab, moment)
        assert f"Draft {source}" in words(tab, ".sd-round-grid")


def extents(tab: Tab, phase: str) -> list[tuple[float, float, float]]:
    """Begin, end and upper edge of each bar of a phase of the SSD lane."""
    paths = tab.locator(f'[data-time="ssd"] path.sd-phase-{phase}').evaluate_all(
        "paths => paths.map(path => path.getAttribute('d'))"
    )
    bars = [re.findall(r"M([\d.e-]+) ([\d.]+)H([\d.e-]+)V", path) for path in paths]
    return sorted((float(a), float(b), float(top)) for found in bars for a, top, b in found)


def test_drafting_overlaps_the_pass_on_the_timeline(tab: Tab) -> None:
    """Round 1: 1 ms of drafting, then a cache in 12 ms of the pass of 20. Round 2: ready after 0.2 ms; its cache takes
    25 ms, 5 more than the pass."""
    hidden = extents(tab, "hidden")
    assert [end for bar in hidden for end in bar[:2]] == pytest.approx([0.051, 0.063, 0.0722, 0.0922])
    target = extents(tab, "verify")
    assert all(bar[2] < 0.5 for bar in target)
    assert all(bar[2] > 0.5 for bar in hidden)  # in the drafter's track
    assert any(begin <= hidden[0][0] and end >= hidden[0][1] for begin, end, _ in target)
    late = [bar for bar in extents(tab, "draft") if bar[0] == pytest.approx(0.0922)]
    assert [end for bar in late for end in bar[:2]] == pytest.approx([0.0922, 0.0972])
    seek(tab, HIT)
    assert "cache built in 12 ms, 100 % of it hidden" in tab.locator(".sd-time-detail").inner_text()
    assert tab.locator(".sd-time-legend .sd-phase-hidden").is_visible()


def test_hit_rates_stand_beside_the_recall_that_bounds_them(tab: Tab, log: str) -> None:
    ssd = told(log, "ssd")
    chart = tab.locator(".sd-chart", has_text=strings()["chart_hits"])
    spoken = chart.locator("svg").get_attribute("aria-label") or ""
    assert "Recall by fan-out: 1: 0 %, 2: 50 %, 4: 50 %, 8: 100 %, 16: 100 %." in spoken
    assert "Measured hit rate by fan-out: 1: 0 %, 2: 100 %" in spoken
    for kind, pairs in (("predicted", ssd["recall_by_fan_out"]), ("hit", ssd["hit_rate_by_fan_out"])):
        heights = chart.locator(f".sd-column-{kind}").evaluate_all(
            "bars => bars.map(bar => Number(bar.getAttribute('height')))"
        )
        most = max(share for _, share in pairs)
        assert [height / max(heights) for height in heights] == pytest.approx([share / most for _, share in pairs])


def test_tokens_of_ready_rounds_and_of_others(tab: Tab, log: str) -> None:
    ssd = told(log, "ssd")
    chart = tab.locator(".sd-chart", has_text=strings()["chart_ready"])
    assert chart.locator(".sd-column-text").all_text_contents() == [
        f"{ssd['tokens_on_hit']:.2f}",
        f"{ssd['tokens_on_miss']:.2f}",
    ]


def test_what_is_predicted_of_drafting_in_turns_is_not_said_of_ssd(tab: Tab) -> None:
    titles = tab.locator(".sd-chart h3").all_inner_texts()
    assert strings()["chart_best"] not in titles
    assert strings()["chart_theory"] not in titles
    assert strings()["chart_histogram"] in titles


def test_faster_is_said_with_its_reason(tab: Tab, log: str) -> None:
    against = told(log, "ssd")["against"]
    assert against["verdict"] == "faster"
    said = words(tab, ".sd-ssd-card .sd-lesson")
    assert f"Yes: {against['speedup']:.2f}× the speed of speculative decoding" in said
    assert f"saves {1000 * against['saved_s']:.2f} ms a token" in said
    facts = words(tab, ".sd-facts")
    for figure in ("50 % 1 of 2 rounds", "100 % of the building", "3.0", "18.5 ms outcome known after 20.0 ms"):
        assert figure in facts
    parts = tab.locator(".sd-parts li").evaluate_all("all => all.map(one => one.dataset.part)")
    assert parts == ["draft", "verify", "tokens", "rest"]


def test_slower_is_said_as_plainly(stage: OpenStage) -> None:
    log = log_of(ssd_story(pass_s=0.05))
    tab = stage(log)
    against = told(log, "ssd")["against"]
    said = words(tab, ".sd-ssd-card .sd-lesson")
    assert f"No: {against['speedup']:.2f}× the speed of speculative decoding" in said
    assert f"a pass of the target takes {1000 * against['pass_s'][0]:.1f} ms instead of" in said
    assert "fewer cores" in said
    assert tab.locator(".sd-ratio-second").get_attribute("data-ratio") == "slower"


def test_where_nothing_runs_beside_the_target_the_page_says_so(stage: OpenStage) -> None:
    """The caches are then built inside the draft phase, before the pass."""

    def before(event: Event) -> Event:
        if isinstance(event, Drafted) and event.lane == "ssd":
            return replace(event, draft_s=0.03)
        if isinstance(event, Verified) and event.speculation:
            return replace(event, speculation=replace(event.speculation, overlap="none", hidden_s=0.0))
        return event

    tab = stage(log_of([before(event) for event in ssd_story(pass_s=0.05)]))
    assert all(bar[0] < bar[1] for bar in extents(tab, "verify"))
    assert extents(tab, "hidden") == []
    seek(tab, 0.102)
    assert strings()["tree_before"].split(",")[0] in words(tab, ".sd-cache-story")
    said = words(tab, ".sd-ssd-card")
    assert "nothing runs beside the target here" in said


def test_a_sampled_race_says_that_ssd_drew_the_same(stage: OpenStage) -> None:
    tab = stage(log_of(ssd_story(settings={"temperature": 1.0}), greedy=False))
    said = words(tab, ".sd-verdicts")
    assert "Sampled" in said
    assert "SSD wrote what speculative decoding wrote, token for token: 9 tokens." in said


def test_what_is_projected_is_labelled_so_with_its_devices(tab: Tab, log: str) -> None:
    found = [line for line in map(json.loads, log.splitlines()) if line["k"] == "projection"]
    card = tab.locator(".sd-projection")
    assert strings()["projection_label"] in card.inner_text()
    assert f"within {100 * found[0]['error']:.0f} %" in card.inner_text()
    for record in found:
        rows = card.locator(f'[data-profile="{record["profile"]}"] tbody tr')
        cells = [row.locator("td").all_inner_texts() for row in rows.all()]
        assert [(cell[0], cell[2]) for cell in cells] == [
            (str(devices), f"{ratio:.2f}×") for _, _, ratio, devices in record["lanes"]
        ]


def test_a_projection_that_does_not_hold_is_not_shown(stage: OpenStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdemo.projection.GREATEST_ERROR", 0.01)
    tab = stage(log_of(ssd_story()))
    assert "Nothing is projected" in tab.locator(".sd-projection").inner_text()
    assert not tab.locator(".sd-projection table").count()


@pytest.mark.parametrize("width", [1280, 390])
def test_hostile_guesses_stay_text(stage: OpenStage, width: int) -> None:
    tab = stage(log_of(ssd_story(HOSTILE)), width=width)
    for moment in (HIT, MISS):
        seek(tab, moment)
        tokens = tab.locator(".sd-branch-token, .sd-branch-draft").all_text_contents()
        assert any(HOSTILE in token for token in tokens)
    assert tab.evaluate("window.pwned") is None
    assert not tab.locator("#stage img, #stage script").count()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_desk_and_a_phone_in_either_light(stage: OpenStage, log: str, width: int, scheme: str) -> None:
    tab = stage(log, width=width, height=844)
    if scheme == "dark":
        tab.evaluate("document.documentElement.classList.add('dark')")
    seek(tab, HIT)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    for selector in (".sd-cache", ".sd-timeline", ".sd-ssd-card", '[data-lane="ssd"]'):
        box = tab.locator(selector).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    feet = [
        box["y"] + box["height"] for box in (score.bounding_box() for score in tab.locator(".sd-score").all()) if box
    ]
    assert max(feet) - min(feet) < 2  # beside each other
    lit, other = (
        tab.locator(selector).first.evaluate("one => getComputedStyle(one).backgroundColor")
        for selector in (".sd-branch-taken", ".sd-branch:not(.sd-branch-taken)")
    )
    assert lit != other


def test_every_word_of_it_is_translated(stage: OpenStage, log: str) -> None:
    tab = stage(log)
    tab.evaluate("specdemo.speak('zh')")
    chinese = strings("zh")
    seek(tab, HIT)
    for key in ("lane_ssd", "ssd_title", "chart_hits", "chart_ready", "tree_about", "phase_hidden"):
        assert chinese[key] in tab.locator("#stage").inner_text(), key
    seek(tab, MISS)
    assert "未命中" in tab.locator(".sd-cache-story").inner_text()
    for selector in (".sd-cache", ".sd-ssd-card"):
        assert not re.search(r"[a-z]{4,} [a-z]{4,}", tab.locator(selector).inner_text())
