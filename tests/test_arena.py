"""The arena: fair turns, one owner of the models, and nobody who waits on a ghost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import TableLM, letters, random_table

from specdemo import arena as arena_module
from specdemo.arena import Arena, Limits, RaceRequest, in_turns
from specdemo.errors import BadRequest, ModelUnavailable
from specdemo.events import Event, Failed, Finished, Started, Verified
from specdemo.failures import failure_message
from specdemo.metrics import fold
from specdemo.models.loading import Pair
from specdemo.settings import Settings

VOCAB = 8


class _Letters:
    """Just enough of a tokenizer: every character becomes one of the table's ids."""

    chat_template = None

    def encode(self, prompt: str) -> list[int]:
        return [1 + ord(char) % (VOCAB - 1) for char in prompt]


def tiny_pair(context: int = 4096) -> Pair:
    target = TableLM(random_table(0, VOCAB), "target", context=context)
    draft = TableLM(random_table(1, VOCAB), "draft", context=context)
    return Pair(target, draft, _Letters(), letters(VOCAB), frozenset(), Path())


@pytest.fixture
def arena() -> Arena:
    made = Arena(lambda progress: tiny_pair())
    made.load()
    assert made.status.state == "ready"
    return made


def request(tokens: int = 24, **more: object) -> RaceRequest:
    return RaceRequest("hello there", Settings(max_new_tokens=tokens, ignore_eos=True), **more)  # type: ignore[arg-type]


def of(events: list[Event], lane: str) -> list[Event]:
    return [event for event in events if event.lane == lane]


def test_both_lanes_end_with_the_same_greedy_ids(arena: Arena) -> None:
    events = list(arena.race(request()))
    ends = [event for event in events if isinstance(event, Finished)]
    assert {end.lane for end in ends} == {"standard", "speculative"}
    assert ends[0].token_ids == ends[1].token_ids
    assert len(ends[0].token_ids) == 24
    assert fold(of(events, "speculative")).rounds < fold(of(events, "standard")).rounds
    assert arena.status.state == "ready"


def test_ssd_races_beside_both_that_it_is_measured_against(arena: Arena) -> None:
    events = list(arena.race(request(method="ssd")))
    methods = {event.lane: event.method for event in events if isinstance(event, Started)}
    assert methods == {"standard": "standard", "speculative": "speculative", "ssd": "ssd"}
    ends = [event for event in events if isinstance(event, Finished)]
    assert len({end.token_ids for end in ends}) == 1
    assert fold(of(events, "ssd")).hit_rate is not None


def test_where_ssd_cannot_run_the_race_has_two_lanes() -> None:
    made = Arena(lambda progress: replace(tiny_pair(), draft=None))
    made.load()
    events = list(made.race(request(method="ssd")))
    started = {event.lane: event for event in events if isinstance(event, Started)}
    assert {lane: event.method for lane, event in started.items()} == {
        "standard": "standard",
        "speculative": "prompt-lookup",
    }
    assert any("in place of ssd" in note for note in started["speculative"].notes)


def test_the_lane_with_less_engine_time_goes_next() -> None:
    def lane(name: str, seconds: float, rounds: int) -> Iterator[Event]:
        for i in range(1, rounds + 1):
            yield Verified(name, i * seconds, i, 0.0, 0.0, (), 0, None, None)
        yield Finished(name, rounds * seconds, "length", (), "")

    order = [event.lane for event in in_turns({"slow": lane("slow", 3.0, 3), "fast": lane("fast", 1.0, 6)})]
    assert order[:8] == ["slow", "fast", "fast", "fast", "slow", "fast", "fast", "fast"]


def test_a_lane_that_fails_ends_with_a_sentence_and_the_other_goes_on(arena: Arena) -> None:
    pair = arena.pair
    assert pair is not None
    draft = pair.draft
    assert isinstance(draft, TableLM)
    draft.fail_at = draft.forwards + 6
    events = list(arena.race(request()))
    failed = of(events, "speculative")[-1]
    assert isinstance(failed, Failed)
    assert "try again" in failed.message
    assert isinstance(of(events, "standard")[-1], Finished)
    draft.fail_at = None
    assert [type(event) for event in list(arena.race(request()))].count(Finished) == 2


def test_stop_ends_both_lanes_within_a_round(arena: Arena) -> None:
    events, stopped_at = [], 0
    for event in arena.race(request(2000), visitor="me"):
        events.append(event)
        if len(events) == 40:
            assert not arena.stop("someone else")
            assert arena.stop("me")
            stopped_at = len(events)
    ends = [event for event in events if isinstance(event, Finished)]
    assert [end.finish_reason for end in ends] == ["cancelled", "cancelled"]
    assert len(events) - stopped_at <= 2 * 3 + 2  # a round of each lane, and its end
    assert arena.status.state == "ready"


def test_closing_the_race_frees_the_models_and_closes_their_caches(arena: Arena) -> None:
    race = arena.race(request(2000))
    for _ in range(10):
        next(race)
    assert arena.status.state == "busy"
    race.close()  # type: ignore[attr-defined]
    assert arena.status.state == "ready"
    pair = arena.pair
    assert pair is not None
    for model in (pair.target, pair.draft):
        assert isinstance(model, TableLM)
        assert all(cache.closed for cache in model.opened)


def test_the_next_visitor_does_not_wait_on_a_ghost(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "GHOST_SECONDS", 0.2)
    ghost = arena.race(request(2000), visitor="gone")
    for _ in range(10):
        next(ghost)  # and never again: the tab is closed, the generator stays suspended
    began = time.monotonic()
    ends = [event for event in arena.race(request(), visitor="next") if isinstance(event, Finished)]
    assert [end.finish_reason for end in ends] == ["length", "length"]
    assert time.monotonic() - began < 5.0
    assert list(ghost) == []  # it lost the models, and touches them no more


def test_a_visitor_who_reads_slowly_keeps_the_models_while_nobody_waits(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "GHOST_SECONDS", 0.01)
    events = []
    for event in arena.race(request(8)):
        time.sleep(0.02)
        events.append(event)
    assert [event.finish_reason for event in events if isinstance(event, Finished)] == ["length", "length"]


def test_two_visitors_are_served_one_after_the_other(arena: Arena) -> None:
    lanes: list[tuple[int, float]] = []

    def visit(number: int) -> None:
        lanes.extend((number, time.monotonic()) for _event in arena.race(request(), visitor=str(number)))

    threads = [threading.Thread(target=visit, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    numbers = [number for number, _ in sorted(lanes, key=lambda item: item[1])]
    assert len(set(numbers)) == 2
    assert numbers in (sorted(numbers), sorted(numbers, reverse=True))


def test_the_wall_clock_limit_cancels() -> None:
    arena = Arena(lambda progress: tiny_pair(), Limits(seconds=0.05))
    arena.load()
    ends = [event for event in arena.race(request(2000)) if isinstance(event, Finished)]
    assert [end.finish_reason for end in ends] == ["cancelled", "cancelled"]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (RaceRequest("   "), "empty"),
        (RaceRequest("a\x00b"), "NUL"),
        (RaceRequest("a\ud800b"), "surrogate"),
        (RaceRequest("x" * 100_000), "50,000"),
        (RaceRequest("x", Settings(max_new_tokens=4000)), "2048"),
        (RaceRequest("x", method="standard"), "standard"),
        (RaceRequest("x", method="magic"), "prompt-lookup"),
    ],
)
def test_a_bad_request_is_one_sentence_before_anything_runs(arena: Arena, bad: RaceRequest, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        arena.check(bad)
    with pytest.raises(BadRequest, match=says):
        next(arena.race(bad))
    assert arena.status.state == "ready"


def test_a_prompt_longer_than_the_context_names_both_lengths() -> None:
    arena = Arena(lambda progress: tiny_pair(context=64))
    arena.load()
    with pytest.raises(BadRequest, match=r"100 tokens .* 64"):
        next(arena.race(RaceRequest("x" * 100)))
    assert [type(event) for event in arena.race(request(8))].count(Finished) == 2


def test_races_wait_for_loading_and_tell_what_failed() -> None:
    go = threading.Event()

    def slow_load(progress: object) -> Pair:
        go.wait(10)
        return tiny_pair()

    arena = Arena(slow_load)
    thread = arena.start_loading()
    assert arena.status.state == "loading"
    threading.Timer(0.1, go.set).start()
    assert isinstance(next(arena.race(request())), Started)
    thread.join(10)

    def no_load(progress: object) -> Pair:
        raise ModelUnavailable("The hub cannot be reached: check the network.")

    broken = Arena(no_load)
    broken.load()
    assert broken.status.state == "failed"
    with pytest.raises(ModelUnavailable, match="check the network"):
        next(broken.race(request()))


def test_without_a_draft_model_the_lane_says_what_runs_instead() -> None:
    arena = Arena(lambda progress: replace(tiny_pair(), draft=None))
    arena.load()
    started = next(event for event in arena.race(request()) if event.lane == "speculative")
    assert isinstance(started, Started)
    assert started.method == "prompt-lookup"
    assert any("no draft model" in note for note in started.notes)


def test_running_out_of_memory_is_told_as_that() -> None:
    assert "memory ran out" in failure_message(torch.cuda.OutOfMemoryError("CUDA out of memory"))
    assert "memory ran out" in failure_message(MemoryError())
