"""What stands around the race, in Chromium: each part alone, without a server; then wired up, as a visitor uses it."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlencode

import pytest
from fake_lanes import COMPARED, FakeArena, echo_race

from specdemo.comparison import Progress
from specdemo.events import Finished
from specdemo.ui.assets import script, strings, style
from specdemo.ui.compare import comparison_log
from specdemo.ui.export import Recording, as_lines, as_page, read
from specdemo.ui.form import DEFAULTS
from specdemo.ui.page import Page, build, launch_options
from specdemo.ui.records import record

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from playwright.sync_api import Page as Tab

PROMPT = "one two three four five six seven eight nine ten"
HOSTILE = '</script><img src=x onerror="window.pwned=1"> ${window.pwned=1} {{window.pwned=1}} <b>bold</b>'

# -- the log of a comparison ----------------------------------------------------------------------------------------


def test_a_comparison_becomes_a_log_for_the_page() -> None:
    *_, log = Page(FakeArena(0)).compare("v", {"prompt": HOSTILE, **DEFAULTS})
    assert "<" not in log
    records = [json.loads(line) for line in log.splitlines()]
    assert [r["method"] for r in records if r["k"] == "row"] == [row.method for row in COMPARED]
    assert [r["reason"] for r in records if r["k"] == "row"][-1] == COMPARED[-1].reason
    (winner,) = [r for r in records if r["k"] == "winner"]
    assert winner["usages"] == [["vLLM", f"vllm serve {HOSTILE}", True]]
    assert records[-1] == {"k": "done", "ok": True}


def test_a_comparison_that_cannot_run_is_a_sentence() -> None:
    page = Page(FakeArena(0))
    for prompt, says in (("crash", "fault of ours (RuntimeError)"), ("  ", "empty"), (None, "must be text")):
        *_, log = page.compare("v", {"prompt": prompt, **DEFAULTS})
        records = [json.loads(line) for line in log.splitlines()]
        assert says in next(r["message"] for r in records if r["k"] == "error")
        assert records[-1] == {"k": "done", "ok": False}
    assert page.line.place("v") is None


def test_progress_is_told_a_few_times_a_second() -> None:
    def quick() -> Iterator[Progress]:
        for share in range(1000):
            yield Progress("standard", 0, 1, share / 1000)

    assert len(list(comparison_log(quick()))) < 20


# -- each part alone --------------------------------------------------------------------------------------------------


@dataclass
class Mounted:
    """A part in a tab: `tell` gives it a new value, as the server would; `asked` are the events that it set off."""

    tab: Tab

    def tell(self, value: str) -> None:
        self.tab.evaluate("value => { window.value = value; window.changed(); }", value)

    @property
    def asked(self) -> list[str]:
        asked: list[str] = self.tab.evaluate("window.asked")
        return asked


@pytest.fixture(scope="module")
def mount(browser: Browser) -> Iterator[Callable[..., Mounted]]:
    faults: list[str] = []
    context = browser.new_context(viewport={"width": 1000, "height": 800})
    context.set_default_timeout(120_000)

    def mount_part(name: str, value: str = "", width: int = 1000) -> Mounted:
        tab = context.new_page()
        tab.set_viewport_size({"width": width, "height": 800})
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.set_content(
            f"<!doctype html><html lang=en><meta charset=utf-8><style>{style()}</style>"
            '<body class="gradio-container" data-race="idle"><div id=ask><label>Prompt</label><button id=race-button>'
            " Race </button><button id=stop-button>Stop</button></div><div id=settings><span>Seed</span></div>"
            f'<div class="main app"><div id=part></div><div id=stage></div></div><script>{script()}</script></body>'
        )
        tab.evaluate(
            """([name, value]) => {
                window.asked = [];
                window.value = value;
                const act = new Proxy({}, { get: (_, event) => () => window.asked.push(event) });
                const watch = (_, callback) => (window.changed = callback);
                specdemo.mountStage(document.querySelector("#stage"), () => "", () => {});
                specdemo[name](document.querySelector("#part"), () => window.value, watch, act);
            }""",
            [name, value],
        )
        return Mounted(tab)

    yield mount_part
    context.close()
    assert faults == []


def comparison(ok: bool = True, hostile: str = "") -> str:
    log = record("log", id="x") + record("step", m="standard", i=0, n=4, s=0.5)
    log += "".join(record("row", **asdict(row)) for row in COMPARED)
    if ok:
        log += record("winner", m="prompt-lookup", speedup=2.0, usages=[["vLLM", f"vllm serve {hostile}", True]])
    return log + record("done", ok=True)


@pytest.mark.browser
def test_the_comparison_is_a_table_with_bars(mount: Callable[..., Mounted]) -> None:
    part = mount("mountCompare")
    part.tab.locator(".sd-compare-button").click()
    assert part.asked == ["compare_all"]
    part.tell(comparison(hostile=HOSTILE))
    tab = part.tab
    rows = tab.locator(".sd-compare-table tbody tr")
    assert rows.count() == len(COMPARED)
    cells = rows.nth(2).locator("th, td").all_inner_texts()
    assert [cell.strip() for cell in cells] == ["Prompt lookup", "20.0", "2.00×", "50 %", "—", "yes"]
    widths = tab.locator('[data-column="speedup"] .sd-bar').evaluate_all(
        "bars => bars.map(bar => bar.getBoundingClientRect().width / bar.parentElement.clientWidth)"
    )
    assert widths == pytest.approx([0.5, 0.2, 1.0], abs=0.02)
    assert rows.nth(1).get_attribute("data-slower") is not None
    assert "There is no draft model." in rows.nth(3).inner_text()
    assert "Prompt lookup, 2.00×" in tab.locator(".sd-compare-verdict").inner_text()
    assert tab.locator(".sd-usage code").text_content() == f"vllm serve {HOSTILE}"
    assert strings()["compare_own_draft"] in tab.locator(".sd-usage").inner_text()
    assert tab.evaluate("window.pwned") is None
    assert not tab.locator("#part b, #part img").count()
    assert tab.evaluate("document.body.dataset.race") == "idle"
    assert tab.locator(".sd-compare-button").is_enabled()


@pytest.mark.browser
def test_a_stopped_comparison_keeps_its_rows(mount: Callable[..., Mounted]) -> None:
    part = mount("mountCompare", width=390)
    part.tell(comparison(ok=False))
    assert part.tab.locator(".sd-compare-status").inner_text() == strings()["compare_stopped"]
    assert part.tab.locator(".sd-compare-table tbody tr").count() == len(COMPARED)
    assert part.tab.evaluate("document.documentElement.scrollWidth") <= 390
    part.tell(record("log", id="y") + record("error", message=HOSTILE) + record("done", ok=False))
    assert part.tab.locator(".sd-compare-status").text_content() == HOSTILE
    assert not part.tab.locator(".sd-compare-table").is_visible()


@pytest.mark.browser
def test_switching_the_language_changes_every_word_and_is_remembered(mount: Callable[..., Mounted]) -> None:
    part = mount("mountHead", json.dumps({"state": "ready", "message": "tiny"}))
    tab, chinese, english = part.tab, strings("zh"), strings()
    assert tab.locator("h1").inner_text() == english["heading"]
    tab.locator('.sd-language[data-language="zh"]').click()
    assert tab.locator("h1").inner_text() == chinese["heading"]
    assert tab.locator(".sd-status-word").inner_text() == chinese["status_ready"]
    assert tab.locator("#race-button").inner_text().strip() == chinese["race"]
    assert tab.locator("#ask label").inner_text() == chinese["prompt_label"]
    assert tab.locator("#settings span").inner_text() == chinese["seed_label"]
    assert chinese["lane_standard"] in tab.locator("#stage").inner_text()
    assert tab.evaluate("document.documentElement.lang") == "zh-CN"
    assert tab.locator('.sd-language[data-language="zh"]').get_attribute("aria-pressed") == "true"
    part.tell(json.dumps({"state": "failed", "message": "x"}))  # still drawn after it was mounted again
    assert tab.locator(".sd-status-word").inner_text() == chinese["status_failed"]
    # what Gradio makes later is translated too
    tab.evaluate(
        "word => { const late = document.createElement('u'); late.append(word); settings.append(late); }",
        english["temperature_label"],
    )
    tab.wait_for_function(
        "word => document.querySelector('#settings u').textContent === word", arg=chinese["temperature_label"]
    )
    tab.locator('.sd-language[data-language="en"]').click()
    assert tab.locator("#race-button").inner_text().strip() == english["race"]
    assert english["lane_standard"] in tab.locator("#stage").inner_text()


@pytest.mark.browser
def test_what_the_server_says_is_translated_where_it_is_known(mount: Callable[..., Mounted]) -> None:
    tab = mount("mountHead", json.dumps({"state": "ready", "message": "a.b/c is ready"})).tab
    assert tab.locator(".sd-status-detail").inner_text() == "a.b/c is ready"
    tab.locator('.sd-language[data-language="zh"]').click()
    assert tab.locator(".sd-status-detail").inner_text() == "a.b/c 已就绪"
    for sentence, said in (
        (
            "The draft length must be a whole number from 0 to 16, not '<b>'.",
            "draft length 必须是 0 到 16 的整数，不能是 '<b>'。",
        ),
        ("Prompt must be text.", "提示词必须是文字。"),
        (
            "With the target in 8 bit and no draft model the models take 3.1 GiB of the 4.0 GiB that cuda:0 can give; "
            "the draft model is given up, and prompt lookup drafts without one; the context shrinks from 8,192 to 512 "
            "positions.",
            "目标为 8 位、不用草稿模型，模型占用 3.1 GiB，cuda:0 可提供 4.0 GiB；"
            "放弃草稿模型，由提示词查找起草；上下文从 8,192 个位置缩短到 512 个。",
        ),
        (
            "The standard server at 127.0.0.1:8001 is not ready (503), saying “loading weights”: try again.",
            "位于 127.0.0.1:8001 的标准服务器还没有准备好（503），并说“loading weights”：请再试。",
        ),
        ("Something else.", "Something else."),
        ("One thing; another", "One thing; another"),
        ("", ""),
    ):
        assert tab.evaluate("sentence => specdemo.said(sentence)", sentence) == said
    tab.locator('.sd-language[data-language="en"]').click()


@pytest.mark.browser
def test_the_guide_points_at_what_it_explains(mount: Callable[..., Mounted]) -> None:
    tab = mount("mountGuide").tab
    told = []
    for step in range(1, 8):
        assert strings()[f"guide_{step}"] in tab.locator(".sd-guide-words").inner_text()
        tab.locator('[data-guide="show"]').click()
        told.append(tab.locator(".sd-pointed").last.get_attribute("class"))
        tab.wait_for_function("!document.querySelector('.sd-pointed')")
        if step < 7:
            tab.locator('[data-guide="next"]').click()
    assert len(set(told)) >= 5
    assert tab.locator('[data-guide="next"]').is_disabled()
    tab.locator('[data-guide="back"]').click()
    assert strings()["guide_6"] in tab.locator(".sd-guide-words").inner_text()


@pytest.mark.browser
def test_saving_asks_for_a_file_and_hands_it_over(mount: Callable[..., Mounted]) -> None:
    usual = {"prompt": "", "seed": 0, "temperature": 0, "raw": False}
    part = mount("mountShare", json.dumps({"fields": usual}))
    part.tab.locator('[data-share="lines"]').click()
    assert part.asked == ["save_run"]
    assert json.loads(part.tab.evaluate("specdemo.wanted")) == {"kind": "lines", "language": "en"}
    part.tell(json.dumps({"note": HOSTILE}))
    assert part.tab.locator(".sd-share-note").text_content() == HOSTILE
    with part.tab.expect_download() as download:
        part.tell(json.dumps({"file": {"name": "run.jsonl", "type": "text/plain", "text": "é<b>"}}))
    assert Path(download.value.path()).read_text(encoding="utf-8") == "é<b>"
    assert download.value.suggested_filename == "run.jsonl"


# -- wired up ---------------------------------------------------------------------------------------------------------

pytest_quiet = pytest.mark.filterwarnings(
    "ignore:.*(no_silent_downcasting|copy keyword is deprecated):DeprecationWarning"
)


@pytest.fixture(scope="module")
def visit(browser: Browser) -> Iterator[Callable[..., Tab]]:
    """Open the page with scripted races. A fault in its script fails the module."""
    blocks = build(FakeArena())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    _, url, _ = blocks.launch(
        server_name="127.0.0.1", server_port=port, share=False, prevent_thread_lock=True, **launch_options()
    )
    faults: list[str] = []
    contexts = []

    def open_tab(query: str = "") -> Tab:
        context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
        context.set_default_timeout(120_000)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        contexts.append(context)
        tab = context.new_page()
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.goto(url + query)
        tab.wait_for_selector(".sd-share")
        tab.wait_for_selector(".sd-status[data-state]")
        return tab

    yield open_tab
    for context in contexts:
        context.close()
    blocks.close(verbose=False)
    assert faults == []


def written(tab: Tab) -> None:
    """Wait for the race of PROMPT to be over."""
    tab.wait_for_function(
        "text => document.body.dataset.race === 'idle' && "
        "[...document.querySelectorAll('[data-lane=standard] .sd-output .sd-token')]"
        ".map(token => token.textContent).join('') === text",
        arg=PROMPT,
    )


def finish(tab: Tab) -> None:
    tab.wait_for_function("document.body.dataset.race === 'idle'")


def kept(tab: Tab, lane: str) -> str:
    return "".join(tab.locator(f'[data-lane="{lane}"] .sd-output .sd-token:not([aria-hidden])').all_text_contents())


def note(tab: Tab, words: str) -> None:
    tab.wait_for_function("words => document.querySelector('.sd-share-note').textContent.includes(words)", arg=words)


@pytest.mark.browser
@pytest_quiet
def test_a_race_is_saved_and_opened_again(visit: Callable[..., Tab], tmp_path: Path) -> None:
    tab = visit()
    tab.locator("#ask textarea").fill(PROMPT)
    tab.locator("#race-button").click()
    written(tab)
    assert kept(tab, "standard") == PROMPT
    for kind, name in (("lines", "specdemo-run.jsonl"), ("html", "specdemo-run.html")):
        with tab.expect_download() as download:
            tab.locator(f'[data-share="{kind}"]').click()
        assert download.value.suggested_filename == name
        download.value.save_as(tmp_path / name)
        ends = [
            event.text
            for event in read((tmp_path / name).read_text(encoding="utf-8")).events
            if isinstance(event, Finished)
        ]
        assert ends == [PROMPT, PROMPT]
    words = [f" w{i}" for i in range(20)]
    other = tmp_path / "other.html"
    other.write_text(as_page(Recording(echo_race(words), "another")), encoding="utf-8")
    for path, text in ((other, "".join(words)), (tmp_path / "specdemo-run.jsonl", PROMPT)):
        tab.locator(".sd-share input[type=file]").set_input_files(path)
        tab.wait_for_function(
            "text => [...document.querySelectorAll('[data-lane=speculative] .sd-output .sd-token:not([aria-hidden])')]"
            ".map(token => token.textContent).join('') === text",
            arg=text,
        )
    cut = tmp_path / "cut.jsonl"
    cut.write_text(as_lines(Recording(echo_race(words)))[:-200], encoding="utf-8")
    tab.locator(".sd-share input[type=file]").set_input_files(cut)
    note(tab, "line ")
    assert kept(tab, "speculative") == PROMPT  # what was on show stays


@pytest.mark.browser
@pytest_quiet
def test_a_link_restores_the_form_and_a_bad_one_says_why(visit: Callable[..., Tab]) -> None:
    query = {"prompt": HOSTILE, "seed": 7, "draft_length": 3, "temperature": 0.5, "raw": "true"}
    tab = visit("?" + urlencode(query))
    tab.wait_for_function("text => document.querySelector('#ask textarea').value === text", arg=HOSTILE)
    tab.locator('[data-share="link"]').click()
    note(tab, strings()["share_link_copied"])
    link = tab.evaluate("navigator.clipboard.readText()")
    again = visit("?" + link.partition("?")[2])
    again.wait_for_function("text => document.querySelector('#ask textarea').value === text", arg=HOSTILE)
    assert parse_qs(link.partition("?")[2]) == parse_qs(urlencode(query))
    assert tab.evaluate("window.pwned") is None
    bad = visit("?draft_length=99&prompt=hello")
    note(bad, "draft length must be a whole number from 0 to 16")
    assert bad.locator("#ask textarea").input_value() == ""


@pytest.mark.browser
@pytest_quiet
def test_all_methods_are_compared_and_stop_ends_it(visit: Callable[..., Tab]) -> None:
    tab = visit()
    tab.locator("#ask textarea").fill("my-model")
    tab.locator(".sd-compare-button").click()
    tab.wait_for_selector(".sd-compare-winner:not([hidden])")
    finish(tab)
    assert tab.locator(".sd-usage code").text_content() == "vllm serve my-model"
    tab.locator("#ask textarea").fill("slow")
    tab.locator(".sd-compare-button").click()
    tab.wait_for_function("document.body.dataset.race === 'running'")
    assert tab.locator("#race-button").is_disabled()
    tab.locator(".sd-compare-stop").click()
    finish(tab)
    assert tab.locator(".sd-compare-status").inner_text() == strings()["compare_stopped"]
    tab.locator("#ask textarea").fill(PROMPT)
    tab.locator("#race-button").click()
    written(tab)
    assert kept(tab, "speculative") == PROMPT
