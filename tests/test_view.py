"""The reducer: what the page draws equals what the lanes produced, whatever they did."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fake_lanes import Script, echo_race, interleaved
from hypothesis import given, settings
from hypothesis import strategies as st

from specdemo.events import Candidate, Event, Failed, Fate, Verified
from specdemo.metrics import fold, speedup
from specdemo.ui.view import LANES, TOKENS_FOR_SPEEDUP, RaceView

KEPT = {"a"}


def records(events: Iterable[Event], greedy: bool = True, budget: int = 64, every: int = 1) -> list[dict[str, Any]]:
    """The log of a race, flushed after each `every` events."""
    view, log = RaceView(budget, greedy), ""
    for number, event in enumerate(events, 1):
        view.add(event)
        if number % every == 0:
            log += view.flush()
    log += view.done()
    return [json.loads(line) for line in log.splitlines()]


@dataclass
class Drawn:
    """A lane as the page's script draws it: [text, fate or kind, kept] a token."""

    tokens: list[tuple[str, str, bool]] = field(default_factory=list)

    def take(self, record: dict[str, Any]) -> None:
        if record["k"] == "first":
            self.tokens.append((record["x"], "plain", True))
        if record["k"] == "round":
            self.tokens += [(text, fate, fate in KEPT) for text, fate in record["j"]]
            if "x" in record:
                self.tokens.append((record["x"], record.get("e", "plain"), True))
        if record["k"] == "end":
            self.cut(record["keep"])
            self.tokens.append((record["add"], "plain", True))

    def cut(self, units: int) -> None:
        kept = self.text.encode("utf-16-le")[: 2 * units].decode("utf-16-le")
        self.tokens = [(kept, "plain", True)]

    @property
    def text(self) -> str:
        return "".join(text for text, _, kept in self.tokens if kept)


def drawn(log: list[dict[str, Any]], lane: str) -> Drawn:
    result = Drawn()
    for record in log:
        if record.get("l") == LANES.index(lane):
            result.take(record)
    return result


def last(log: list[dict[str, Any]], kind: str, lane: str | None = None) -> dict[str, Any]:
    return [r for r in log if r["k"] == kind and (lane is None or r["l"] == LANES.index(lane))][-1]


texts = st.text(max_size=4) | st.sampled_from(["", " ", "\n", "👩‍👩‍👧", "</div>", "é", "\ufffd", "${x}", "{{x}}"])


@st.composite
def lanes(draw: st.DrawFn) -> tuple[Script, str]:
    """A speculative lane of arbitrary rounds, and the text it finishes with: as streamed, cut, or flushed."""
    script = Script("speculative").start().first(draw(texts))
    for _ in range(draw(st.integers(0, 5))):
        kept = draw(st.lists(texts, max_size=3))
        judged: list[tuple[str, Fate]] = [(text, "accepted") for text in kept]
        if draw(st.booleans()):
            judged += [(draw(texts), "rejected"), (draw(texts), "discarded")]
            script.round(judged, draw(texts), "recovered")
        elif draw(st.booleans()):
            script.round([*judged, (draw(texts), "clipped")])
        else:
            script.round(judged, draw(texts))
    text = script.text
    if draw(st.booleans()):
        text = text[: draw(st.integers(0, len(text)))]  # a stop string found late
    elif draw(st.booleans()):
        text += "\ufffd"  # half a character at the end
    return script, text


@settings(deadline=None)  # a busy machine is no fault
@given(lanes(), st.integers(1, 9))
def test_kept_text_is_the_lanes_output(lane: tuple[Script, str], every: int) -> None:
    script, text = lane
    log = records(script.finish("stop", text).events, every=every)
    assert drawn(log, "speculative").text == text


@settings(deadline=None)  # a busy machine is no fault
@given(lanes())
def test_log_is_plain_lines_that_no_template_or_page_can_read_as_code(lane: tuple[Script, str]) -> None:
    script, text = lane
    view = RaceView(8, greedy=True)
    for event in script.finish("stop", text).events:
        view.add(event)
    log = view.done()
    assert log.isascii()
    assert "<" not in log
    assert log.endswith("\n")
    assert all(json.loads(line)["k"] for line in log.splitlines())


def test_every_fate_arrives_where_it_fell() -> None:
    script = Script("speculative").start().first("A")
    script.round([(" b", "accepted"), (" x", "rejected"), (" y", "discarded")], " c", "recovered")
    script.round([(" d", "accepted"), (" e", "accepted")], " f", "bonus")
    script.round(extra=" g")
    script.round([(" h", "accepted"), (" z", "clipped")])
    log = records(script.finish().events)
    rounds = [record for record in log if record["k"] == "round"]
    assert [record["n"] for record in rounds] == [1, 2, 3, 4]
    assert [(r["j"], r.get("x"), r.get("e")) for r in rounds] == [
        ([[" b", "a"], [" x", "r"], [" y", "d"]], " c", "recovered"),
        ([[" d", "a"], [" e", "a"]], " f", "bonus"),
        ([], " g", None),  # no draft, so neither bonus nor recovered
        ([[" h", "a"], [" z", "c"]], None, None),
    ]


def test_numbers_are_the_fold_of_the_events() -> None:
    events = echo_race([f"w{i} " for i in range(40)])
    log = records(events, every=7)
    folds = {lane: fold(event for event in events if event.lane == lane) for lane in LANES[:2]}
    for lane, metrics in folds.items():
        shown = last(log, "numbers", lane)
        assert shown["tokens"] == metrics.tokens == 40
        assert shown["rounds"] == metrics.rounds
        assert shown["tps"] == pytest.approx(metrics.tokens_per_second, rel=1e-3)
        assert shown["ttft"] == pytest.approx(metrics.ttft_s)
        assert shown["t"] == pytest.approx(metrics.total_s, abs=1e-4)
    speculative = last(log, "numbers", "speculative")
    assert speculative["acceptance"] == pytest.approx(folds["speculative"].acceptance_rate, rel=1e-3)
    assert speculative["alpha"] == pytest.approx(folds["speculative"].alpha, rel=1e-3)
    assert speculative["length"] == pytest.approx(folds["speculative"].mean_acceptance_length, rel=1e-3)
    assert last(log, "numbers", "standard")["acceptance"] is None
    assert last(log, "ratio")["v"] == pytest.approx(speedup(folds["standard"], folds["speculative"]), rel=1e-3)


def test_speedup_below_one_is_shown_as_it_is() -> None:
    slow, quick = Script("speculative", seconds_a_round=0.1), Script("standard", seconds_a_round=0.02)
    for script in (slow, quick):
        script.start().first("a")
        for _ in range(20):
            script.round(extra="b")
        script.finish()
    assert last(records(interleaved(quick, slow)), "ratio")["v"] == pytest.approx(0.2)


def test_no_speedup_before_both_lanes_have_tokens_enough() -> None:
    events = echo_race([f"w{i} " for i in range(40)])
    view, ratio, tokens = RaceView(64, greedy=True), None, {0: 0, 1: 0}
    for event in events:
        view.add(event)
        for record in map(json.loads, view.flush().splitlines()):
            if record["k"] == "numbers":
                tokens[record["l"]] = record["tokens"]
            if record["k"] == "ratio":
                ratio = record["v"]
        assert (ratio is not None) == (min(tokens.values()) >= TOKENS_FOR_SPEEDUP)
    assert ratio is not None


def two_lanes(a: list[str], b: list[str], why: str = "eos", precision: str = "float32") -> list[Event]:
    scripts = []
    for lane, words in zip(LANES[:2], (a, b), strict=True):
        script = Script(lane, precision).start().first(words[0])
        for word in words[1:]:
            script.round(extra=word)
        scripts.append(script.finish(why))  # type: ignore[arg-type]
    return interleaved(*scripts)


def test_equal_texts_are_said_to_be_equal() -> None:
    same = last(records(two_lanes(list("abc"), list("abc"))), "same")
    assert same == {"k": "same", "n": 3, "at": None, "final": True, "cut": False}


@pytest.mark.parametrize(("precision", "numerics"), [("float32", False), ("bfloat16", True)])
def test_first_difference_is_named_with_both_tokens(precision: str, numerics: bool) -> None:
    same = last(records(two_lanes(list("abcd"), list("abxy"), precision=precision)), "same")
    assert (same["at"], same["a"][1], same["b"][1], same["numerics"]) == (2, "c", "x", numerics)


def test_the_first_difference_comes_with_both_lanes_gaps_of_the_logits() -> None:
    events = two_lanes(list("abcd"), list("abxy"), precision="bfloat16")
    c, x = ord("c"), ord("x")  # the ids that the scripts make of these texts
    for index, event in enumerate(events):
        if isinstance(event, Verified) and event.extra is not None and event.extra.id in (c, x):
            probs = (0.4, 0.3) if event.lane == "standard" else (0.3, 0.33)
            top = (Candidate(c, probs[0], "c"), Candidate(x, probs[1], "x"))
            events[index] = replace(event, extra=replace(event.extra, top=top))
    assert last(records(events), "same")["gaps"] == [pytest.approx(0.288), pytest.approx(0.0953)]
    assert last(records(two_lanes(list("abcd"), list("abxy"))), "same")["gaps"] == [None, None]


def test_a_text_that_ends_early_differs_at_its_end() -> None:
    same = last(records(two_lanes(list("abcd"), list("ab"))), "same")
    assert (same["at"], same["a"][1], same["b"]) == (2, "c", None)


def test_stopped_lanes_are_compared_as_far_as_both_got() -> None:
    same = last(records(two_lanes(list("abcd"), list("ab"), "cancelled")), "same")
    assert (same["at"], same["n"], same["cut"]) == (None, 2, True)


def test_sampled_lanes_are_not_compared() -> None:
    log = records(two_lanes(list("abcd"), list("abxy")), greedy=False)
    assert not [record for record in log if record["k"] == "same"]
    assert log[0] == {"k": "race", "budget": 64, "greedy": False, "prompt": ""}


def test_late_stop_cuts_between_the_units_that_the_browser_counts() -> None:
    script = Script("standard").start().first("🎉").round(extra="é END").round(extra=" more")
    end = last(records(script.finish("stop", "🎉é ", tokens=2).events), "end")
    assert (end["keep"], end["add"], end["why"]) == (4, "", "stop")


def test_a_lane_that_fails_says_so_and_the_race_still_ends() -> None:
    events = [*Script("standard").start().first("a").finish().events, Failed("speculative", 0.1, "It broke.")]
    log = records(events)
    assert last(log, "failed")["message"] == "It broke."
    assert log[-1] == {"k": "done", "ok": True}


def test_what_runs_is_told_from_the_started_event() -> None:
    lane = last(records(Script("speculative", "bfloat16", ("Widened.",)).start().events), "lane")
    assert (lane["method"], lane["target"], lane["precision"]) == ("prompt-lookup", "tiny-target", "bfloat16")
    assert (lane["path"], lane["device"], lane["draft"], lane["notes"]) == ("lean", "cpu", None, ["Widened."])
