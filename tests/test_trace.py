"""A recorded run comes back as it was, and a damaged file is told by its line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TableLM, decode, letters, make_job, random_table

from specdemo.errors import BadRequest
from specdemo.events import (
    EVENT_TYPES,
    UNTOLD,
    Arrived,
    Candidate,
    Committed,
    Counted,
    Drafted,
    DraftedToken,
    Event,
    Failed,
    Finished,
    JudgedToken,
    Prefilled,
    Retold,
    Started,
    Verified,
)
from specdemo.settings import Settings
from specdemo.trace import from_json, read, to_json, write

ids = st.integers(0, 2**31)
numbers = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(max_size=8) | st.sampled_from(
    ["\n", "\r\n", "\u2028", "\x85", "\x00", '"', "\\", "\ufffd", "😀", "</script>"]
)
values = st.recursive(st.none() | st.booleans() | st.integers() | numbers | texts, st.lists, max_leaves=4)
records = st.dictionaries(texts, values, max_size=3)
tops = st.lists(st.builds(Candidate, ids, numbers, texts), max_size=3).map(tuple)
committed = st.builds(Committed, ids, texts, numbers, st.none() | numbers, tops)
fate = st.sampled_from(["accepted", "rejected", "discarded", "clipped"])
lane, round_index = texts, st.integers(0, 10**6)


def tuples(item: Any) -> Any:
    return st.lists(item, max_size=3).map(tuple)


drafted_token = st.builds(DraftedToken, ids, texts, numbers, st.none() | numbers, tops)
judged_token = st.builds(JudgedToken, ids, texts, fate, numbers, numbers, st.none() | numbers, numbers, numbers, tops)
events = st.one_of(
    st.builds(
        Started,
        *(lane, numbers, texts, texts, texts, texts, texts, records, tuples(ids)),
        *(st.none() | texts, st.none() | texts, st.none() | texts, tuples(texts)),
    ),
    st.builds(Prefilled, lane, numbers, numbers, numbers, committed),
    st.builds(Drafted, lane, numbers, round_index, tuples(drafted_token), numbers, texts, st.integers(0, 99)),
    st.builds(
        Verified,
        *(lane, numbers, round_index, numbers, numbers, tuples(judged_token), st.integers(0, 16)),
        *(st.none() | committed, st.none() | st.sampled_from(["recovered", "bonus"])),
        *(st.none() | st.tuples(ids, ids), st.none() | st.booleans()),
    ),
    st.builds(
        Finished, lane, numbers, st.sampled_from(["eos", "stop", "length", "cancelled"]), tuples(ids), texts, records
    ),
    st.builds(Failed, lane, numbers, texts),
)


@given(events)
@settings(max_examples=150, deadline=None)
def test_any_event_survives_json(event: Event) -> None:
    line = to_json(event)
    assert "\n" not in line
    back = from_json(line)
    assert back == event
    assert type(back) is type(event)
    assert to_json(back) == line


@given(st.lists(events, max_size=4))
@settings(max_examples=30, deadline=None)
def test_any_run_survives_a_file(tmp_path_factory: pytest.TempPathFactory, run: list[Event]) -> None:
    path = tmp_path_factory.getbasetemp() / "run.jsonl"
    write(path, run)
    assert list(read(path)) == run
    assert path.read_bytes().count(b"\n") == len(run)


def recorded() -> list[Event]:
    """A real run, with every kind of event but `failed`."""
    settings = Settings(max_new_tokens=9, draft_length=3, temperature=1.0, stop=("zz",))
    target, draft = TableLM(random_table(0, 8)), TableLM(random_table(1, 8))
    return decode(make_job(target, [0, 1], settings, letters(8), notes=("a note",)), "speculative", draft)


def test_a_real_run_survives_a_file(tmp_path: Path) -> None:
    run = [*recorded(), Failed("left", 1.5, "The model is gone.")]
    run += [Arrived("left", 2.0, (5, UNTOLD), "ab"), Retold("left", 2.0, exact=False), Counted("left", 2.0, 4, 3)]
    assert {event.type for event in run} == set(EVENT_TYPES)
    write(tmp_path / "run.jsonl", run)
    assert list(read(tmp_path / "run.jsonl")) == run


def test_whole_numbers_are_read_as_the_floats_they_stand_for() -> None:
    event = Failed("left", 2.0, "text")
    back = from_json(to_json(event).replace("2.0", "2"))
    assert back == event
    assert isinstance(back.t, float)


def test_the_lines_are_plain_json_with_the_text_as_it_is() -> None:
    line = to_json(Failed("left", 0.5, "é 😀 \u2028"))
    assert "é 😀" in line
    assert json.loads(line) == {"type": "failed", "lane": "left", "t": 0.5, "message": "é 😀 \u2028"}


# Damaged files


RUN = recorded()
each_line = pytest.mark.parametrize(
    "line", [to_json(event) for event in RUN[:4] + RUN[-1:]], ids=lambda line: line[:20]
)


@each_line
def test_a_truncated_line_is_refused_wherever_it_ends(line: str) -> None:
    for end in [*range(0, len(line), 37), len(line) - 1]:
        with pytest.raises(BadRequest, match="not an event of a run"):
            from_json(line[:end])


def edits(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The record with one thing wrong: a field missing, renamed, of another type, at any depth."""
    wrong: dict[type, Any] = {
        int: "1",
        float: "0.5",
        str: 7,
        list: "text",
        dict: [],
        bool: "true",
        type(None): {"a": 1},
    }
    optional = {"draft", "draft_precision", "draft_forward_path", "notes", "version", "outcome", "hit", "metrics"}
    optional |= {"raw_p", "raw_q", "top", "draft_forwards", "clock", "network_s", "speculation"}
    for name, value in record.items():
        if name not in optional:
            yield {key: item for key, item in record.items() if key != name}
        yield {(f"{key}_" if key == name else key): item for key, item in record.items()}
        yield {**record, name: wrong[type(value)]}
        if name not in ("settings", "metrics"):
            if isinstance(value, dict):
                yield from ({**record, name: edited} for edited in edits(value))
            if isinstance(value, list) and value:
                yield {**record, name: [*value, "text" if not isinstance(value[0], str) else 7]}
                if isinstance(value[0], dict):
                    yield from ({**record, name: [edited, *value[1:]]} for edited in edits(value[0]))


@each_line
def test_an_edited_line_is_refused_whatever_is_wrong(line: str) -> None:
    count = 0
    for edited in edits(json.loads(line)):
        with pytest.raises(BadRequest):
            from_json(json.dumps(edited))
        count += 1
    assert count > 10


@pytest.mark.parametrize(
    "line",
    [
        "",
        "null",
        "7",
        "[]",
        "{}",
        '"started"',
        '{"type": "unknown"}',
        '{"type": ["failed"]}',
        '{"type": "failed", "lane": "a", "t": NaN, "message": "b"}',
        '{"type": "failed", "lane": "a", "t": Infinity, "message": "b"}',
        '{"type": "failed", "lane": "a", "t": 1e999, "message": "b"}',
        '{"type": "failed", "lane": "a", "t": 1' + "0" * 400 + ', "message": "b"}',
        '{"type": "failed", "lane": "a", "t": true, "message": "b"}',
        '{"type": "failed", "lane": "\\ud83d", "t": 1.0, "message": "b"}',
        '{"type": "failed", "lane": "a", "t": 1.0, "message": "b"} {}',
        '{"type": "finished", "lane": "a", "t": 1.0, "finish_reason": "bored", "token_ids": [], "text": ""}',
        '{"type": "finished", "lane": "a", "t": 1.0, "finish_reason": ["eos"], "token_ids": [], "text": ""}',
        '{"type": "finished", "lane": "a", "t": 1.0, "finish_reason": "eos", "token_ids": [1.5], "text": ""}',
        '{"type": "finished", "lane": "a", "t": 1.0, "finish_reason": "eos", "token_ids": [true], "text": ""}',
        '{"type": "finished", "lane": "a", "t": 1.0, "finish_reason": "eos", "token_ids": [], "text": "", '
        '"metrics": 1}',
        '{"type": "finished", "lane": "a", "t": 1.0, "finish_reason": "eos", "token_ids": [], "text": "", '
        '"metrics": {"x": NaN}}',
        "[" * 100_000,
        '{"type": ' * 50_000,
    ],
    ids=lambda line: line[:60],
)
def test_what_is_no_event_is_refused_in_one_sentence(line: str) -> None:
    with pytest.raises(BadRequest) as refused:
        from_json(line)
    assert "\n" not in str(refused.value)


def test_another_version_is_named_whatever_else_it_holds() -> None:
    record = {"type": "started", **asdict(RUN[0]), "version": 2, "a_new_field": 1}
    with pytest.raises(BadRequest, match="version 2, and this program reads version 1"):
        from_json(json.dumps(record))


def test_reading_tells_the_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = [to_json(event) for event in RUN[:3]]
    path.write_text("\n".join([lines[0], "", lines[1], lines[2][:-9]]) + "\n", encoding="utf-8")
    reader = read(path)
    assert [next(reader), next(reader)] == RUN[:2]
    with pytest.raises(BadRequest, match=r"^run\.jsonl, line 4: "):
        next(reader)


@pytest.mark.parametrize("name", ["missing.jsonl", "folder", "bytes.jsonl"])
def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadRequest, match="cannot be read"):
        list(read(tmp_path / name))


def test_a_number_that_is_none_is_not_written() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            to_json(replace(RUN[-1], t=bad))
