"""A page for strangers: its limits, its line, the gate before its routes, its log, and a race that hangs."""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import json
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr
import httpx
import pytest
from fake_lanes import FakeArena
from test_arena import request, tiny_pair

from bench import load
from specdemo.arena import Arena
from specdemo.errors import BadRequest, ModelUnavailable
from specdemo.events import Finished
from specdemo.limits import OWN, PUBLIC, Limits
from specdemo.ui.access import AccessLog
from specdemo.ui.api import Calls
from specdemo.ui.form import DEFAULTS
from specdemo.ui.gate import HEALTH, Gate, route_of
from specdemo.ui.line import Line
from specdemo.ui.page import Page, build, launch_options
from specdemo.ui.serving import accounts, add_serving_arguments, checked_root_path, is_public, on_zerogpu, pair_of_space
from specdemo.worker import Hung, Worker

# Gradio leaves its event loops open; whichever test collects garbage next would be blamed
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")

ROOT = Path(__file__).parents[1]
FORM: dict[str, Any] = {**DEFAULTS, "prompt": "one two three four five six seven", "max_new_tokens": 64}


# -- limits -----------------------------------------------------------------------------------------------------------


def test_strangers_get_no_more_than_the_owner() -> None:
    for name in Limits.__slots__:
        if not name.startswith("waiting"):
            assert getattr(PUBLIC, name) < getattr(OWN, name)
    assert PUBLIC.waiting_an_address <= PUBLIC.waiting


# -- the line ---------------------------------------------------------------------------------------------------------


def test_one_address_does_not_take_the_whole_line() -> None:
    line = Line(room=5, room_an_address=2)
    line.join("a", "10.0.0.1")
    line.join("b", "10.0.0.1")
    with pytest.raises(BadRequest, match="network has 2 people in line"):
        line.join("c", "10.0.0.1")
    line.join("d", "10.0.0.2")
    line.leave("a")
    line.join("c", "10.0.0.1")
    assert [line.place(visitor) for visitor in "bdc"] == [0, 1, 2]


def test_a_full_line_says_so() -> None:
    line = Line(room=1)
    line.join("races"), line.join("waits")
    with pytest.raises(BadRequest, match="line is full"):
        line.join("late")


def test_the_expected_wait_is_made_from_the_runs_before() -> None:
    line = Line()
    line.join("first")
    assert line.expected_wait(1) is None
    line.leave("first", ran=20.0)
    line.leave("nobody", ran=40.0)
    line.join("second")
    assert line.expected_wait(1) == 30
    assert line.expected_wait(3) == 90
    line._first_since -= 22.0
    assert line.expected_wait(1) == 10  # 8 s are left, told in steps
    line._first_since -= 100.0
    assert line.expected_wait(2) == 30


def test_one_who_waits_is_told_the_time() -> None:
    page = Page(FakeArena(0), Line())
    page.line.join("before")
    page.line.leave("before", ran=30.0)
    page.line.join("before")
    race = page.race("me", FORM)
    assert json.loads(next(race).splitlines()[-1]) == {"k": "wait", "why": "line", "place": 1, "seconds": 30}
    race.close()
    assert page.line.place("me") is None


def test_a_program_calls_once_at_a_time_in_public() -> None:
    arena = FakeArena(0)
    page = Page(arena)
    calls = Calls(arena, page.in_turn, page.stop, one_at_a_time=True)
    first = threading.Thread(target=lambda: list(calls.race("program", {"prompt": "slow"})))
    first.start()
    while not arena.running:
        time.sleep(0.01)
    with pytest.raises(BadRequest, match="has not ended yet"):
        next(calls.race("program", {"prompt": "again"}))
    calls.gone("program")
    first.join(timeout=10)
    assert list(calls.race("program", {"prompt": "one two three"}))[-1]["standard"]["text"] == "one two three"


# -- the access log ---------------------------------------------------------------------------------------------------


def lines_of(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_the_log_tells_counts_and_timings_and_no_prompt() -> None:
    stream = io.StringIO()
    page = Page(FakeArena(0), Line(room=0), AccessLog(stream))
    list(page.race("me", FORM))
    list(page.race("me", {**FORM, "prompt": "crash"}))
    page.line.join("other")
    list(page.race("me", FORM))
    done, crashed, refused = lines_of(stream)
    assert (done["what"], done["end"], done["characters"], done["tokens"]) == ("race", "done", len(FORM["prompt"]), 14)
    assert done["waited"] >= 0
    assert done["ran"] >= 0
    assert crashed["end"] == "RuntimeError"
    assert refused["end"] == "no room"
    assert "seven" not in stream.getvalue()
    assert "crash" not in stream.getvalue()


def test_a_run_that_is_left_or_stopped_is_logged_as_that() -> None:
    stream = io.StringIO()
    page = Page(FakeArena(0), Line(), AccessLog(stream))
    race = page.race("gone", {**FORM, "prompt": "slow"})
    next(race), next(race)
    race.close()
    race = page.race("me", {**FORM, "prompt": "slow"})
    next(race), next(race)
    page.stop("me")
    list(race)
    assert [line["end"] for line in lines_of(stream)] == ["left", "stopped"]


# -- the gate ---------------------------------------------------------------------------------------------------------


def ask(
    path: str, method: str = "GET", headers: dict[str, str] | None = None, public: bool = True, state: str = "ready"
) -> tuple[int, dict[str, str], bytes, list[dict[str, Any]]]:
    """Status, headers and body of an answer, and the lines of the log. Behind the gate everything is 200."""
    stream = io.StringIO()
    sent: list[Any] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"behind"})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "path": path, "method": method, "headers": raw}
    gate = Gate(behind, PUBLIC, lambda: {"state": state}, public, AccessLog(stream))
    asyncio.run(gate(scope, receive, send))
    told = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], told, sent[1]["body"], lines_of(stream)


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/", "/"),
        ("/config/", "/config"),
        ("/assets/index.js", "/assets/"),
        ("/gradio_api/call/race", "/gradio_api/call/"),
        ("/gradio_api/queue/join", "/gradio_api/queue/join"),
        ("/gradio_api/queue/joined", None),
        ("/gradio_api/upload", None),
        ("/gradio_api/file=/etc/passwd", None),
        ("/gradio_api/proxy=http://127.0.0.1", None),
        ("/monitoring", None),
        ("/docs", None),
    ],
)
def test_only_listed_routes_are_reached(path: str, route: str | None) -> None:
    assert route_of(path) == route
    assert ask(path)[0] == (200 if route else 404)
    assert ask(path, public=False)[0] == 200


def test_answers_are_labelled_for_browsers() -> None:
    _, headers, _, _ = ask("/")
    policy = headers["content-security-policy"]
    assert "frame-ancestors 'self' https://huggingface.co" in policy
    assert "object-src 'none'" in policy
    assert "http:" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert ask("/", public=False)[1] == {}


def test_large_requests_and_such_without_length_are_refused() -> None:
    join = "/gradio_api/queue/join"
    assert ask(join, "POST", {"content-length": "100"})[0] == 200
    status, _, body, _ = ask(join, "POST", {"content-length": str(PUBLIC.request_bytes + 1)})
    assert status == 413
    assert b"4,000,000 bytes" in body
    assert ask(join, "POST")[0] == 411
    assert ask(join, "POST", {"content-length": "many"})[0] == 411


@pytest.mark.parametrize(("state", "status"), [("loading", 200), ("ready", 200), ("busy", 200), ("broken", 503)])
def test_health_is_told_to_whoever_watches(state: str, status: int) -> None:
    told, _, body, log = ask(HEALTH, state=state)
    assert (told, json.loads(body), log) == (status, {"state": state}, [])


def test_the_log_names_routes_and_no_addresses() -> None:
    (line,) = ask("/gradio_api/call/race", "POST", {"content-length": "12"})[3]
    assert {**line, "at": "", "seconds": 0} == {
        "at": "", "what": "request", "method": "POST", "route": "/gradio_api/call/", "status": 200, "seconds": 0,
        "bytes": 12,
    }  # fmt: skip
    assert ask("/some/secret")[3][0]["route"] == "other"
    assert ask("/assets/index.js")[3] == []


# -- a race that hangs ------------------------------------------------------------------------------------------------


def counting(until: int, hang: threading.Event) -> Generator[int, None, None]:
    yield from range(until)
    hang.wait(10)
    yield -1


def test_the_worker_takes_steps_one_by_one_in_one_thread() -> None:
    threads = set()

    def run() -> Generator[int, None, None]:
        for number in range(3):
            threads.add(threading.current_thread().name)
            yield number

    worker = Worker(5)
    assert [*worker.steps(run()), *worker.steps(run())] == [0, 1, 2, 0, 1, 2]
    assert threads == {"models"}


def test_what_a_run_raises_comes_through_and_closing_closes_it() -> None:
    closed = []

    def run() -> Generator[int, None, None]:
        try:
            yield 1
            raise ValueError("two")
        finally:
            closed.append(True)

    worker = Worker(5)
    with pytest.raises(ValueError, match="two"):
        list(worker.steps(run()))
    steps = worker.steps(run())
    next(steps)
    steps.close()
    assert closed == [True, True]


def test_a_step_without_end_is_given_up_and_the_next_run_goes_on() -> None:
    worker, hang = Worker(0.2), threading.Event()
    steps = worker.steps(counting(1, hang))
    assert next(steps) == 0
    with pytest.raises(Hung):
        next(steps)
    assert list(worker.steps(iter_of(3))) == [0, 1, 2]
    hang.set()


def iter_of(number: int) -> Generator[int, None, None]:
    yield from range(number)


def test_a_hung_race_is_told_and_the_models_are_loaded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, hang = [], threading.Event()
    arena = Arena(lambda progress: loads.append(1) or tiny_pair(), replace(OWN, hung_seconds=0.5))
    arena.load()
    monkeypatch.setattr(Arena, "lanes", lambda self, request, pair, stop: counting(2, hang))
    with pytest.raises(ModelUnavailable, match="hung and was given up"):
        list(arena.race(request()))
    monkeypatch.undo()
    ends = [event.finish_reason for event in arena.race(request(8)) if isinstance(event, Finished)]
    assert ends == ["length", "length"]
    assert (len(loads), arena.health) == (2, "ready")
    hang.set()


def test_health_is_broken_where_no_race_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_load(progress: object) -> Any:
        raise ModelUnavailable("The hub cannot be reached.")

    arena = Arena(no_load)
    assert arena.health == "loading"
    arena.load()
    assert arena.health == "broken"


# -- how it is started ------------------------------------------------------------------------------------------------


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_serving_arguments(parser)
    return parser.parse_args(arguments)


def test_strangers_are_expected_where_they_can_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPACE_ID", raising=False)
    assert not is_public(options())
    assert is_public(options("--public"))
    assert is_public(options("--share"))
    assert options().host == "127.0.0.1"
    assert on_zerogpu({"SPACES_ZERO_GPU": "true"})
    assert not on_zerogpu({})


@pytest.mark.process
def test_on_a_space_strangers_come_from_the_hub_s_proxy() -> None:
    """The variable is read when the module is, as in a Space's process."""
    code = (
        "import argparse; from specdemo.ui.serving import *; parser = argparse.ArgumentParser(); "
        "add_serving_arguments(parser); options = parser.parse_args([]); print(options.host, is_public(options))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env={"SPACE_ID": "some/one"}
    )
    assert done.stdout.split() == ["0.0.0.0", "True"]


def test_a_space_takes_the_pair_for_its_hardware() -> None:
    assert pair_of_space(False, {}) is None
    assert pair_of_space(True, {}) == "auto"
    assert pair_of_space(True, {"SPECDEMO_PAIR": "qwen3-4b-0.6b"}) == "qwen3-4b-0.6b"


def test_logins_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    (tmp_path / "logins").write_text("ada:one:two\n\n grace : x \n", encoding="utf-8")
    assert accounts(str(tmp_path / "logins")) == [("ada", "one:two"), ("grace ", " x")]
    assert accounts("env:DOOR", {"DOOR": "ada:secret"}) == [("ada", "secret")]
    assert accounts(None) is None


@pytest.mark.parametrize("source", ["ada:secret", "env:MISSING", "env:EMPTY", "env:HALF"])
def test_a_bad_login_source_is_one_sentence_that_repeats_no_password(source: str) -> None:
    with pytest.raises(BadRequest) as caught:
        accounts(source, {"EMPTY": " ", "HALF": "ada:\n"})
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_root_path_is_a_path_or_an_address() -> None:
    assert checked_root_path("/demo") == "/demo"
    assert checked_root_path("https://example.org/demo") == "https://example.org/demo"
    assert checked_root_path(None) is None
    with pytest.raises(BadRequest, match="begins with"):
        checked_root_path("demo")


# -- over the loopback ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site() -> Iterator[load.Page]:
    """The public page in front of scripted races, as a program sees it."""

    async def inside_a_loop() -> gr.Blocks:  # outside one, Gradio makes loops of its own and never closes them
        return build(FakeArena(0.001), public=True)

    blocks = asyncio.run(inside_a_loop())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, address, _ = blocks.launch(
            server_name="127.0.0.1",
            server_port=port,
            share=False,
            prevent_thread_lock=True,
            auth=None,
            **launch_options(lambda: "ready", public=True),
        )
        yield load.Page(address.rstrip("/"))
        blocks.close(verbose=False)
        gc.collect()  # in this silence: what Gradio's loops leave open would otherwise be a later test's fault


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_whatever_is_posted_to_any_endpoint_nothing_breaks(site: load.Page) -> None:
    """Every endpoint that the page has, those of later additions too: they are read from its configuration."""
    found = load.hostile(None, site, load.SHORT)  # type: ignore[arg-type]
    assert found["ok"], found
    assert found["endpoints"] == 14
    assert found["requests"] > 10 * found["endpoints"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_no_visitor_of_a_public_page_puts_other_models_in_place(site: load.Page) -> None:
    (switch,) = [one for one in site.endpoints if one["api_name"] == "switch"]
    with load.Visitor(site) as visitor:
        visitor.http.headers.pop("X-Forwarded-For")  # straight from this machine, as far as the server can see
        wanted = json.dumps({"pair": "embedded", "drafter": "own", "precision": "auto"})
        answer = json.loads(visitor.now(switch, [wanted]).json()["data"][0])
    assert answer["local"] is False
    assert "note" in answer


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_public_page_offers_no_more_tokens_than_its_limit(site: load.Page) -> None:
    (slider,) = [
        props for props in site.components.values() if props.get("label") == load.strings()["max_new_tokens_label"]
    ]
    assert slider["maximum"] == PUBLIC.max_new_tokens
    assert httpx.get(site.url + HEALTH).json() == {"state": "ready"}
