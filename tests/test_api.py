"""The endpoint for programs: what `gradio_client` gets, what is refused and how, and that nobody holds the models."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import gradio as gr
import pytest
from fake_lanes import FakeArena, Script, echo_race
from gradio_client import Client
from gradio_client.exceptions import AppError
from ssd_logs import ssd_story
from tiny_folders import save_folder

from specdemo.arena import Arena
from specdemo.errors import SpecdemoError
from specdemo.events import Failed
from specdemo.metrics import fold, speedup
from specdemo.models.loading import load_pair
from specdemo.ui.api import Calls
from specdemo.ui.page import Page, build, launch_options

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

PROMPT = "one two three four five six seven eight nine ten eleven twelve"

HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "Prompt must be text."),
    ({"prompt": ["a"]}, "Prompt must be text."),
    ({"prompt": "   "}, "empty"),
    ({"prompt": "x", "method": {"a": 1}}, "Drafter must be text."),
    ({"prompt": "x", "draft_length": "<b>5</b>"}, "draft length must be a whole number from 0 to 16"),
    ({"prompt": "x", "draft_length": 2.5}, "draft length must be a whole number"),
    ({"prompt": "x", "draft_length": True}, "draft length must be a whole number"),
    ({"prompt": "x", "draft_length": [1, 2]}, "value that it cannot have"),
    ({"prompt": "x", "draft_length": 10**40}, "value that it cannot have"),
    ({"prompt": "x", "max_new_tokens": 0}, "max new tokens must be a whole number"),
    ({"prompt": "x", "temperature": "hot"}, "temperature must be a number"),
    ({"prompt": "x", "temperature": "x" * 100_000}, "value that it cannot have"),
    ({"prompt": "x", "temperature": -1}, "temperature must be from 0 to 100"),
    ({"prompt": "x", "seed": None}, "seed must be a whole number"),
]


def calls_of(arena: FakeArena) -> Calls:
    page = Page(arena)
    return Calls(arena, page.in_turn, page.stop)


def final(arena: FakeArena, **values: Any) -> dict[str, Any]:
    *_, result = calls_of(arena).race("program", values)
    return result


def test_the_result_is_the_fold_of_both_lanes() -> None:
    arena = FakeArena(0)
    result = final(arena, prompt=PROMPT)
    folds = {}
    for lane in ("standard", "speculative"):
        events = [event for event in echo_race_of(PROMPT) if event.lane == lane]
        folds[lane] = fold(events)
        assert result[lane]["text"] == PROMPT
        assert result[lane]["finish_reason"] == "eos"
        assert len(result[lane]["token_ids"]) == 12
        assert result[lane]["metrics"]["tokens"] == folds[lane].tokens == 12
    assert result["standard"]["metrics"] == asdict(folds["standard"])
    assert result["speedup"] == pytest.approx(speedup(folds["standard"], folds["speculative"]))
    assert result["first_divergence"] is None
    assert json.loads(json.dumps(result, allow_nan=False))


def test_a_race_with_ssd_has_a_third_lane_and_is_about_it() -> None:
    arena = FakeArena(0)
    arena.scripts["count"] = events = ssd_story()
    result = final(arena, prompt="count", method="ssd")
    folds = {lane: fold(event for event in events if event.lane == lane) for lane in ("standard", "speculative", "ssd")}
    assert {lane: result[lane]["metrics"]["tokens"] for lane in folds} == dict.fromkeys(folds, 9)
    assert result["ssd"]["metrics"]["hit_rate"] == 0.5
    assert result["speedup"] == pytest.approx(speedup(folds["standard"], folds["ssd"]))
    assert result["first_divergence"] is None
    assert json.loads(json.dumps(result, allow_nan=False))


def echo_race_of(prompt: str) -> Any:
    first, *rest = prompt.split(" ")
    return echo_race([first, *(f" {word}" for word in rest)])


def test_only_the_prompt_is_needed_and_the_rest_reaches_the_race() -> None:
    arena = FakeArena(0)
    final(arena, prompt=PROMPT)
    final(arena, prompt=PROMPT, method="hybrid", draft_length=3, max_new_tokens=9, temperature=0.5, seed=7)
    plain, asked = arena.requests
    assert (plain.method, plain.settings.draft_length, plain.settings.max_new_tokens) == ("speculative", 5, 128)
    settings = asked.settings
    assert (asked.method, settings.draft_length, settings.max_new_tokens) == ("hybrid", 3, 9)
    assert (settings.temperature, settings.seed) == (0.5, 7)


@pytest.mark.parametrize(("values", "says"), HOSTILE)
def test_what_is_no_fit_value_is_one_sentence(values: dict[str, Any], says: str) -> None:
    arena = FakeArena(0)
    with pytest.raises(SpecdemoError) as caught:
        final(arena, **values)
    message = str(caught.value)
    assert says in message
    assert len(message) < 250
    assert "\n" not in message
    assert arena.requests == []


def test_infinite_numbers_are_refused() -> None:
    for value in (math.inf, math.nan):
        with pytest.raises(SpecdemoError, match="must be a number"):
            final(FakeArena(0), prompt="x", temperature=value)


def test_the_first_difference_is_told() -> None:
    arena = FakeArena(0)
    arena.scripts["parts"] = [
        event for lane, words in (("standard", "abcd"), ("speculative", "abxy")) for event in written(lane, words)
    ]
    assert final(arena, prompt="parts")["first_divergence"] == 2


def written(lane: str, words: str) -> Any:
    script = Script(lane).start().first(words[0])
    for word in words[1:]:
        script.round(extra=word)
    return script.finish().events


def test_a_lane_that_fails_is_a_sentence() -> None:
    arena = FakeArena(0)
    arena.scripts["fails"] = [
        *Script("standard").start().first("a").finish().events,
        Failed("speculative", 0, "It broke."),
    ]
    with pytest.raises(SpecdemoError, match="It broke"):
        final(arena, prompt="fails")
    assert arena.running == 0


def test_a_program_that_goes_away_frees_models_and_line() -> None:
    arena = FakeArena(0)
    page = Page(arena)
    calls = Calls(arena, page.in_turn, page.stop)
    results: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: results.extend(calls.race("program", {"prompt": "slow"})))
    thread.start()
    while not arena.running:
        time.sleep(0.01)
    calls.gone("another")
    assert arena.running
    calls.gone("program")
    thread.join(timeout=10)
    assert arena.running == 0
    assert [results[-1][lane]["finish_reason"] for lane in ("standard", "speculative")] == ["cancelled"] * 2


def test_two_calls_of_one_program_follow_each_other() -> None:
    arena = FakeArena(0)
    calls, results = calls_of(arena), []
    threads = [
        threading.Thread(target=lambda: results.append(list(calls.race("program", {"prompt": PROMPT}))[-1]))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert [result["standard"]["text"] for result in results] == [PROMPT, PROMPT]
    assert arena.most_running == 1


# -- over the loopback ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: LlamaForCausalLM, tiny_draft: LlamaForCausalLM
) -> Iterator[str]:
    """A server with tiny models."""
    root = tmp_path_factory.mktemp("models")
    folders = [str(save_folder(model, root / name)) for name, model in (("t", tiny_target), ("d", tiny_draft))]
    arena = Arena(lambda progress: load_pair(*folders, "float32", "cpu"))
    arena.load()

    async def inside_a_loop() -> gr.Blocks:  # outside one, Gradio makes loops of its own and never closes them
        return build(arena)

    blocks = asyncio.run(inside_a_loop())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, address, _ = blocks.launch(
            server_name="127.0.0.1", server_port=port, share=False, prevent_thread_lock=True, **launch_options()
        )
        yield address
        blocks.close(verbose=False)
        gc.collect()  # in this silence: what Gradio's loops leave open would otherwise be a later test's fault


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Client]:
    made = Client(url, verbose=False)
    yield made
    made.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_program_gets_both_lanes(client: Client) -> None:
    result = client.predict(prompt="one two three", max_new_tokens=12, draft_length=3, api_name="/race")
    assert set(result) == {"standard", "speculative", "speedup", "first_divergence"}
    for lane in ("standard", "speculative"):
        assert set(result[lane]) == {"text", "token_ids", "finish_reason", "metrics"}
        assert 1 <= len(result[lane]["token_ids"]) <= 12
        assert result[lane]["metrics"]["tokens"] == len(result[lane]["token_ids"])
    assert result["standard"]["text"] == result["speculative"]["text"]
    assert result["first_divergence"] is None
    assert result["speculative"]["metrics"]["rounds"] <= result["standard"]["metrics"]["rounds"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_the_endpoint_is_documented_with_its_defaults(client: Client) -> None:
    endpoints = client.view_api(return_format="dict")["named_endpoints"]
    assert list(endpoints) == ["/race"]
    parameters = endpoints["/race"]["parameters"]
    assert [parameter["parameter_name"] for parameter in parameters] == [
        "prompt", "method", "draft_length", "max_new_tokens", "temperature", "seed",
    ]  # fmt: skip
    assert [parameter["parameter_has_default"] for parameter in parameters] == [False, True, True, True, True, True]
    assert [parameter["type"]["type"] for parameter in parameters] == [
        "string", "string", "integer", "integer", "number", "integer",
    ]  # fmt: skip
    assert "first_divergence" in endpoints["/race"]["description"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_program_is_told_what_is_wrong_in_one_sentence(client: Client) -> None:
    more = [
        ({"prompt": "x" * 50_001}, "50,001 characters and the limit is 50,000"),
        ({"prompt": "x", "max_new_tokens": 2049}, "At most 2048 new tokens"),
        ({"prompt": "x", "method": "standard"}, "standard lane always runs"),
        ({"prompt": "x", "method": "<script>"}, "There is no method '<script>'"),
        ({"prompt": "x" * 600}, "600 tokens"),
    ]
    for values, says in [*HOSTILE[:1], *HOSTILE[4:5], *more]:
        with pytest.raises(AppError) as caught:
            client.predict(**values, api_name="/race")
        assert says in str(caught.value)
        assert "Traceback" not in str(caught.value)
    assert client.predict(prompt="still there", max_new_tokens=4, api_name="/race")["standard"]["text"]
