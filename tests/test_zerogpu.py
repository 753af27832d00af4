"""Runs that borrow a card in a forked process: what arrives, what it costs, and how everything ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from borrowed_gpu import BorrowedGpu
from tiny import TableLM, letters, random_table

from specdemo.arena import RaceRequest
from specdemo.comparison import Row
from specdemo.errors import ModelUnavailable, SpecdemoError
from specdemo.events import Event, Finished, Started
from specdemo.limits import PUBLIC
from specdemo.models.loading import Pair
from specdemo.settings import Settings
from specdemo.ui.zerogpu import START_S, ZeroGpuArena, seconds_for

VOCAB = 12
LIMITS = replace(PUBLIC, prompt_characters=50_000, max_new_tokens=4000)

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"  # that is how ZeroGPU works
)


class _Letters:
    """The one part of a tokenizer that an arena needs: ids of a prompt."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(char) % VOCAB for char in text]}

    def encode(self, text: str, **_: Any) -> list[int]:
        return self(text)["input_ids"]


def pair() -> Pair:
    target = TableLM(random_table(0, VOCAB), "target", context=4096)
    draft = TableLM(random_table(1, VOCAB), "draft", context=4096)
    return Pair(target, draft, _Letters(), letters(VOCAB), frozenset(), Path())


def request(tokens: int = 24, prompt: str = "hello there") -> RaceRequest:
    return RaceRequest(prompt, Settings(max_new_tokens=tokens, ignore_eos=True))


@pytest.fixture
def gpu() -> Iterator[BorrowedGpu]:
    made = BorrowedGpu()
    yield made
    made.end()


@pytest.fixture
def arena(gpu: BorrowedGpu) -> ZeroGpuArena:
    made = ZeroGpuArena(lambda progress: pair(), LIMITS, gpu)
    made.load()
    assert made.health == "ready"
    return made


def reasons(events: list[Event]) -> list[str]:
    return [event.finish_reason for event in events if isinstance(event, Finished)]


def test_a_race_runs_in_the_forked_process_and_arrives_whole(arena: ZeroGpuArena, gpu: BorrowedGpu) -> None:
    events = list(arena.race(request()))
    assert sum(isinstance(event, Started) for event in events) == 2
    assert reasons(events) == ["length", "length"]
    ids = [event.token_ids for event in events if isinstance(event, Finished)]
    assert ids[0] == ids[1]
    assert gpu.process.pid != os.getpid()


def test_nothing_was_computed_in_the_page_s_process(arena: ZeroGpuArena) -> None:
    list(arena.race(request()))
    assert arena.pair is not None
    target = arena.pair.target
    assert isinstance(target, TableLM)
    assert target.opened == []


def test_the_forked_process_idles_until_the_next_race(arena: ZeroGpuArena, gpu: BorrowedGpu) -> None:
    list(arena.race(request()))
    first = gpu.process.pid
    assert reasons(list(arena.race(request(8)))) == ["length", "length"]
    assert gpu.process.pid == first


def test_timestamps_are_the_forked_process_s_own(arena: ZeroGpuArena) -> None:
    """A consumer that dawdles is in no lane's time."""
    ends, began = [], time.monotonic()
    for event in arena.race(request(16)):
        time.sleep(0.02)
        ends.append(event.t)
    assert max(ends) < (time.monotonic() - began) / 2


def test_the_comparison_borrows_too(arena: ZeroGpuArena, gpu: BorrowedGpu) -> None:
    rows = [item for item in arena.compare(request(8)) if isinstance(item, Row)]
    assert {row.method for row in rows} >= {"standard", "speculative", "prompt-lookup"}
    assert gpu.durations[0] > seconds_for("race", request(8), PUBLIC.seconds)


def test_the_time_asked_for_follows_the_request_up_to_the_limit(arena: ZeroGpuArena, gpu: BorrowedGpu) -> None:
    for tokens in (8, 16, 256):
        list(arena.race(request(tokens)))
    little, more, most = gpu.durations
    assert START_S < little < more < most <= PUBLIC.seconds
    assert seconds_for("race", request(100_000), PUBLIC.seconds) == PUBLIC.seconds


def test_stop_ends_both_lanes_and_the_process_serves_the_next(arena: ZeroGpuArena, gpu: BorrowedGpu) -> None:
    events: list[Event] = []
    for event in arena.race(request(2000, "stop"), visitor="me"):
        events.append(event)
        if len(events) == 20:
            assert arena.stop("me")
    assert reasons(events) == ["cancelled", "cancelled"]
    first = gpu.process.pid
    assert reasons(list(arena.race(request(8)))) == ["length", "length"]
    assert gpu.process.pid == first


def test_a_visitor_who_leaves_frees_the_card(arena: ZeroGpuArena) -> None:
    race = arena.race(request(2000))
    for _ in range(10):
        next(race)
    assert arena.status.state == "busy"
    race.close()  # type: ignore[attr-defined]
    assert arena.status.state == "ready"
    assert reasons(list(arena.race(request(8)))) == ["length", "length"]


def test_a_spent_quota_is_told_as_what_it_is(arena: ZeroGpuArena, gpu: BorrowedGpu) -> None:
    gpu.quota = 5
    with pytest.raises(ModelUnavailable, match=r"quota exceeded: .*requested vs\. 5s left.* Try again in"):
        list(arena.race(request()))
    gpu.quota = 10_000
    assert reasons(list(arena.race(request(8)))) == ["length", "length"]


def test_a_process_that_is_killed_is_told_and_replaced(arena: ZeroGpuArena, gpu: BorrowedGpu) -> None:
    race = arena.race(request(2000))
    next(race)
    os.kill(gpu.process.pid, signal.SIGKILL)
    with pytest.raises(ModelUnavailable, match="GPU task aborted"):
        list(race)
    assert arena.status.state == "ready"
    assert reasons(list(arena.race(request(8)))) == ["length", "length"]


def test_a_refusal_over_there_keeps_its_sentence(arena: ZeroGpuArena) -> None:
    with pytest.raises(SpecdemoError, match=r"\d+ tokens"):
        list(arena.race(request(8, "x" * 5000)))
