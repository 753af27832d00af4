"""The Gradio page: a prompt and its settings in, a race drawn live out.

The race reaches the browser as one growing text (see `view`), the value of a single component whose template is
constant and whose script appends what is new: both lanes and every number arrive in the same update, and Gradio sends
only the new end of the text. Everything here is reachable by a raw POST as well, so every handler checks what it gets.
"""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any, Protocol

import gradio as gr
from starlette.middleware import Middleware

from ..compared import Comparison
from ..errors import SpecdemoError
from ..events import Event, Failed, Finished
from ..limits import OWN, PUBLIC, Limits
from ..request import RaceRequest
from ..settings import MAX_DRAFT_LENGTH, MAX_FAN_OUT_BUDGET
from . import api, tools
from .access import AccessLog, facts_of
from .assets import script, strings, style
from .compare import comparison_log
from .desk import Desk
from .form import race_request
from .gate import Gate, address_of
from .line import Line
from .models import Models, Switcher
from .recorded import first_race
from .records import record
from .shelf import Kept, Shelf
from .view import RaceView

UPDATE_S = 1 / 10
UPDATE_SHARE = 10
LONGEST_UPDATE_S = 0.25
"""Updates come at most every UPDATE_S, and rarer where the page takes long to send one, so that sending them takes at
most one part in UPDATE_SHARE of a race; never rarer than LONGEST_UPDATE_S."""

WAIT_S = 0.1
"""How often someone who waits is looked after."""

SIGN_OF_LIFE_S = 2.0
"""Someone who waits gets an update at least this often: a closed tab is noticed when the next one cannot be sent."""

OLD_RACE_S = 5.0
"""How long a new race waits for the end of the same visitor's old one."""

MAX_TOKENS_SLIDER = 512

WAITING_A_SEAT = 24
"""Visitors who may wait for each race that servers run at once."""

SESSIONS = 200
"""Of so many visitors Gradio keeps its own state, some 80 KB each. The page keeps nothing there."""

QUEUE_LOOK_S, PROGRESS_LOOK_S = 0.1, 1.0
"""How often Gradio's loops look for something to do, and for progress bars, which the page has none of. Left alone they
look a thousand and a hundred times a second, which takes 7 to 8 % of a processor from the models."""

QUEUE_LENGTHS = 4
"""Gradio itself holds as many events as this many lines have room for: those that will be told that it is full, too."""

_log = logging.getLogger(__name__)


class Status(Protocol):
    """How the models are: state is "loading", "ready", "busy" or "failed"."""

    @property
    def state(self) -> str: ...

    @property
    def message(self) -> str: ...

    @property
    def progress(self) -> float: ...


class Racer(Switcher, Protocol):
    """What the page needs of the arena. Where servers decode, nothing is asked of it as a Switcher."""

    @property
    def status(self) -> Status: ...

    def check(self, request: RaceRequest) -> None: ...

    def race(self, request: RaceRequest, visitor: str = "") -> Iterator[Event]: ...

    def compare(self, request: RaceRequest, visitor: str = "") -> Iterator[Comparison]: ...

    def stop(self, visitor: str = "") -> bool: ...


@dataclass
class _Pace:
    """When the next update is due."""

    due: float = 0.0
    began: float = field(default=0.0, init=False)

    def ready(self) -> bool:
        self.began = time.monotonic()
        return self.began >= self.due

    def sent(self) -> None:
        took = time.monotonic() - self.began
        self.due = self.began + took + min(max(UPDATE_S - took, (UPDATE_SHARE - 1) * took), LONGEST_UPDATE_S)


class Page:
    """The handlers of the page, free of Gradio's components."""

    def __init__(self, arena: Racer, line: Line | None = None, log: AccessLog | None = None) -> None:
        self.arena = arena
        self.line = line if line is not None else Line()
        self._access = log if log is not None else AccessLog()
        self.shelf = Shelf()
        self.desk = Desk(self.shelf, arena.check)
        self._stopped: set[str] = set()  # who pressed Stop while waiting
        self._ready = ""  # the arena's word on being ready

    def status(self) -> str:
        """How the models are, for the status line."""
        status = self.arena.status
        value: dict[str, str | float]
        if status.state == "busy":  # ready, only not at once: the line tells that to those who wait in it
            value = {"state": "ready", "message": self._ready}
        elif status.state == "loading":
            value = {"state": "loading", "message": status.message, "progress": status.progress}
        else:
            value = {"state": status.state, "message": status.message}
            self._ready = status.message
        return json.dumps(value).replace("<", "\\u003c")

    def race(self, visitor: str, values: Mapping[str, Any], address: str = "") -> Generator[str, None, None]:
        """The log of one race, longer at every step. Whatever goes wrong becomes a sentence in it. address: where the
        visitor comes from in the network."""
        yield from self._log(self._race(visitor, values, address))

    def compare(self, visitor: str, values: Mapping[str, Any], address: str = "") -> Generator[str, None, None]:
        """The log of a comparison of all methods, in the same way."""
        yield from self._log(self._compare(visitor, values, address))

    def _log(self, pieces: Iterator[str]) -> Generator[str, None, None]:
        log = record("log", id=uuid.uuid4().hex)
        try:
            for piece in pieces:
                log += piece
                yield log
            return
        except SpecdemoError as error:
            message = str(error)
        except Exception as error:
            _log.exception("a race broke off")
            message = strings()["error_unexpected"].format(fault=type(error).__name__)
        yield log + record("error", message=message) + record("done", ok=False)

    def stop(self, visitor: str) -> None:
        """Stop the visitor's race, or take the visitor out of the line."""
        place = self.line.place(visitor)
        if place is None:
            return
        self._stopped.add(visitor)
        self.arena.stop(visitor)

    def gone(self, visitor: str) -> None:
        """The tab was closed."""
        self.stop(visitor)

    def _race(self, visitor: str, values: Mapping[str, Any], address: str) -> Iterator[str]:
        request = race_request(values)
        self.arena.check(request)
        facts = facts_of("race", request)
        yield from self.in_turn(visitor, lambda: self._lanes(request, visitor, facts), facts, address)

    def _compare(self, visitor: str, values: Mapping[str, Any], address: str) -> Iterator[str]:
        request = race_request(values)
        self.arena.check(request)
        facts = facts_of("comparison", request)
        yield from self.in_turn(visitor, lambda: comparison_log(self.arena.compare(request, visitor)), facts, address)

    def in_turn(
        self, visitor: str, run: Callable[[], Iterator[str]], facts: Mapping[str, Any], address: str = ""
    ) -> Generator[str, None, None]:
        """The pieces of a run once it is the visitor's turn; before that, what the visitor waits for. facts: what the
        access log is told besides, `what` it is first; the run may add to them."""
        self._replace(visitor)
        try:
            self.line.join(visitor, address)
        except SpecdemoError:
            self._access.write(**facts, end="no room")
            raise
        self._stopped.discard(visitor)
        came, began, end = time.monotonic(), None, "left"
        try:
            if not (yield from self._wait(visitor)):
                end = "stopped waiting"
                yield record("wait", why="stopped") + record("done", ok=False)
                return
            began = time.monotonic()
            yield from run()
            end = "stopped" if visitor in self._stopped else "done"
        except Exception as error:
            end = type(error).__name__
            raise
        finally:
            ran = None if began is None else time.monotonic() - began
            self.line.leave(visitor, ran)
            self._stopped.discard(visitor)
            self._access.write(**facts, end=end, waited=(began or time.monotonic()) - came, ran=ran)

    def _lanes(self, request: RaceRequest, visitor: str, facts: dict[str, Any]) -> Iterator[str]:
        events = self.arena.race(request, visitor)
        try:
            settings = request.settings
            view = RaceView(settings.max_new_tokens, settings.greedy, request.prompt)
            kept = self.shelf.put(visitor, request.prompt)
            yield from self._draw(events, view, kept)
            facts["tokens"] = sum(len(event.token_ids) for event in kept.events if isinstance(event, Finished))
        finally:
            if isinstance(events, Generator):
                events.close()  # now, not when it is collected: the models are free from here on

    def _replace(self, visitor: str) -> None:
        """A visitor has one race at a time: a new one ends the old one, which a page that was cut off cannot stop."""
        until = time.monotonic() + OLD_RACE_S
        while self.line.place(visitor) is not None and time.monotonic() < until:
            self.stop(visitor)
            time.sleep(WAIT_S)

    def _wait(self, visitor: str) -> Generator[str, None, bool]:
        """Wait for the turn and for the models. Returns whether the race may start. Raises SpecdemoError."""
        told, told_at = "", -math.inf
        while visitor not in self._stopped:
            place, status = self.line.place(visitor), self.arena.status
            if status.state == "failed":
                raise SpecdemoError(strings()["error_failed"].format(message=status.message))
            if status.state == "loading":
                word = record("wait", why="loading", message=status.message)
            elif place:
                seconds = self.line.expected_wait(place)
                word = record("wait", why="line", place=place, **({} if seconds is None else {"seconds": seconds}))
            else:
                return True
            if word != told or time.monotonic() - told_at > SIGN_OF_LIFE_S:
                yield word if word != told else ""
                told, told_at = word, time.monotonic()
            time.sleep(WAIT_S)
        return False

    def _draw(self, events: Iterator[Event], view: RaceView, kept: Kept) -> Iterator[str]:
        pace, ok = _Pace(), True
        for event in events:
            view.add(event)
            kept.events.append(event)
            ok = ok and not isinstance(event, Failed)
            if pace.ready():
                yield view.flush()
                pace.sent()
        yield view.done(ok)


def _examples() -> list[dict[str, str]]:
    lines = (files("specdemo") / "data" / "suite.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def build(
    arena: Racer, device: str = "auto", public: bool = False, log: AccessLog | None = None, seats: int | None = None
) -> gr.Blocks:
    """The page over an arena whose models may still be loading. device: where other models are put, as `--device`.
    public: strangers reach it. seats: servers decode, and so many races run at once; what a server decides for itself
    is then not asked, and there are no models to put in place."""
    served, limits = seats is not None, limits_of(public, seats)
    line = Line(limits.waiting, limits.waiting_an_address, seats or 1)
    text, page = strings(), Page(arena, line, log)
    calls = api.Calls(arena, page.in_turn, page.stop, one_at_a_time=public)
    head = f"<script>\n{script()}\n</script>"

    def drawn(value: str, mount: str, act: str = "() => trigger('pick')", **options: Any) -> gr.HTML:
        """A component that our script draws: its template is constant, so the value is never evaluated. `act`: what the
        script is given to set off events."""
        return gr.HTML(
            value,
            html_template="<div></div>",
            js_on_load=f"{mount}(element.firstElementChild, () => props.value, watch, {act})",
            apply_default_css=False,
            head=head,
            **options,
        )

    blocks: gr.Blocks
    with gr.Blocks(title=text["title"], analytics_enabled=False, fill_width=True) as blocks:
        status = drawn("", "specdemo.mountHead", elem_id="head")
        with gr.Row(equal_height=True):
            with gr.Column(scale=5, elem_id="ask", min_width=300):
                prompt = gr.Textbox(
                    label=text["prompt_label"], placeholder=text["prompt_placeholder"], lines=2, max_lines=4
                )
                examples = drawn(json.dumps(_examples()), "specdemo.mountPicker", elem_id="examples")
                with gr.Row(elem_id="buttons"):
                    race = gr.Button(text["race"], variant="primary", elem_id="race-button", scale=3, min_width=120)
                    stop = gr.Button(text["stop"], elem_id="stop-button", scale=1, min_width=80)
            with gr.Column(scale=4, elem_id="settings", min_width=300):
                fields = _settings(text, min(MAX_TOKENS_SLIDER, limits.max_new_tokens), served)
        if not served:
            models = Models(arena, device, closed=public)
            panel = drawn(models.first(False), "specdemo.mountModels", tools.acts(tools.MODEL_ACTS), elem_id="models")
        drawn("", "specdemo.mountGuide", elem_id="guide")
        stage = drawn(first_race(), "specdemo.mountStage", elem_id="stage")
        usual = page.desk.usual(("prompt", *fields))
        share = drawn(usual, "specdemo.mountShare", tools.acts(tools.SHARE_ACTS), elem_id="share")
        compare = drawn(
            "", "specdemo.mountCompare", tools.acts(tools.COMPARE_ACTS), elem_id="compare", visible=not served
        )
        timer = gr.Timer(0.5)

        fields = {"prompt": prompt, **fields}
        names = list(fields)

        def run(request: gr.Request, *values: Any) -> Iterator[str]:
            asked = dict(zip(names, values, strict=False))
            yield from page.race(request.session_hash or "", asked, address_of(request))

        def halt(request: gr.Request) -> None:
            page.stop(request.session_hash or "")

        def leave(request: gr.Request) -> None:
            page.gone(request.session_hash or "")
            calls.gone(request.session_hash or "")

        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        racing: dict[str, Any] = {"concurrency_limit": limits.waiting + (seats or 1) + 1, "concurrency_id": "race"}
        starts = [race.click, prompt.submit]
        gr.on(starts, None, js="() => specdemo.begin()", **quiet)
        raced = gr.on(
            starts,
            run,
            list(fields.values()),
            stage,
            preprocess=False,  # values as they were sent: `race_request` checks them and says what is wrong
            postprocess=False,  # which would look through the whole log for script tags, in another thread, each time
            **racing,
            **quiet,
        ).then(None, js="() => specdemo.finished()", **quiet)
        api.register(calls, **racing)
        tools.wire(page, blocks, share, compare, stage, fields, quiet, racing)
        if served:
            looks = [blocks.load, timer.tick]
            gr.on(looks, lambda: tools.told(page.status()), None, [status, timer], queue=False, **quiet)
        else:
            tools.wire_models(models, blocks, panel, status, timer, page.status, raced, quiet, public)
        chosen = [fields["method"], fields["temperature"]]
        gr.on([field.change for field in chosen], None, chosen, js="(...chosen) => specdemo.choose(...chosen)", **quiet)
        stop.click(halt, None, None, queue=False, **quiet)
        examples.pick(None, None, prompt, js="() => specdemo.picked", **quiet)
        # one click races the draft length that a finished race recommends
        stage.pick(None, None, [prompt, fields["draft_length"]], js="() => specdemo.picked", **quiet).then(
            None, js="() => specdemo.press()", **quiet
        )
        blocks.unload(leave)
    blocks.queue(max_size=QUEUE_LENGTHS * limits.waiting, api_open=False, default_concurrency_limit=2)
    blocks._queue.sleep_when_free = QUEUE_LOOK_S
    blocks._queue.progress_update_sleep_when_free = PROGRESS_LOOK_S
    return blocks


def limits_of(public: bool, seats: int | None) -> Limits:
    """What may be taken. Where servers decode, the line is longer: nothing is computed here."""
    limits = PUBLIC if public else OWN
    if seats is None:
        return limits
    waiting = WAITING_A_SEAT * seats
    return replace(
        limits,
        waiting=waiting,
        waiting_an_address=limits.waiting_an_address if public else waiting + seats,
        connections=max(limits.connections, 4 * waiting),
    )


def _settings(text: Mapping[str, str], most_tokens: int, served: bool) -> dict[str, Any]:
    """The form beside the prompt: one component for each field of a `RaceRequest`. Where servers decode, those that
    they decide for themselves are hidden; only llama.cpp's takes a draft length with each request."""
    names = ["speculative"] if served else _method_names()

    def labels(name: str) -> dict[str, Any]:
        return {"label": text[f"{name}_label"], "info": text.get(f"{name}_info")}

    def choices(name: str, *values: str) -> list[tuple[str, str]]:
        return [(text[f"{name}_{value}"], value) for value in values]

    fields: dict[str, Any] = {}
    own: dict[str, Any] = {"visible": not served}
    with gr.Row():
        methods = choices("method", *names)
        fields["method"] = gr.Radio(methods, value="speculative", scale=3, min_width=280, **own, **labels("method"))
        fields["seed"] = gr.Number(0, precision=0, minimum=0, scale=0, min_width=96, **labels("seed"))
    with gr.Column(elem_id="ssd-settings"):  # shown by the style, while SSD is chosen
        with gr.Row():
            fields["fan_out_budget"] = gr.Slider(
                1, MAX_FAN_OUT_BUDGET, 16, step=1, min_width=180, **labels("fan_out_budget")
            )
            fields["saguaro"] = gr.Slider(
                0.05, 1, 1, step=0.05, min_width=180, elem_id="saguaro-setting", **labels("saguaro")
            )
        with gr.Row():
            rules = choices("fan_out", "likeliest", "geometric", "uniform")
            fields["fan_out"] = gr.Radio(rules, value="likeliest", min_width=300, **labels("fan_out"))
            fallbacks = choices("fallback", "draft-model", "prompt-lookup")
            fields["fallback"] = gr.Radio(fallbacks, value="draft-model", min_width=280, **labels("fallback"))
    with gr.Row():
        length = labels("draft_length") | ({"info": text["draft_length_served_info"]} if served else {})
        fields["draft_length"] = gr.Slider(0, MAX_DRAFT_LENGTH, 5, step=1, min_width=180, **length)
        fields["max_new_tokens"] = gr.Slider(8, most_tokens, 128, step=8, min_width=180, **labels("max_new_tokens"))
    with gr.Row():
        fields["temperature"] = gr.Slider(0, 2, 0, step=0.05, min_width=180, **labels("temperature"))
        fields["top_p"] = gr.Slider(0.05, 1, 1, step=0.05, min_width=180, **labels("top_p"))
    with gr.Accordion(text["advanced"], open=False, elem_id="advanced"):
        verifications = choices("verification", "token", "block")
        fields["verification"] = gr.Radio(verifications, value="token", **own, **labels("verification"))
        fields["adaptive"] = gr.Checkbox(False, **own, **labels("adaptive"))
        with gr.Row():
            fields["top_k"] = gr.Number(0, precision=0, minimum=0, min_width=130, **labels("top_k"))
            fields["min_p"] = gr.Number(0, minimum=0, maximum=1, step=0.05, min_width=130, **labels("min_p"))
            fields["repetition_penalty"] = gr.Number(
                1, minimum=0.1, maximum=10, step=0.05, min_width=130, **labels("repetition_penalty")
            )
        fields["stop"] = gr.Textbox("", lines=2, **labels("stop"))
        fields["raw"] = gr.Checkbox(False, **labels("raw"))
        fields["ignore_eos"] = gr.Checkbox(False, **labels("ignore_eos"))
    return fields


def _method_names() -> list[str]:
    from ..methods import METHODS

    return [name for name in METHODS if name != "standard"]


def launch_options(
    health: Callable[[], str] = lambda: "ready",
    public: bool = False,
    log: AccessLog | None = None,
    seats: int | None = None,
) -> dict[str, Any]:
    """What `Blocks.launch` takes besides address and port: the look, off with every service that is not wanted, and the
    gate before all routes. health: the arena's."""
    limits = limits_of(public, seats)
    font = ["Inter", "ui-sans-serif", "system-ui", "Segoe UI", "Roboto", "Noto Sans", "sans-serif"]
    theme = gr.themes.Base(
        primary_hue="emerald",
        neutral_hue="slate",
        radius_size="lg",
        font=font,
        font_mono=["ui-monospace", "DejaVu Sans Mono", "monospace"],
    )
    return {
        "theme": theme,
        "css": style(),
        "footer_links": [],
        "ssr_mode": False,
        "mcp_server": False,
        "run_history": False,
        "enable_monitoring": False,
        "pwa": False,
        "num_workers": 0,
        "show_error": False,  # our own sentences reach the page through the log; a stranger's traceback should not
        "quiet": True,
        "max_file_size": "1mb",  # nothing here takes a file
        "state_session_capacity": SESSIONS,
        **({"max_threads": limits.waiting + 4 * (seats or 0)} if seats else {}),  # one for each who races or waits
        "blocked_paths": ["/"],
        "app_kwargs": {
            "middleware": [
                Middleware(
                    Gate,
                    limits=limits,
                    health=lambda: {"state": health()},
                    public=public,
                    log=log if log is not None else AccessLog(),
                )
            ],
        },
    }
