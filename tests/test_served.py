"""Lanes that servers decode, against what a vLLM server really sent (`bench/served.py record`), played back on
loopback."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served_arenas import CODE, EMOJI, GROUNDED, QUICK, RAW, lines_of, recording, served

from bench.recorded_server import Fault, Recorded, running
from specdemo import cli, trace
from specdemo.errors import BadRequest
from specdemo.events import (
    UNTOLD,
    Arrived,
    Counted,
    Drafted,
    Event,
    Failed,
    Finished,
    Prefilled,
    Retold,
    Started,
    Verified,
    settled,
)
from specdemo.metrics import Metrics, fold
from specdemo.request import RaceRequest
from specdemo.served.address import Key, Server, servers_of
from specdemo.served.arena import ServedArena
from specdemo.served.bench import measure, tables
from specdemo.served.lane import Patience
from specdemo.served.rounds import Step, Unfit, rebuilt
from specdemo.served.texts import Disagreement, token_texts
from specdemo.served.wire import Chunk, Speculation, body_of, chunk_of, chunks
from specdemo.settings import Settings
from specdemo.suite import SuitePrompt
from specdemo.terminal import pieces_of

ROOT = Path(__file__).parents[1]
HERE = Server("speculative", "http://127.0.0.1:1", "smol", Key("sesame"))
BOTH = "standard=http://a:1,speculative=http://b:2"


def last(events: Sequence[Event]) -> Any:
    return events[-1]


def of(events: Sequence[Event], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


# -- addresses ---------------------------------------------------------------------------------------------------------


def test_both_lanes_are_named_with_model_and_key() -> None:
    servers = servers_of(
        "speculative=https://b.example/x/v1/, standard=http://a:8000", "big", "KEY", environment={"KEY": " s3cret "}
    )
    assert [(s.lane, s.url, s.model, s.host) for s in servers] == [
        ("standard", "http://a:8000", "big", "a:8000"),
        ("speculative", "https://b.example/x", "big", "b.example"),
    ]
    assert servers[0].key.headers() == {"Authorization": "Bearer s3cret"}
    assert "s3cret" not in f"{servers} {servers[0].key!r} {servers[0].key}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("http://a:1", "names no lane's server"),
        ("standard=http://a:1", "a server for each lane"),
        ("standard=http://a:1,standard=http://b:2", "names no lane's server"),
        ("draft=http://a:1,standard=http://b:2", "names no lane's server"),
        ("standard=ftp://a:1,speculative=http://b:2", "is none: write it like"),
        ("standard=http://,speculative=http://b:2", "is none: write it like"),
        ("standard=http://a:99999,speculative=http://b:2", "is none: write it like"),
        ("standard=http://me:s3cret@a:1,speculative=http://b:2", "must not hold a key"),
        ("standard=http://a:1/?key=s3cret,speculative=http://b:2", "must not hold a key"),
    ],
)
def test_what_is_no_pair_of_servers_gets_a_sentence(text: str, told: str) -> None:
    with pytest.raises(BadRequest, match=told) as raised:
        servers_of(text, environment={})
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize("environment", [{}, {"KEY": "  "}, {"KEY": "a\nb"}, {"KEY": "ключ"}])
def test_a_key_that_is_none_is_not_repeated(environment: dict[str, str]) -> None:
    with pytest.raises(BadRequest, match="variable KEY") as raised:
        servers_of(BOTH, key_variable="KEY", environment=environment)
    assert not any(value.strip() and value in str(raised.value) for value in environment.values())


# -- rounds ------------------------------------------------------------------------------------------------------------


def told(accepted: Sequence[int], drafted: Sequence[int]) -> Speculation:
    return Speculation(len(accepted), sum(drafted), sum(accepted), tuple(accepted), tuple(drafted))


@st.composite
def answers(draw: Any) -> tuple[list[tuple[int, int] | None], int]:
    """Steps (accepted, drafted), None for one without a draft, and how many tokens of the last are cut off."""
    step = st.integers(1, 5).flatmap(lambda k: st.integers(0, k).map(lambda kept: (kept, k)))
    steps = draw(st.lists(st.none() | step, max_size=20))
    cut = draw(st.integers(0, steps[-1][0])) if steps and steps[-1] else 0
    return steps, cut


@given(answers())
@settings(max_examples=200, deadline=None)
def test_rounds_come_back_from_what_a_server_tells(answer: tuple[list[tuple[int, int] | None], int]) -> None:
    """Every token's fate, always; every round's place, where the server tells of every round."""
    steps, cut = answer
    lengths = [1 if step is None else step[0] + 1 for step in steps]
    if lengths:
        lengths[-1] -= cut
    drafts = [step for step in steps if step]
    found, exact = rebuilt([1, *lengths], told([kept for kept, _ in drafts], [made for _, made in drafts]))
    assert [step.end - step.begin for step in found] == lengths
    accepted = [index for step in found for index in range(step.begin, step.begin + step.kept)]
    position, expected = 1, []
    for step, length in zip(steps, lengths, strict=True):
        expected += range(position, position + min(step[0] if step else 0, length))
        position += length
    if exact:
        assert [(s.accepted, s.drafted) for s in found] == [step or (0, 0) for step in steps]
    if exact or not cut:
        assert accepted == expected
    if None not in steps:
        assert exact
    assert Counter((s.accepted, s.drafted) for s in found if s.drafted) == Counter(drafts)


def test_an_end_inside_a_draft_cuts_it() -> None:
    """vLLM counts what its model accepted, also beyond the end of the answer."""
    (first, second), exact = rebuilt([1, 5, 2], told([4, 3], [4, 4]))
    assert exact
    assert first == Step(1, 6, 1, 4, 4)
    assert (second.kept, second.extra, second.end) == (2, False, 8)


def test_steps_that_came_in_one_chunk_are_told_apart() -> None:
    found, exact = rebuilt([1, 7], told([2, 3], [4, 4]))
    assert [(s.begin, s.end, s.chunk) for s in found] == [(1, 4, 1), (4, 8, 1)]
    assert exact


def test_steps_without_a_draft_stand_before_refused_ones() -> None:
    found, exact = rebuilt([1, 1, 1, 3], told([0, 2], [4, 4]))
    assert not exact
    assert [s.drafted for s in found] == [0, 4, 4]


@pytest.mark.parametrize(
    ("sizes", "speculation", "why"),
    [
        ([1, 1], told([4], [4, 4][:1]), "do not add up to its tokens"),
        ([1, 3], told([5], [4]), "more tokens than it drafted"),
        ([1, 3], Speculation(2, 4, 2, (2,), (4,)), "other numbers of steps"),
        ([1, 3], Speculation(1, 9, 2, (2,), (4,)), "to its totals"),
        ([1, 3], Speculation(1, 4, 2), "one by one"),
        ([], told([1], [2]), "sent no tokens"),
        ([1] + [1] * 3000, told([0] * 1500, [1] * 1500), "too long"),
    ],
)
def test_counts_that_cannot_be_are_refused(sizes: list[int], speculation: Speculation, why: str) -> None:
    if why == "do not add up to its tokens":
        speculation = told([2, 2], [4, 4])
    with pytest.raises(Unfit, match=why):
        rebuilt(sizes, speculation)


# -- texts -------------------------------------------------------------------------------------------------------------


def test_tokens_of_half_characters_add_nothing_until_it_is_whole() -> None:
    spellings = {1: "ðŁ", 2: "ĺĢ", 3: "Ġall", 4: "Ċ"}
    assert token_texts([1, 2, 3, 4], "😀 all\n", spellings) == ["", "😀", " all", "\n"]


def test_sentencepiece_writes_spaces_and_bytes_in_its_own_way() -> None:
    spellings = {1: "▁Hi", 2: "▁", 3: "<0xE2>", 4: "<0x82>", 5: "<0xAC>"}
    assert token_texts([1, 2, 3, 4, 5], "Hi €", spellings) == ["Hi", " ", "", "", "€"]


def test_an_unknown_end_adds_nothing_and_an_unknown_middle_gives_up() -> None:
    assert token_texts([1, 9], "Hi", {1: "Hi"}) == ["Hi", ""]
    assert token_texts([9, 1], "Hi", {1: "Hi"}) is None


def test_a_stop_string_cuts_the_last_texts() -> None:
    assert token_texts([1, 2, 3], "one t", {1: "one", 2: "Ġtwo", 3: "Ġthree"}) == ["one", " t", ""]


def test_ids_of_another_text_are_seen() -> None:
    with pytest.raises(Disagreement):
        token_texts([1, 2], "Hello you", {1: "Hello", 2: "Ġme"})


# -- the stream --------------------------------------------------------------------------------------------------------


def parsed(*blocks: bytes) -> list[Chunk]:
    async def stream() -> AsyncIterator[bytes]:
        for block in blocks:
            yield block

    async def read() -> list[Chunk]:
        return [chunk async for chunk in chunks(HERE, stream())]

    return asyncio.run(read())


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
@settings(max_examples=30, deadline=None)
def test_a_stream_may_be_cut_into_blocks_anywhere(lengths: list[int]) -> None:
    data = "".join(f"{line}\n\n" for _, line in lines_of("detailed", EMOJI)).encode()
    blocks, at = [], 0
    for length in lengths:
        blocks.append(data[at : at + length])
        at += length
    assert parsed(*blocks, data[at:]) == parsed(data)


def test_line_separators_inside_a_text_and_comments_between_chunks_are_no_lines() -> None:
    text = "a\u2028b\x85c"
    line = json.dumps({"choices": [{"text": text}]}, ensure_ascii=False).encode()
    found = parsed(b": ping\r\n\r\nevent: x\ndata:" + line + b"\r\n\r\ndata: [DONE]\n\ndata: not read\n")
    assert [chunk.text for chunk in found] == [text]


def test_llama_cpp_tells_totals_and_its_own_times() -> None:
    """As its documentation writes them; no such server was tried."""
    timings = {"prompt_ms": 20.0, "predicted_n": 16, "predicted_ms": 400.0, "draft_n": 12, "draft_n_accepted": 9}
    chunk = chunk_of(HERE, json.dumps({"choices": [], "timings": timings}).encode())
    assert (chunk.total, chunk.speculation, chunk.server_s) == (16, Speculation(0, 12, 9), (0.02, 0.4))
    lanes = {lane: body_of("llama.cpp", lane, "m", "p", Settings(draft_length=3), False) for lane in ("standard", "s")}
    assert lanes["standard"]["speculative.n_max"] == 0


def test_what_a_request_asks_for_is_what_was_chosen() -> None:
    chosen = Settings(
        max_new_tokens=9, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, repetition_penalty=1.2, seed=3, stop=("x",),
        ignore_eos=True,
    )  # fmt: skip
    body = body_of("vllm", "speculative", "m", "hi", chosen, raw=False)
    expected = {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 9,
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "seed": 3,
        "stop": ["x"], "ignore_eos": True, "return_token_ids": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert body == expected
    assert body_of("other", "speculative", "m", "hi", chosen, raw=True)["prompt"] == "hi"


# -- races -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def detailed() -> Any:
    with served() as both:
        yield {
            (p, raw): both.race(p, raw) for p, raw in ((GROUNDED, False), (CODE, False), (EMOJI, False), (RAW, True))
        }


def reported(kind: str, prompt: str) -> dict[str, Any]:
    """The metrics with which the recorded stream ends."""
    usage = json.loads(lines_of(kind, prompt)[-2][1].removeprefix("data: "))
    metrics: dict[str, Any] = usage["metrics"]["speculative_decoding"]
    return metrics


@pytest.mark.parametrize("prompt", [GROUNDED, CODE, EMOJI, RAW])
def test_rounds_add_up_to_what_the_server_reports(detailed: Any, prompt: str) -> None:
    events = detailed[prompt, prompt == RAW]["speculative"]
    trace.check(events)
    theirs, ours = reported("detailed", prompt), fold(events)
    rounds = [event for event in of(settled(events), Verified) if event.judged]
    clipped = [token for event in rounds for token in event.judged if token.fate == "clipped"]
    assert ours.drafted + len(clipped) == theirs["num_draft_tokens"]
    kept = [event.num_accepted for event in rounds]
    assert kept[:-1] == theirs["per_step_accepted"][:-1]
    assert kept[-1] == theirs["per_step_accepted"][-1] or (clipped and kept[-1] < theirs["per_step_accepted"][-1])
    assert ours.accepted == sum(kept)
    drafting = [e for e in of(settled(events), Drafted) if e.tokens]
    assert len(drafting) == theirs["num_spec_steps"]
    assert [len(e.tokens) for e in drafting] == theirs["per_step_drafted"]


def test_every_accepted_token_is_one_of_the_answer(detailed: Any) -> None:
    for events in (lanes["speculative"] for lanes in detailed.values()):
        ids, text = [], ""
        for event in settled(events):
            if isinstance(event, Prefilled):
                ids, text = [event.token.id], event.token.text
            if isinstance(event, Verified):
                kept = [token for token in event.judged if token.fate == "accepted"]
                assert all(token.id == UNTOLD for token in event.judged[len(kept) :])
                extra = [event.extra] if event.extra else []
                ids += [token.id for token in [*kept, *extra]]
                text += "".join(token.text for token in [*kept, *extra])
        assert tuple(ids) == last(events).token_ids
        assert text == last(events).text


def test_nothing_is_said_of_p_and_q(detailed: Any) -> None:
    for event in settled(detailed[CODE, False]["speculative"]):
        if isinstance(event, Drafted):
            assert {token.q for token in event.tokens} <= {None}
        if isinstance(event, Verified):
            assert {(t.p, t.q, t.acceptance, t.uniform) for t in event.judged} <= {(None, None, None, None)}
            assert event.extra is None or event.extra.p is None


def test_a_race_survives_a_file_with_its_rounds_only(detailed: Any) -> None:
    events = [event for lane in detailed[GROUNDED, False].values() for event in lane]
    lines = "".join(trace.to_json(event) + "\n" for event in trace.with_metrics(settled(events)))
    back = trace.parse(lines)
    trace.check(back)
    assert not of(back, Arrived)
    assert not of(back, Retold)
    assert {event.clock for event in of(back, Started)} == {"client"}
    assert all(event.network_s > 0 for event in of(back, Started))


def test_a_standard_lane_is_one_pass_a_token(detailed: Any) -> None:
    events = detailed[CODE, False]["standard"]
    metrics = fold(events)
    assert (metrics.tokens, metrics.rounds, metrics.mean_acceptance_length) == (96, 95, 1.0)
    assert metrics.acceptance_rate is None
    assert last(events).token_ids == last(detailed[CODE, False]["speculative"]).token_ids


def test_where_a_refused_draft_fell_is_called_certain_only_where_it_is(detailed: Any) -> None:
    notes = {prompt: " ".join(last(lanes["speculative"]).notes) for (prompt, _), lanes in detailed.items()}
    assert "as late as they fit" in notes[CODE]
    assert "as late as they fit" not in notes[GROUNDED]
    assert "is shown as □" in notes[CODE]
    assert {prompt: of(lanes["speculative"], Retold)[0].exact for (prompt, _), lanes in detailed.items()} == {
        GROUNDED: True, CODE: False, EMOJI: True, RAW: False,
    }  # fmt: skip


def test_times_are_those_of_arrival() -> None:
    with served(speed=50.0) as both:
        events = both.race()["speculative"]
    arrived = of(events, Arrived)
    assert fold(events).ttft_s == arrived[0].t
    assert {event.t for event in of(settled(events), Verified)} <= {event.t for event in arrived}
    assert arrived[-1].t > arrived[0].t > 0.05
    assert last(events).t == arrived[-1].t


def test_without_the_flag_pieces_stay_as_they_arrived_and_it_is_said() -> None:
    with served("without") as both:
        events = both.race(CODE)["speculative"]
    metrics = fold(events)
    assert not of(events, Verified)
    assert "--per-request-spec-decode-metrics" in " ".join(last(events).notes)
    assert (metrics.tokens, metrics.rounds, metrics.acceptance_rate) == (96, 0, None)
    assert metrics.tokens_per_second is not None
    trace.check(events)


def test_a_stop_string_ends_an_answer_without_its_rounds() -> None:
    with served() as both:
        lanes = both.race("Count from one to ten.", stop=("3",))
    for events in lanes.values():
        assert last(events).finish_reason == "stop"
        assert last(events).text == "1. 1\n2. 2\n"
    assert "stop string" in " ".join(last(lanes["speculative"]).notes)
    assert fold(lanes["speculative"]).tokens == 11
    assert fold(lanes["standard"]).rounds == 10


def test_totals_are_used_where_rounds_are_not_told() -> None:
    with served("summary") as both:
        events = both.race(CODE)["speculative"]
    theirs, metrics = reported("summary", CODE), fold(events)
    assert (metrics.drafted, metrics.accepted) == (theirs["num_draft_tokens"], theirs["num_accepted_draft_tokens"])
    assert metrics.rounds == 95 - metrics.accepted
    assert metrics.mean_acceptance_length == pytest.approx(95 / metrics.rounds)
    assert "in total" in " ".join(last(events).notes)
    assert "By the server's own clock: " in " ".join(last(events).notes)
    assert of(events, Counted)
    trace.check(events)


def test_a_server_that_tells_no_ids_is_counted_when_it_is_done() -> None:
    lines = []
    for t, line in lines_of("without", CODE):
        record = json.loads(line.removeprefix("data: ")) if line != "data: [DONE]" else None
        for choice in record["choices"] if record else ():
            choice.pop("token_ids", None)
        lines.append((t, "data: " + json.dumps(record) if record else line))
    with served("without", changed={CODE: lines}) as both:
        events = both.race(CODE)["speculative"]
    metrics = fold(events)
    assert metrics.tokens == 96
    assert set(last(events).token_ids) == {UNTOLD}
    assert metrics.tpot_s == pytest.approx((last(events).t - metrics.ttft_s) / 95)
    assert "tells no token ids" in " ".join(last(events).notes)
    trace.check(events)


def test_a_terminal_prints_a_served_run_once() -> None:
    with served() as both:
        events = both.race()["speculative"]
    assert (
        "".join(piece.text for event in settled(events) for piece in pieces_of(event) if piece.kept)
        == last(events).text
    )


# -- what goes wrong ---------------------------------------------------------------------------------------------------

LINES = 6
"""Of a stream before a fault in its middle."""

FAULTS = {
    "401": (Fault(status=401, line='{"error":"Unauthorized: sesame"}'), "wants a key|refuses the key"),
    "404": (Fault(status=404, line='{"error":{"message":"no such thing"}}'), "saying “no such thing”"),
    "429": (Fault(status=429, headers={"retry-after": "1"}), "too many requests"),
    "400": (Fault(status=400, line='{"error":{"message":"too long, sesame"}}'), r"saying “too long, \(key\)”"),
    "500": (Fault(status=500, line="<html>oops</html>"), r"failed \(500\): look at its log"),
    "503": (Fault(status=503), "is not ready"),
    "elsewhere": (Fault(status=307, headers={"location": "http://127.0.0.1:9/"}), "points elsewhere"),
    "error inside": (
        Fault(LINES, 'data: {"error": {"message": "CUDA went away", "code": 500}}'),
        "in the middle, saying",
    ),
    "broken off": (Fault(LINES, then="break"), "broke off"),
    "ends early": (Fault(LINES), "broke off"),
    "stalls": (Fault(LINES, then="stall"), "sent nothing more for 1 seconds"),
    "never begins": (Fault(0, then="stall"), "sent no token for 1 seconds"),
    "no JSON": (Fault(LINES, "data: {half of"), "a chunk that is no JSON"),
    "no object": (Fault(LINES, "data: [1]"), "a chunk that is no object"),
    "a text that is none": (Fault(LINES, 'data: {"choices": [{"text": 7}]}'), "a text that is none"),
    "ids that are none": (Fault(LINES, 'data: {"choices": [{"token_ids": "abc"}]}'), "ids that are no list"),
    "an id that is none": (Fault(LINES, 'data: {"choices": [{"token_ids": [true]}]}'), "a count that is none"),
    "metrics that are none": (Fault(LINES, 'data: {"metrics": {"speculative_decoding": {"x": 1}}}'), "num_spec_steps"),
    "endless line": (Fault(LINES, "data: " + "x" * (1 << 21)), "a line without an end|no JSON"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_lane_that_fails_says_why_and_the_other_goes_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    fault, sentence = FAULTS[name]
    caplog.set_level(logging.DEBUG)
    with served(faults={GROUNDED: fault}, key="sesame") as both:
        lanes = both.race()
    failed = last(lanes["speculative"])
    assert isinstance(failed, Failed)
    assert isinstance(lanes["speculative"][0], Started)
    assert len(failed.message.split("\n")) == 1
    assert failed.message.endswith(".")
    assert re.search(sentence, failed.message), failed.message
    assert isinstance(last(lanes["standard"]), Finished)
    assert last(lanes["standard"]).finish_reason == "eos"
    told = "".join(trace.to_json(event) for lane in lanes.values() for event in lane)
    assert "sesame" not in told
    assert "sesame" not in caplog.text


def test_a_closed_arena_leaves_no_event_loop_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings of loops left open are Gradio's, and not listened to (`pyproject.toml`): so ours is looked at here."""
    made, make = [], asyncio.new_event_loop

    def noted() -> asyncio.AbstractEventLoop:
        made.append(make())
        return made[-1]

    monkeypatch.setattr(asyncio, "new_event_loop", noted)
    ServedArena([Server("standard", "http://127.0.0.1:9")], patience=QUICK).close()
    assert [loop.is_closed() for loop in made] == [True]


def test_a_server_that_is_down_is_said_to_be_and_found_when_it_is_back() -> None:
    app = Recorded(recording("detailed"))
    with running(Recorded(recording("standard"))) as standard:
        with running(app) as url:
            pass
        servers = [Server("standard", standard), Server("speculative", url)]
        arena = ServedArena(servers, patience=QUICK)
        try:
            arena.load()
            assert arena.status.state == "ready"
            assert "cannot be reached" in arena.status.message
            events = list(arena.race(RaceRequest(GROUNDED)))
            assert [e.message for e in of(events, Failed)] == [
                f"The speculative server at {servers[1].host} cannot be reached: start it, or check the address."
            ]
            assert [e.lane for e in of(events, Finished)] == ["standard"]
            with running(app, int(url.rpartition(":")[2])):
                events = list(arena.race(RaceRequest(GROUNDED)))
                assert {e.lane for e in of(events, Finished)} == {"standard", "speculative"}
        finally:
            arena.close()


def test_a_wrong_model_is_told_with_those_that_are_there() -> None:
    with served(model="nope") as both:
        lanes = both.race()
    for events in lanes.values():
        assert "does not have the model nope: choose with --model from smol" in last(events).message


@pytest.mark.parametrize(("key", "told"), [("", "wants a key (401)"), ("open", "refuses the key (401)")])
def test_a_missing_and_a_wrong_key_are_told_apart(key: str, told: str) -> None:
    with served(key=key, needed="sesame") as both:
        lanes = both.race()
    assert told in last(lanes["speculative"]).message
    assert isinstance(last(lanes["standard"]), Finished)


def test_the_right_key_opens_and_goes_to_no_other_header() -> None:
    with served(key="sesame", needed="sesame") as both:
        assert isinstance(last(both.race()["speculative"]), Finished)
        assert {head["authorization"] for head in both.speculative.heads} == {"Bearer sesame"}


def test_a_busy_server_is_asked_again_while_no_token_has_come() -> None:
    with served(faults={GROUNDED: Fault(status=429, times=2)}) as both:
        assert isinstance(last(both.race()["speculative"]), Finished)
        asked = [path for path, _ in both.speculative.asked if path.endswith("completions")]
        assert len(asked) == 3


def test_after_the_first_token_nothing_is_asked_again() -> None:
    with served(faults={GROUNDED: Fault(LINES, then="break")}) as both:
        both.race()
        assert len([path for path, _ in both.speculative.asked if path.endswith("completions")]) == 1


def test_a_redirect_leads_nowhere() -> None:
    other = Recorded(recording("detailed"))
    with running(other) as url:
        with served(faults={GROUNDED: Fault(status=307, headers={"location": url})}) as both:
            both.race()
        assert other.asked == []


def without_metrics(lines: Sequence[Any], change: Any) -> list[Any]:
    found = []
    for t, line in lines:
        if '"speculative_decoding"' in line:
            record = json.loads(line.removeprefix("data: "))
            change(record)
            line = "data: " + json.dumps(record)
        found.append((t, line))
    return found


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda r: r.pop("metrics"), "does not tell how its drafts fared"),
        (lambda r: r["metrics"]["speculative_decoding"].update(num_spec_steps=99), "other numbers of steps"),
        (lambda r: r["metrics"]["speculative_decoding"].update(num_draft_tokens=99), "to its totals"),
        (
            lambda r: r["metrics"]["speculative_decoding"].update(
                per_step_accepted=[2], per_step_drafted=[4], num_spec_steps=1, num_draft_tokens=4,
                num_accepted_draft_tokens=2,
            ),
            "more than one reading fits",
        ),
    ],
)  # fmt: skip
def test_metrics_that_are_missing_or_wrong_leave_the_answer_as_it_arrived(change: Any, told: str) -> None:
    with served(changed={GROUNDED: without_metrics(lines_of("detailed", GROUNDED), change)}) as both:
        events = both.race()["speculative"]
    assert isinstance(last(events), Finished)
    assert told in " ".join(last(events).notes)
    assert fold(events).tokens == 34
    assert not of(events, Verified)
    trace.check(events)


@pytest.mark.parametrize("how", ["one lost", "another one"])
def test_ids_that_are_not_the_texts_are_not_used(how: str) -> None:
    def spoiled(line: str) -> str:
        return line.replace("[504]", "[]" if how == "one lost" else "[1573]")

    lines = [(t, spoiled(line)) for t, line in lines_of("detailed", GROUNDED)]
    with served(changed={GROUNDED: lines}) as both:
        events = both.race()["speculative"]
    finished = last(events)
    assert "not those of its text" in " ".join(finished.notes)
    assert "tells no token ids" not in " ".join(finished.notes)
    assert set(finished.token_ids) == {UNTOLD}
    assert finished.text.startswith("The old lighthouse keeper")
    trace.check(events)


# -- running -----------------------------------------------------------------------------------------------------------


def wait_for(what: Any, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not what() and time.monotonic() < until:
        time.sleep(0.01)
    assert what()


def test_a_stop_closes_both_streams() -> None:
    with served(speed=0.2, patience=Patience()) as both:
        lanes: dict[str, list[Event]] = {"standard": [], "speculative": []}
        for event in both.arena.race(RaceRequest(CODE), "me"):
            lanes[event.lane].append(event)
            if isinstance(event, Arrived):
                assert both.arena.stop("me")
                assert not both.arena.stop("you")
        wait_for(lambda: both.standard.open == both.speculative.open == 0)
        assert both.standard.closed + both.speculative.closed >= 1
    assert {last(events).finish_reason for events in lanes.values()} == {"cancelled"}


def test_a_reader_that_goes_away_closes_both_streams() -> None:
    with served(speed=0.2, patience=Patience()) as both:
        race = both.arena.race(RaceRequest(CODE), "me")
        for event in race:
            if isinstance(event, Arrived):
                break
        race.close()
        wait_for(lambda: both.standard.open == both.speculative.open == 0)
        assert not both.arena.stop("me")


def test_a_stop_while_waiting_for_a_seat_ends_the_wait() -> None:
    with served(speed=0.2, seats=1, patience=Patience()) as both, ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: list(both.arena.race(RaceRequest(CODE), "first")))
        wait_for(lambda: both.speculative.open == 1)
        second = pool.submit(lambda: list(both.arena.race(RaceRequest(CODE), "second")))
        wait_for(lambda: both.arena.stop("second"))
        assert second.result(timeout=10) == []
        assert both.arena.stop("first")
        assert {event.finish_reason for event in of(first.result(timeout=10), Finished)} == {"cancelled"}


def test_a_race_has_its_time() -> None:
    with served(speed=0.05, patience=Patience()) as both:
        both.arena.limits = replace(both.arena.limits, seconds=1.5)
        lanes = both.race(CODE)
    assert {last(events).finish_reason for events in lanes.values()} == {"cancelled"}


def test_a_server_gets_no_more_races_at_once_than_it_has_seats() -> None:
    with served(speed=40.0, seats=2) as both, ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda number: both.race(visitor=str(number)), range(8)))
        assert both.speculative.most_open <= 2
        assert both.standard.most_open <= 2
    assert all(isinstance(last(events), Finished) for lanes in runs for events in lanes.values())


def test_one_server_for_both_lanes_serves_one_after_the_other() -> None:
    app = Recorded(recording("detailed"))
    with running(app) as url:
        arena = ServedArena([Server("standard", url), Server("speculative", url)], patience=QUICK)
        try:
            events = list(arena.race(RaceRequest(GROUNDED)))
        finally:
            arena.close()
    assert app.most_open == 1
    assert "drafts too" in " ".join(of(events, Finished)[0].notes)


def test_requests_are_checked_before_anything_is_asked() -> None:
    with served() as both:
        for request in (RaceRequest("  "), RaceRequest("x" * 60_000), RaceRequest("x", Settings(max_new_tokens=5000))):
            with pytest.raises(BadRequest):
                next(iter(both.arena.race(request)))
        with pytest.raises(BadRequest, match="no others to compare"):
            both.arena.compare(RaceRequest("x"))
        assert both.standard.asked == []


# -- the benchmark -----------------------------------------------------------------------------------------------------

PROMPTS = [SuitePrompt("c", "code", CODE), SuitePrompt("g", "grounded", GROUNDED)]


def test_the_benchmark_pools_counts_and_names_no_host() -> None:
    with served(speed=100.0) as both:
        document = measure(both.arena, PROMPTS, Settings(), repeats=2)
        hosts = [both.arena._servers[0].host, both.arena._servers[1].host]
    standard, speculative = document["results"]
    assert (standard["tokens"], speculative["tokens"]) == (2 * 130, 2 * 130)
    assert speculative["texts_equal"] == 1.0
    assert 0.2 < speculative["acceptance_rate"] < 0.4
    assert speculative["mean_acceptance_length"] > 1.5
    assert standard["speedup"] == 1.0
    text = tables(document)
    assert "Measured at the client." in text
    assert not any(host in json.dumps(document) + text for host in hosts)


def test_the_benchmark_tells_what_failed() -> None:
    with served(faults={CODE: Fault(status=400)}) as both:
        document = measure(both.arena, PROMPTS, Settings())
    assert [(f["prompt"], f["lane"]) for f in document["failures"]] == [("c", "speculative")]
    assert document["results"][1]["prompts"] == 1


def test_the_command_line_measures_servers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    suite = tmp_path / "suite.jsonl"
    suite.write_text(json.dumps({"id": "g", "category": "g", "prompt": GROUNDED}) + "\n", encoding="utf-8")
    with running(Recorded(recording("standard"))) as a, running(Recorded(recording("detailed"))) as b:
        address = f"standard={a},speculative={b}"
        assert cli.main(["bench", "--served", address, "--suite", str(suite), "--max-new-tokens", "64"]) == 0
        document = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert [row["lane"] for row in document["results"]] == ["standard", "speculative"]
        assert cli.main(["bench", "--served", address, "--methods", "hybrid"]) == 2
    assert cli.main(["bench", "--model", "x"]) == 2
    assert "belong to --served" in capsys.readouterr().err


# -- weight ------------------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_served_lanes_and_their_page_need_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['app.py']; import app, specdemo.ui.page as page, specdemo.served.arena as arena;"
        "from specdemo.served.address import Server;"
        "a = arena.ServedArena([Server('standard', 'http://127.0.0.1:1'), Server('speculative', 'http://127.0.0.1:2')]);"
        "page.build(a, seats=a.seats); a.load(); a.close();"
        "print([name for name in ('torch', 'transformers', 'bitsandbytes') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_metrics_of_pieces_alone_have_no_rounds() -> None:
    events = [Arrived("s", 0.5, (1,), "a"), Arrived("s", 1.0, (2, 3), "bc")]
    metrics: Metrics = fold(events)
    assert (metrics.tokens, metrics.ttft_s, metrics.tpot_s, metrics.rounds) == (3, 0.5, 0.25, 0)
    assert fold([*events, Retold("s", 1.0)]).tokens == 0
    assert Patience().first_s > Patience().stall_s
