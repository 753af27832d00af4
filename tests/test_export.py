"""Runs as files: what is saved comes back the same, what was cut off or edited is refused with a sentence, and nothing
in an exported page runs that we did not write."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fake_lanes import FakeArena, Script, echo_race, interleaved

from specdemo import cli, trace
from specdemo.errors import BadRequest
from specdemo.events import Candidate, Committed, Event, Failed, Finished, Prefilled, Verified
from specdemo.settings import Settings
from specdemo.ui.assets import LANGUAGES, strings
from specdemo.ui.desk import Desk
from specdemo.ui.export import LONGEST_FILE, Recording, as_lines, as_page, read, replayed
from specdemo.ui.form import DEFAULTS
from specdemo.ui.links import restored
from specdemo.ui.shelf import Shelf

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SUITE = Path(__file__).parents[1] / "specdemo" / "data" / "suite.jsonl"
HOSTILE = [
    record["prompt"]
    for record in map(json.loads, SUITE.read_text(encoding="utf-8").splitlines())
    if record["category"] == "hostile" and record["prompt"].strip()
]
BREAKOUT = (
    '</script><script>window.pwned=1</script><!--<script> --></style><img src=x onerror="window.pwned=1"> ]]>'
    "{{window.pwned=1}} ${window.pwned=1} \u2028 \u2029 '\"> &lt;b&gt; end"
)
WORDS = [f" w{i}" for i in range(30)]


def race(words: list[str] = WORDS) -> Recording:
    return Recording(tuple(echo_race(words)), "the prompt")


# -- there and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [as_lines, as_page], ids=["lines", "page"])
@pytest.mark.parametrize("words", [WORDS, [BREAKOUT, *WORDS, *HOSTILE]], ids=["plain", "hostile"])
def test_what_was_saved_comes_back(write: Callable[[Recording], str], words: list[str]) -> None:
    recording = race(words)
    back = read(write(recording))
    assert list(back.events) == list(trace.with_metrics(recording.events))
    assert back.prompt == ("the prompt" if write is as_page else "")
    assert write(back) == write(Recording(back.events, back.prompt))


def test_lines_are_read_by_the_command_line_too(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(as_lines(race()), encoding="utf-8")
    assert list(trace.read(path)) == list(trace.with_metrics(race().events))


def test_the_command_line_makes_a_page_of_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "run.jsonl", tmp_path / "run.html"
    path.write_text(as_lines(race()), encoding="utf-8")
    assert cli.main(["replay", str(path), "--html", str(page)]) == 0
    assert read(page.read_text(encoding="utf-8")).events == read(as_lines(race())).events
    path.write_text(as_lines(race())[:-300], encoding="utf-8")
    assert cli.main(["replay", str(path), "--html", str(page)]) == cli.BAD_ARGUMENTS
    assert cli.main(["replay", str(tmp_path / "none"), "--html", str(page)]) == cli.BAD_ARGUMENTS
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 2


def test_every_end_carries_the_metrics_of_its_lane() -> None:
    ends = [event for event in read(as_lines(race())).events if isinstance(event, Finished)]
    assert [end.metrics["tokens"] for end in ends] == [30, 30]
    assert {end.metrics["rounds"] for end in ends} == {
        29,
        next(e.metrics["rounds"] for e in ends if e.lane == "speculative"),
    }


def test_a_single_lane_of_the_command_line_takes_its_place() -> None:
    for method, lane in (("standard", "standard"), ("prompt-lookup", "speculative")):
        events = [
            replace(event, lane=method)
            for event in echo_race(WORDS)
            if event.lane == ("standard" if method == "standard" else "speculative")
        ]
        assert {event.lane for event in read(as_lines(Recording(events))).events} == {lane}


def test_a_race_in_which_a_lane_failed_can_be_kept() -> None:
    events = [*Script("standard").start().first("a").finish().events, *Script("speculative").start().events]
    recording = Recording([*events, Failed("speculative", 0.1, BREAKOUT)])
    assert '"failed"' in replayed(read(as_page(recording)))


# -- cut off, edited, of another kind -------------------------------------------------------------------------------


def sentence(text: object) -> str:
    with pytest.raises(BadRequest) as caught:
        read(text)
    message = str(caught.value)
    assert "\n" not in message
    assert 10 < len(message) < 400
    return message


@pytest.mark.parametrize("write", [as_lines, as_page], ids=["lines", "page"])
def test_a_file_that_was_cut_off_anywhere_is_refused(write: Callable[[Recording], str]) -> None:
    text = write(race(WORDS[:8]))
    complete = len(text.rstrip())
    cuts = {*range(0, complete - 1, max(1, complete // 150)), complete - 2}
    for cut in sorted(cuts):
        sentence(text[:cut])


def test_a_missing_or_doubled_or_moved_line_is_refused() -> None:
    lines = as_lines(race(WORDS[:8])).splitlines()
    for index in range(len(lines)):
        sentence("\n".join([*lines[:index], *lines[index + 1 :]]))
        sentence("\n".join([*lines[: index + 1], *lines[index:]]))
    standard = [line for line in lines if '"lane": "standard"' in line]
    swapped = [standard[0], standard[1], standard[4], standard[5], standard[2], standard[3], *standard[6:]]
    assert "round" in sentence("\n".join(swapped))


def edited(change: Callable[[Any], None], kind: str) -> str:
    records = [json.loads(line) for line in as_lines(race(WORDS[:8])).splitlines()]
    record = next(r for r in records if r["type"] == kind and r["lane"] == "speculative" and r.get("judged", True))
    change(record)
    return "\n".join(map(json.dumps, records))


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("finished", lambda r: r.update(text="another text"), "text"),
        ("finished", lambda r: r["token_ids"].__setitem__(2, 7), "tokens"),
        ("finished", lambda r: r["metrics"].update(tokens_per_second=1e6), "numbers"),
        ("verified", lambda r: r["judged"][0].update(text="x"), "text"),
        ("verified", lambda r: r["judged"][0].update(id=5), "another draft"),
        ("verified", lambda r: r["judged"][0].update(p=1.5), "probability"),
        ("verified", lambda r: r["judged"][0].update(fate="discarded"), "accepted tokens"),
        ("verified", lambda r: r.update(num_accepted=9), "accepted tokens"),
        ("verified", lambda r: r.update(verify_s=-1.0), "less than no time"),
        ("verified", lambda r: r.update(verify_s=r["verify_s"] / 2), "numbers"),
        ("verified", lambda r: r.update(round=17), "round"),
        ("verified", lambda r: r.update(t=0.0), "backwards"),
        ("verified", lambda r: r.update(extra={"id": 1}), "not an event"),
        ("prefilled", lambda r: r["token"].update(text="<b>"), "text"),
        ("started", lambda r: r.update(version=99), "version 99"),
        ("started", lambda r: r.update(surprise=1), "not an event"),
        ("started", lambda r: r["settings"].update(max_new_tokens="many"), "whole number"),
    ],
)
def test_an_edited_event_is_refused(kind: str, change: Callable[[Any], None], says: str) -> None:
    text = edited(change, kind)
    with pytest.raises(BadRequest, match=says):
        replayed(read(text))


def test_random_damage_is_refused_or_harmless() -> None:
    text = as_lines(race(WORDS[:8]))
    dice, refused = random.Random(0), []
    for _ in range(150):
        at = dice.randrange(len(text))
        damaged = text[:at] + dice.choice('0a"{}[],:\\<\x00é') + text[at + 1 :]
        with contextlib.suppress(BadRequest):  # and nothing else
            replayed(read(damaged))
            continue
        refused.append(damaged)
    assert len(refused) > 100


@pytest.mark.parametrize(
    "text",
    [
        None,
        7,
        ["x"],
        "",
        "   ",
        "hello",
        "{}",
        "[]",
        "{" * 10_000,
        "<!doctype html><p>no run</p>",
        "\x00",
        "\ud800",
        '{"type": 1}',
    ],
)
def test_another_kind_of_file_is_refused(text: object) -> None:
    sentence(text)


def test_a_file_too_large_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "parse", None)
    assert "24 million" in sentence("{" + " " * LONGEST_FILE)


def test_lanes_that_the_page_does_not_have_are_refused() -> None:
    events = [replace(event, lane=f"{event.lane}-2") for event in echo_race(WORDS)]
    assert "lanes" in sentence(as_lines(Recording(events)))


def test_a_page_with_an_edited_run_is_refused() -> None:
    page = as_page(race(WORDS[:8]))
    assert sentence(page.replace('"round": 2', '"round": 3', 1))
    assert sentence(page.replace('"prompt":', '"prompts":', 1))
    assert sentence(page.replace('{"prompt": "the prompt"', '{"prompt": "\\ud800"', 1))


# -- the file itself --------------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))


def test_a_hostile_run_adds_no_element_to_the_page() -> None:
    def elements(recording: Recording) -> list[str]:
        parser = Elements()
        parser.feed(as_page(recording))
        return [tag for tag, _ in parser.found]

    plain = elements(race())
    hostile = Recording(tuple(echo_race([BREAKOUT, *HOSTILE, *WORDS])), BREAKOUT)
    assert elements(hostile) == plain
    assert plain.count("script") == 3
    assert not {"img", "link", "iframe", "object", "base"} & set(plain)


def test_the_page_asks_for_nothing_from_anywhere() -> None:
    page = as_page(race())
    parser = Elements()
    parser.feed(page)
    (policy,) = [
        attributes["content"]
        for tag, attributes in parser.found
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", rules["script-src"])
    assert not any({"src", "href"} & set(attributes) for _, attributes in parser.found)
    assert "url(" not in page
    assert "@import" not in page


# -- the desk ------------------------------------------------------------------------------------------------


def desk(tmp_path: Path) -> tuple[Desk, Shelf]:
    shelf = Shelf()
    return Desk(shelf, FakeArena(0).check, tmp_path), shelf


def answer(text: str) -> dict[str, Any]:
    assert "<" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_run_is_saved_for_the_visitor_who_ran_it(tmp_path: Path) -> None:
    at, shelf = desk(tmp_path)
    shelf.put("a", "prompt a", echo_race(WORDS))
    for kind, name in (("lines", "specdemo-run.jsonl"), ("html", "specdemo-run.html")):
        wanted = json.dumps({"kind": kind, "language": "zh"})
        file = answer(at.save("a", wanted))["file"]
        assert file["name"] == name
        assert [event.lane for event in read(file["text"]).events] == [event.lane for event in echo_race(WORDS)]
        assert "no race to save" in answer(at.save("b", wanted))["note"]
    assert 'lang="zh"' in file["text"]


def test_a_race_that_runs_cannot_be_saved_yet(tmp_path: Path) -> None:
    at, shelf = desk(tmp_path)
    shelf.put("a", "prompt", echo_race(WORDS)[:20])
    assert "still running" in answer(at.save("a", '{"kind": "lines", "language": "en"}'))["note"]


@pytest.mark.parametrize(
    "wanted", [None, 5, "", "x", "[]", "{}", '{"kind": "exe", "language": "en"}', '{"kind": ["lines"]}', "{" * 150]
)
def test_whatever_is_asked_for_gets_a_sentence(tmp_path: Path, wanted: object) -> None:
    at, shelf = desk(tmp_path)
    shelf.put("a", "prompt", echo_race(WORDS))
    assert "saved as" in answer(at.save("a", wanted))["note"]


def test_an_opened_file_is_on_show_and_can_be_saved_again(tmp_path: Path) -> None:
    at, _ = desk(tmp_path)
    page = as_page(race())
    first, word = at.open("a", page)
    second, _ = at.open("a", page)
    assert answer(word)["key"] == "share_opened"
    assert first is not None
    assert second is not None
    assert first.split("\n", 1)[0] != second.split("\n", 1)[0]  # a new log, so that the page begins anew
    assert [json.loads(line)["k"] for line in first.splitlines()][-1] == "done"
    assert answer(at.save("a", '{"kind": "html", "language": "en"}'))["file"]["text"] == page
    log, word = at.open("a", page[:-5000])
    assert log is None
    assert "cut off" in answer(word)["note"]


def test_the_recorded_race_is_saved_where_there_is_no_other(tmp_path: Path) -> None:
    at, _ = desk(tmp_path)
    trace.write(tmp_path / "first-race.jsonl", echo_race(WORDS))
    (tmp_path / "first-race.json").write_text('{"prompt": "recorded"}', encoding="utf-8")
    text = answer(at.save("a", '{"kind": "html", "language": "en"}'))["file"]["text"]
    assert read(text).prompt == "recorded"


def test_the_shelf_forgets_who_has_been_away_longest() -> None:
    shelf = Shelf(room=2)
    for visitor in "abac":
        shelf.put(visitor, visitor, echo_race(WORDS))
    assert [recording.prompt if (recording := shelf.get(visitor)) else None for visitor in "abc"] == ["a", None, "c"]


# -- links ---------------------------------------------------------------------------------------------------


def check(request: object) -> None:
    FakeArena(0).check(request)  # type: ignore[arg-type]


def test_a_link_restores_prompt_and_settings() -> None:
    query = {
        "prompt": BREAKOUT,
        "temperature": "0.7",
        "draft_length": "3",
        "raw": "true",
        "stop": "a\nb",
        "__theme": "dark",
    }
    values = restored(query, check)
    assert values == {
        **DEFAULTS,
        "prompt": BREAKOUT,
        "temperature": 0.7,
        "draft_length": 3,
        "raw": True,
        "stop": "a\nb",
    }


def test_an_address_without_settings_changes_nothing() -> None:
    assert restored({"__theme": "light", "view": "api"}, check) is None


def test_a_link_without_a_prompt_restores_the_settings() -> None:
    assert restored({"seed": "9"}, check) == {"prompt": "", **DEFAULTS, "seed": 9}


@pytest.mark.parametrize(
    "query",
    [
        {"draft_length": "99"},
        {"draft_length": "five"},
        {"seed": "9" * 400},
        {"temperature": "nan"},
        {"temperature": "1e999"},
        {"raw": "maybe"},
        {"verification": "<img src=x onerror=alert(1)>"},
        {"max_new_tokens": "0"},
    ],
)
def test_a_bad_link_is_one_sentence(query: dict[str, str], tmp_path: Path) -> None:
    at, _ = desk(tmp_path)
    values, word = at.restored(query)
    assert values is None
    assert word is not None
    note = answer(word)["note"]
    assert note.startswith(strings()["share_link_bad"])
    assert len(note) < 300


# -- in a browser --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def offline(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Open an exported file; what it asks for from the network, and what goes wrong in it, fails the module."""
    folder = tmp_path_factory.mktemp("exported")
    faults: list[str] = []
    context = browser.new_context(viewport={"width": 1000, "height": 800})

    def open_file(text: str) -> Any:
        path = folder / "run.html"
        path.write_text(text, encoding="utf-8")
        tab = context.new_page()
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        tab.on("request", lambda request: faults.append(request.url) if request.url != path.as_uri() else None)
        tab.goto(path.as_uri())
        return tab

    yield open_file
    context.close()
    assert faults == []


def kept(tab: Any, lane: str) -> str:
    spans = tab.locator(f'[data-lane="{lane}"] .sd-output .sd-token:not([aria-hidden])').all_text_contents()
    return "".join(spans)


@pytest.mark.browser
def test_an_exported_page_replays_without_a_server(offline: Callable[[str], Any]) -> None:
    tab = offline(as_page(race()))
    text = "".join(WORDS)
    assert kept(tab, "standard") == kept(tab, "speculative") == text
    assert tab.locator(".sd-kept-prompt").inner_text() == "the prompt"
    press = """() => { document.querySelector(".sd-replay").click();
        return document.querySelectorAll("[data-lane=standard] .sd-output .sd-token").length; }"""
    assert tab.evaluate(press) < 30  # begins anew
    assert tab.evaluate(press) == 30  # skips to the end
    assert kept(tab, "speculative") == text


@pytest.mark.browser
def test_hostile_text_stays_text_in_an_exported_page(offline: Callable[[str], Any]) -> None:
    words = [BREAKOUT, *HOSTILE, *WORDS[:6]]
    events: list[Event] = []
    for event in echo_race(words):
        if isinstance(event, Prefilled):
            event = replace(event, token=replace(event.token, top=(Candidate(1, 0.5, BREAKOUT),)))
        if isinstance(event, Verified) and event.extra is not None:
            extra: Committed = replace(event.extra, top=(Candidate(1, 0.5, BREAKOUT),))
            event = replace(event, extra=extra)
        events.append(event)
    tab = offline(as_page(Recording(events, BREAKOUT)))
    assert kept(tab, "standard") == "".join(words)
    assert tab.evaluate("window.pwned") is None
    assert not tab.locator("img, iframe, #stage script, #stage style").count()
    assert tab.locator(".sd-kept-prompt").text_content() == BREAKOUT
    lanes = tab.locator(".sd-output .sd-token")
    for index in (0, 3):
        lanes.nth(index).hover()
    assert tab.evaluate("window.pwned") is None


@pytest.mark.browser
def test_an_exported_page_speaks_both_languages(offline: Callable[[str], Any]) -> None:
    for language in LANGUAGES:
        tab = offline(as_page(race(), language))
        assert tab.locator("h1").inner_text() == strings(language)["heading"]
        other = next(name for name in LANGUAGES if name != language)
        tab.locator(f'.sd-language[data-language="{other}"]').click()
        assert tab.locator("h1").inner_text() == strings(other)["heading"]
        assert kept(tab, "standard") == "".join(WORDS)
        tab.evaluate("localStorage.clear()")
        tab.close()


def test_lanes_of_a_race_keep_their_order() -> None:
    lanes = [Script("standard").start().first("a").finish(), Script("speculative").start().first("a").finish()]
    events = interleaved(*lanes)
    assert list(read(as_lines(Recording(events))).events) == list(trace.with_metrics(events))


# -- real runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("method", ["standard", "speculative", "prompt-lookup", "hybrid"])
def test_every_real_run_adds_up(method: str, verification: str) -> None:
    """Ends of every kind: EOS inside a draft, a stop string over several tokens or found late, the budget, a stop by a
    visitor; with drafts accepted, refused and clipped."""
    from tiny import TableLM, decode, letters, make_job, random_table

    target = TableLM(random_table(0, 8), "target", context=256)
    draft = TableLM(random_table(0, 8) + 0.5 * random_table(1, 8), "draft", context=256)
    ends, fates = set(), set()
    for seed in range(12):
        for stop in ((), ("cd",), ("a", "gg")):
            settings = Settings(
                max_new_tokens=17 if seed % 2 else 60,
                temperature=1.0 if seed % 3 else 0.0,
                seed=seed,
                stop=stop,
                draft_length=seed % 5,
                verification=verification,  # type: ignore[arg-type]
            )
            asked = iter(range(1000))
            job = make_job(
                target,
                [1, 2, 3, seed % 8],
                settings,
                letters(8),
                eos_ids=frozenset({7} if seed % 4 == 0 else ()),
                should_stop=lambda seed=seed, asked=asked: seed == 5 and next(asked) > 4,
            )
            events = decode(job, method, draft)
            trace.check(list(trace.with_metrics(events)))
            recording = Recording([replace(event, lane="speculative") for event in events])
            assert list(read(as_lines(recording)).events) == list(trace.with_metrics(recording.events))
            ends.add(events[-1].finish_reason)  # type: ignore[union-attr]
            fates |= {token.fate for event in events if isinstance(event, Verified) for token in event.judged}
    assert ends == {"eos", "stop", "length", "cancelled"}
    assert method == "standard" or fates >= {"accepted", "rejected", "discarded"}
