"""The panel of the models: who may switch, what may be asked for, what memory that ran out leads to; then its drawing,
and all of it wired up, in Chromium."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr
import pytest
import torch
from test_arena import request, tiny_pair
from tiny_folders import save_folder
from transformers import LlamaForCausalLM

from specdemo.arena import Arena
from specdemo.errors import BadRequest
from specdemo.events import Failed
from specdemo.models.loading import Pair
from specdemo.plan.choose import PRECISIONS, Wishes, bars
from specdemo.plan.devices import machine_of
from specdemo.plan.load import Planned, load_fitting, plan_here
from specdemo.plan.pairs import plan_pair
from specdemo.presets import PRESETS
from specdemo.ui import models as models_module
from specdemo.ui.assets import script, strings, style
from specdemo.ui.models import Models, asked, is_local
from specdemo.ui.page import build, launch_options
from specdemo.ui.tools import told

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from playwright.sync_api import Page as Tab

GIB = 1 << 30
FORM = {"pair": "other", "target": "a/b", "drafter": "own", "draft": "", "precision": "auto"}


def form(**changes: object) -> str:
    return json.dumps({**FORM, **changes})


def planned(memory: str = "24GiB", names: tuple[str, str] = ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")) -> Planned:
    machine = machine_of(memory)
    return Planned(*names, machine, Wishes(), plan_pair(*names, machine, Wishes()))


def planned_pair() -> Pair:
    plan = planned()
    return replace(tiny_pair(), plan=plan.plan, smaller=plan.smaller())


@pytest.fixture
def arena() -> Arena:
    made = Arena(lambda progress: planned_pair())
    made.load()
    return made


# -- who may -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("client", "headers", "local"),
    [
        ("127.0.0.1", {"host": "127.0.0.1:7860"}, True),
        ("127.0.0.1", {"host": "localhost:7860", "origin": "http://localhost:7860"}, True),
        ("127.0.0.1", {"host": "localhost"}, True),
        ("::1", {"host": "[::1]:7860"}, True),
        ("192.168.1.7", {"host": "192.168.1.5:7860"}, False),
        ("127.0.0.1", {"host": "abc.gradio.live"}, False),  # a tunnel ends here too
        ("127.0.0.1", {"host": "evil.example:7860"}, False),  # a name that was bent to our address
        ("127.0.0.1", {"host": "localhost:7860", "origin": "https://evil.example"}, False),
        ("127.0.0.1", {"host": "localhost:7860", "x-forwarded-for": "203.0.113.9"}, False),
        ("127.0.0.1", {"host": "localhost:7860", "forwarded": "for=203.0.113.9"}, False),
        ("203.0.113.9", {"host": "localhost:7860"}, False),
        ("", {"host": "localhost:7860"}, False),
        ("127.0.0.1", {"host": "[::1"}, False),
        ("127.0.0.1", {}, False),
    ],
)
def test_only_a_request_straight_from_this_machine_is_local(client: str, headers: dict[str, str], local: bool) -> None:
    assert is_local(client, headers) is local


def test_a_stranger_changes_nothing(arena: Arena) -> None:
    before, models = arena.pair, Models(arena)
    for answer in (
        models.switch(False, form()),
        models.preview(False, form()),
        models.smaller(False),
        models.cancel(False),
    ):
        state = json.loads(answer)
        assert state["note"] == strings()["models_elsewhere"]
        assert state["local"] is False
        assert "preview" not in state
    assert arena.pair is before
    assert arena.status.state == "ready"


def test_a_page_for_strangers_is_closed_to_everyone(arena: Arena) -> None:
    """There a proxy stands before it, or may: the machine itself asks then for whoever is behind it."""
    state = json.loads(Models(arena, closed=True).switch(True, form()))
    assert state["note"] == strings()["models_elsewhere"]
    assert state["local"] is False


# -- what may be asked for ---------------------------------------------------------------------------------------------


def test_what_the_form_says_is_what_is_loaded() -> None:
    preset = PRESETS["qwen3-8b-0.6b"]
    own = {"target": preset.target, "draft": preset.draft, "dtype": "auto", "quantize": "auto"}
    assert asked(form(pair=preset.name)) == own
    assert asked(form(pair=preset.name, precision="nf4")) == {**own, "quantize": "nf4"}
    assert asked(form(pair=preset.name, precision="lean8")) == {**own, "dtype": "int8", "quantize": "none"}
    assert asked(form(pair=preset.name, drafter="none"))["draft"] == "none"
    assert asked(form(pair=preset.name, drafter="other", draft=" c/d "))["draft"] == "c/d"
    assert asked(form(pair="auto", precision="half")) == {"pair": "auto", "dtype": "auto", "quantize": "none"}
    assert asked(form())["target"] == "a/b"
    assert asked(form())["draft"] == "auto"
    assert asked(form(pair="embedded"))["draft"] == "auto"


@pytest.mark.parametrize(
    "wanted",
    [
        None, 7, "", "{", "[]", '"x"', form(pair="no-such"), form(pair=["auto"]), form(precision="int3"),
        form(precision={}), form(drafter="some"), form(target=""), form(target=7), form(target="a\nb"),
        form(target="x" * 2000), form(target="x" * 5000), form(drafter="other"), form(pair="auto", drafter="none"),
    ],
)  # fmt: skip
def test_anything_else_is_a_sentence(arena: Arena, wanted: object) -> None:
    with pytest.raises(BadRequest):
        asked(wanted)
    state = json.loads(Models(arena).switch(True, wanted))
    assert state["note"].endswith(".")
    assert arena.status.state == "ready"


def test_the_state_tells_what_runs_and_the_plan_as_bars(arena: Arena) -> None:
    state = json.loads(Models(arena).first(True))
    assert [name for name, *_ in state["choices"]["pairs"]] == list(PRESETS)
    assert state["choices"]["precisions"] == list(PRECISIONS)
    assert arena.pair is not None
    assert arena.pair.plan is not None
    assert state["now"]["target"] == "target"
    assert state["plan"]["bars"] == bars(arena.pair.plan)
    assert state["plan"]["reason"] == arena.pair.plan.reason
    assert "short" not in state
    assert "<" not in Models(arena).state(True, note="</script><img>")


def test_a_preview_is_a_plan_with_the_old_pair_gone(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_target: LlamaForCausalLM
) -> None:
    folder = save_folder(tiny_target, tmp_path / "model")
    wanted = form(target=str(folder), drafter="other", draft=str(folder))
    models, asked_of = Models(arena, device="cpu"), []
    real = models_module.plan_here
    monkeypatch.setattr(models_module, "plan_here", lambda **options: asked_of.append(options) or real(**options))
    state = json.loads(models.preview(True, wanted))
    assert arena.pair is not None
    assert arena.pair.plan is not None
    assert state["preview"]["fits"]
    assert state["preview"]["total"] == sum(part["bytes"] for part in state["preview"]["bars"][0]["parts"][:5])
    sizes = arena.pair.plan.bytes
    assert asked_of[0]["freed"] == {"cuda:0": sizes.target_weights + sizes.draft_weights}
    assert asked_of[0]["device"] == "cpu"
    assert "no folder" in json.loads(models.preview(True, form(target="/no/such")))["note"]


def test_what_will_be_freed_counts_as_free(tmp_path: Path, tiny_target: LlamaForCausalLM) -> None:
    folder = str(save_folder(tiny_target, tmp_path / "model"))
    plain, more = (plan_here(folder, "none", device="cpu", freed=freed) for freed in ({}, {"cpu": GIB // 4}))
    grown = more.machine.devices[0].free - plain.machine.devices[0].free
    assert grown == pytest.approx(GIB // 4, abs=GIB // 8)  # others take and free memory meanwhile


# -- switching ---------------------------------------------------------------------------------------------------------


def settled(arena: Arena) -> None:
    until = time.monotonic() + 30
    while arena.status.state == "loading":
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_switch_loads_what_was_asked_for_and_keeps_nothing_of_the_old_pair(
    arena: Arena, tmp_path: Path, tiny_target: LlamaForCausalLM
) -> None:
    assert arena.pair is not None
    old = weakref.ref(arena.pair.target)
    folder = str(save_folder(tiny_target, tmp_path / "model"))
    models = Models(arena, device="cpu")
    state = json.loads(models.switch(True, form(target=folder, drafter="other", draft=folder, precision="float32")))
    assert state["state"] == "loading"
    settled(arena)
    state = json.loads(models.state(True))
    assert state["now"]["target"] == folder
    assert state["now"]["precision"] == "float32"
    assert state["now"]["draft"]["name"] == folder
    gc.collect()
    assert old() is None


def test_one_switch_at_a_time_and_it_can_be_cancelled(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, cancelled = threading.Event(), threading.Event()

    def slow(progress: Callable[[str, float], None], **_wanted: object) -> Pair:
        for step in range(2000):
            progress("Loading a/b", step / 2000)
            reached.set()
            time.sleep(0.005)
        pytest.fail("loaded to the end")

    monkeypatch.setattr(models_module, "load_fitting", slow)
    models = Models(arena)
    models.switch(True, form())
    assert reached.wait(10)
    assert json.loads(models.state(True))["message"] == "Loading a/b"
    assert json.loads(models.switch(True, form()))["note"] == strings()["error_models_loading"]
    assert json.loads(models.cancel(True))["state"] == "loading"
    cancelled.set()
    settled(arena)
    assert json.loads(models.state(True))["message"] == (
        "Loading was cancelled. The pair before is back: target is ready."
    )


def test_a_cancel_before_loading_has_begun_is_not_lost(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The race in progress is still being stopped."""
    monkeypatch.setattr(models_module, "load_fitting", lambda **_wanted: pytest.fail("was loaded"))
    models, race = Models(arena), arena.race(request(2000))
    next(race)
    assert json.loads(models.switch(True, form()))["state"] == "loading"
    models.cancel(True)
    list(race)
    settled(arena)
    assert arena.status.message.startswith("Loading was cancelled.")


def test_a_model_that_cannot_be_had_is_a_sentence_and_the_old_pair_is_back(arena: Arena) -> None:
    models = Models(arena)
    models.switch(True, form(target="/no/such/folder"))
    settled(arena)
    state = json.loads(models.state(True))
    assert state["message"].startswith("There is no folder /no/such/folder")
    assert state["message"].endswith("The pair before is back: target is ready.")
    assert state["now"]["target"] == "target"


def test_whoever_is_told_that_models_load_looks_again(arena: Arena) -> None:
    """Answers may come out of order, and the models may be ready before the answer that says "loading" has arrived."""
    says = {state: json.dumps({"state": state}) for state in ("loading", "ready", "failed")}
    for values, looks in [("ready", False), ("failed", False), ("loading", True), ("ready loading", True),
                          ("loading ready", True), ("ready ready", False)]:  # fmt: skip
        *values_told, timer = told(*(says[state] for state in values.split()))
        assert values_told == [says[state] for state in values.split()]
        assert timer.active is looks
    blocks = build(arena, "cpu")
    ids = {block.elem_id: key for key, block in blocks.blocks.items() if getattr(block, "elem_id", None)}
    (timer_id,) = (key for key, block in blocks.blocks.items() if isinstance(block, gr.Timer))
    telling = [
        [output._id for output in function.outputs]
        for function in blocks.fns.values()
        if {ids["head"], ids["models"]} & {output._id for output in function.outputs}
    ]
    assert len(telling) == 6
    assert all(outputs == [ids["models"], ids["head"], timer_id] for outputs in telling)


# -- memory that runs out ----------------------------------------------------------------------------------------------


def test_memory_that_ran_out_offers_a_smaller_plan_that_can_be_loaded(
    tmp_path: Path, tiny_target: LlamaForCausalLM
) -> None:
    folder = str(save_folder(tiny_target, tmp_path / "model"))
    arena = Arena(lambda progress: load_fitting(folder, folder, device="cpu", dtype="auto", progress=progress))
    arena.load()
    models = Models(arena)
    pair = arena.pair
    assert pair is not None
    assert pair.plan is not None
    assert pair.smaller is not None
    assert json.loads(models.state(True)).get("short") is None
    held: list[Any] = []

    def fails(_capacity: int) -> None:
        taken = torch.zeros(1000)
        held.append(weakref.ref(taken))
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    assert pair.draft is not None
    pair.draft.open = fails  # type: ignore[assignment, method-assign]
    for event in arena.race(request(8)):
        if isinstance(event, Failed):
            assert "memory ran out" in event.message
            assert pair.smaller.plan.described in event.message
            assert held[0]() is None  # what the failed lane had is free again, before the other goes on
    state = json.loads(models.state(True))
    assert state["short"] == {"smaller": pair.smaller.plan.described}
    needed, wanted = pair.plan.bytes.total, pair.smaller.plan
    assert wanted.bytes.total < needed
    models.smaller(True)
    settled(arena)
    assert arena.pair is not None
    assert arena.pair.plan == replace(wanted, fits=True)
    assert arena.pair.target.precision == wanted.target_kept.precision
    assert "short" not in json.loads(models.state(True))
    assert [event for event in arena.race(request(8)) if isinstance(event, Failed)] == []


def test_the_last_rung_says_that_there_is_none_below(arena: Arena) -> None:
    assert arena.pair is not None
    arena._pair = replace(arena.pair, smaller=None)
    assert json.loads(Models(arena).smaller(True))["note"] == strings()["error_models_smallest"]


def test_a_context_that_the_plan_had_to_cut_is_the_models_own(tmp_path: Path, tiny_target: LlamaForCausalLM) -> None:
    folder = save_folder(tiny_target, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    whole = plan_here(str(folder), "none", device="cpu")
    rungs, below = [whole], whole.smaller()
    while below is not None:
        rungs.append(below)
        below = below.smaller()
    last = rungs[-1].load()
    assert rungs[-1].plan.context == 512
    assert last.target.context_length == 512
    assert whole.load().target.context_length == 2048


# -- the drawing, alone in a tab ---------------------------------------------------------------------------------------

HOSTILE = '<img src=x onerror="window.pwned=1"> ${window.pwned=1}'


@dataclass
class Panel:
    """The panel in a tab: `tell` gives it a new value, as the server would; `asked` are the events that it set off."""

    tab: Tab

    def tell(self, value: str) -> None:
        self.tab.evaluate("value => { window.value = value; window.changed(); }", value)

    @property
    def asked(self) -> list[str]:
        asked: list[str] = self.tab.evaluate("window.asked")
        return asked

    @property
    def wanted(self) -> dict[str, str]:
        wanted: dict[str, str] = json.loads(self.tab.evaluate("specdemo.wantedModels"))
        return wanted


@pytest.fixture(scope="module")
def mount(browser: Browser) -> Iterator[Callable[..., Panel]]:
    faults: list[str] = []
    context = browser.new_context(viewport={"width": 1000, "height": 800})
    context.set_default_timeout(60_000)

    def mount_panel(value: str, width: int = 1000, dark: bool = False, language: str = "en") -> Panel:
        tab = context.new_page()
        tab.set_viewport_size({"width": width, "height": 800})
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.set_content(
            f"<!doctype html><html lang=en><meta charset=utf-8><meta name=specdemo-language content={language}>"
            f'<meta name=viewport content="width=device-width"><style>{style()}</style><body class="gradio-container '
            f'{"dark" if dark else ""}" data-race="idle"><div id=ask></div><div id=settings></div>'
            f'<div class="main app"><div id=models></div></div><script>{script()}</script></body>'
        )
        tab.evaluate(
            """value => {
                window.asked = [];
                window.value = value;
                const act = new Proxy({}, { get: (_, event) => () => window.asked.push(event) });
                const watch = (_, callback) => (window.changed = callback);
                specdemo.mountModels(document.querySelector("#models"), () => window.value, watch, act);
            }""",
            value,
        )
        if tab.locator("details[open]").count() == 0:
            tab.locator("summary").click()
        return Panel(tab)

    yield mount_panel
    context.close()
    assert faults == []


@pytest.mark.browser
def test_the_plan_is_drawn_as_bars_of_the_right_lengths(arena: Arena, mount: Callable[..., Panel]) -> None:
    assert arena.pair is not None
    assert arena.pair.plan is not None
    panel = mount(Models(arena).first(True))
    tab = panel.tab
    found = tab.locator(".sd-memory-bar").nth(1).locator("span").evaluate_all(
        "spans => Object.fromEntries(spans.map(span => [span.dataset.part, span.getBoundingClientRect().width]))"
    )  # fmt: skip
    sizes = arena.pair.plan.bytes
    for part, width in found.items():
        assert width / sum(found.values()) == pytest.approx(getattr(sizes, part) / sizes.total, abs=0.02), part
    whole = tab.locator(".sd-memory-bar").first
    assert whole.locator("span").evaluate_all("spans => spans.map(span => span.dataset.part)") == [
        "models", "others", "free", "margin"
    ]  # fmt: skip
    assert whole.get_attribute("role") == "img"
    assert "GiB" in (whole.get_attribute("aria-label") or "")
    words = tab.locator(".sd-memory-legend").nth(1).inner_text()
    assert f"target, weights\n{sizes.target_weights / GIB:.1f} GiB" in words.replace("  ", " ")
    assert tab.locator(".sd-models-now").inner_text().startswith("target (float32) + draft (float32)")
    assert tab.locator(".sd-memory-reason").inner_text() == arena.pair.plan.reason


@pytest.mark.browser
def test_several_devices_have_a_bar_each(mount: Callable[..., Panel]) -> None:
    names = ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct")
    pair = replace(tiny_pair(), plan=planned("80GiB,80GiB,80GiB", names).plan)
    arena = Arena(lambda progress: pair)
    arena.load()
    tab = mount(Models(arena).first(True)).tab
    devices = tab.locator(".sd-memory-device").evaluate_all("nodes => nodes.map(node => node.dataset.device)")
    assert devices == ["cuda:0", "cuda:1", "cuda:2"]


@pytest.mark.browser
def test_the_form_asks_for_a_preview_and_then_to_load(arena: Arena, mount: Callable[..., Panel]) -> None:
    panel = mount(Models(arena).first(True))
    tab = panel.tab
    assert tab.locator("[data-field=target]").is_hidden()
    tab.locator("[data-field=pair]").select_option("qwen3-8b-0.6b")
    tab.wait_for_function("window.asked.length === 1")
    assert panel.asked == ["preview_models"]
    tab.locator("[data-field=drafter]").select_option("none")
    tab.locator("[data-field=precision]").select_option("nf4")
    tab.locator("[data-models=load]").click()
    assert panel.asked[-1] == "switch_models"
    assert asked(json.dumps(panel.wanted)) == {
        "target": "Qwen/Qwen3-8B", "draft": "none", "dtype": "auto", "quantize": "nf4"
    }  # fmt: skip
    tab.locator("[data-field=pair]").select_option("other")
    tab.locator("[data-field=drafter]").select_option("other")
    tab.locator("[data-field=target]").fill("a/b")
    tab.locator("[data-field=draft]").fill("c/d")
    tab.locator("[data-models=load]").click()
    assert (panel.wanted["target"], panel.wanted["draft"]) == ("a/b", "c/d")
    tab.locator("[data-field=pair]").select_option("auto")
    assert tab.locator("[data-field=drafter]").is_hidden()
    tab.locator("[data-models=load]").click()
    assert asked(json.dumps(panel.wanted))["pair"] == "auto"


@pytest.mark.browser
def test_a_preview_shows_what_would_not_fit(arena: Arena, mount: Callable[..., Panel]) -> None:
    models, small = Models(arena), planned("6GiB")
    panel = mount(models.first(True))
    shown = {**models_module._drawn(small.plan), "fits": small.plan.fits}
    panel.tell(models.state(True, preview=shown))
    preview = panel.tab.locator(".sd-models-preview")
    assert not small.plan.fits
    assert "would not fit" in preview.inner_text()
    assert "would fit: it needs" in preview.inner_text()  # another pair
    panel.tell(models.state(True, note=HOSTILE))
    assert panel.tab.locator(".sd-models-note").text_content() == HOSTILE
    assert panel.tab.evaluate("window.pwned") is None


@pytest.mark.browser
def test_loading_has_a_bar_and_can_be_cancelled(arena: Arena, mount: Callable[..., Panel]) -> None:
    models = Models(arena)
    panel = mount(models.first(True))
    loading = {"local": True, "state": "loading", "message": "Loading a/b", "progress": 0.42}
    panel.tell(json.dumps(loading))
    bar = panel.tab.locator("[role=progressbar]")
    assert bar.get_attribute("aria-valuenow") == "42"
    assert panel.tab.locator(".sd-models-doing").inner_text() == "Loading a/b"
    panel.tab.locator("[data-models=cancel]").click()
    assert panel.asked == ["cancel_loading"]
    panel.tell(models.state(True))
    assert bar.is_hidden()
    panel.tell(json.dumps({**loading, "local": False}))
    assert panel.tab.locator("[data-models=cancel]").is_hidden()


@pytest.mark.browser
def test_memory_that_ran_out_opens_the_panel_with_an_offer(arena: Arena, mount: Callable[..., Panel]) -> None:
    models = Models(arena)
    panel = mount(models.first(True))
    assert panel.tab.locator(".sd-models-offer").is_hidden()
    panel.tab.locator("summary").click()
    arena._ran_out = True
    panel.tell(models.state(True))
    offer = panel.tab.locator(".sd-models-offer")
    assert offer.is_visible()
    assert "the target in 8 bit and the draft model in bfloat16, which takes" in offer.inner_text()
    offer.locator("button").click()
    assert panel.asked == ["load_smaller"]
    panel.tell(models.state(False))
    assert offer.locator("button").count() == 0


@pytest.mark.browser
@pytest.mark.parametrize("language", ["en", "zh"])
def test_it_fits_a_phone_in_both_languages(arena: Arena, mount: Callable[..., Panel], language: str) -> None:
    models = Models(arena)
    panel = mount(models.first(True), width=390, language=language)
    panel.tell(models.state(True, preview={**models_module._drawn(planned("6GiB").plan), "fits": False}))
    arena._ran_out = True
    panel.tell(models.state(True))
    panel.tab.locator("[data-field=pair]").select_option("other")
    assert panel.tab.evaluate("document.documentElement.scrollWidth") <= 390
    heights = panel.tab.locator(".sd-models-right :is(select, input, button):visible").evaluate_all(
        "nodes => nodes.map(node => node.getBoundingClientRect().height)"
    )
    assert min(heights) >= 43
    if language == "zh":
        reason = panel.tab.locator(".sd-memory-reason").first.inner_text()
        assert reason.startswith("两个模型均为 bfloat16")
        assert "8 位" in panel.tab.locator(".sd-models-offer").inner_text()


# -- wired up ----------------------------------------------------------------------------------------------------------


@pytest.mark.browser
@pytest.mark.filterwarnings("ignore:.*(no_silent_downcasting|copy keyword is deprecated):DeprecationWarning")
def test_a_visitor_at_the_machine_switches_cancels_and_takes_the_smaller_plan(
    browser: Browser, tmp_path: Path, tiny_target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (str(save_folder(tiny_target, tmp_path / name)) for name in ("first", "second"))
    slow = threading.Event()

    def load(progress: Callable[[str, float], None], **wanted: Any) -> Pair:
        while slow.is_set():
            progress("Loading slowly", 0.3)
            time.sleep(0.02)
        return load_fitting(**wanted, progress=progress)

    monkeypatch.setattr(models_module, "load_fitting", load)
    arena = Arena(lambda progress: load_fitting(first, first, device="cpu", progress=progress))
    arena.load()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    blocks = build(arena, "cpu")
    blocks.launch(server_name="127.0.0.1", server_port=port, share=False, prevent_thread_lock=True, **launch_options())
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(90_000)
    faults: list[str] = []
    try:
        tab = context.new_page()
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.goto(f"http://127.0.0.1:{port}/")
        now = tab.locator(".sd-models-now")
        tab.wait_for_function("document.querySelector('.sd-models-now')?.textContent.includes('first')")
        tab.locator(".sd-models summary").click()

        slow.set()
        tab.locator("[data-field=pair]").select_option("other")
        tab.locator("[data-field=target]").fill(second)
        tab.locator("[data-field=drafter]").select_option("other")
        tab.locator("[data-field=draft]").fill(second)
        tab.locator("[data-models=load]").click()
        tab.wait_for_function("document.querySelector('.sd-models-doing').textContent === 'Loading slowly'")
        tab.wait_for_selector(".sd-status[data-state=loading]")
        tab.locator("[data-models=cancel]").click()
        tab.wait_for_function("document.querySelector('.sd-models-note').textContent.includes('cancelled')")
        assert "first" in now.inner_text()

        slow.clear()
        tab.locator("[data-models=load]").click()
        tab.wait_for_function("document.querySelector('.sd-models-now').textContent.includes('second')")
        assert arena.pair is not None
        assert arena.pair.draft is not None
        assert arena.pair.smaller is not None

        def fails(_capacity: int) -> None:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        arena.pair.draft.open = fails  # type: ignore[assignment, method-assign]
        needed = arena.pair.plan
        tab.locator("#ask textarea").fill("abc")
        tab.locator("#race-button").click()
        tab.wait_for_selector(".sd-models-offer:not([hidden]) button")
        assert "memory ran out" in tab.locator('[data-lane="speculative"]').inner_text()
        tab.locator(".sd-models-offer button").click()
        tab.wait_for_selector(".sd-models-offer", state="hidden")
        settled(arena)
        assert arena.pair is not None
        assert arena.pair.plan is not None
        assert needed is not None
        assert arena.pair.plan.bytes.total < needed.bytes.total
    finally:
        context.close()
        blocks.close(verbose=False)
    assert faults == []
