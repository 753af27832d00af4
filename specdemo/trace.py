"""A run as JSON lines: one event a line, so that it can be recorded, replayed, exported and read by anything.

`read` and `parse` take each line for itself. `check` looks at the whole: a recording that was cut off or changed by
hand does not add up any more, and is refused with a sentence instead of being replayed as if it were true.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .errors import BadRequest
from .events import (
    EVENT_TYPES,
    TRACE_VERSION,
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
    Started,
    Verified,
    settled,
)
from .metrics import Fold


def to_json(event: Event) -> str:
    """One line without its end. Text is kept as it is, so a lone surrogate cannot get in."""
    return json.dumps({"type": event.type, **asdict(event)}, ensure_ascii=False, allow_nan=False)


def from_json(line: str) -> Event:
    """The event of one line. Raises BadRequest for anything that is not one."""
    try:
        record = json.loads(line)
        cls, version = EVENT_TYPES[record.pop("type")], record.get("version", TRACE_VERSION)
        if cls is Started and version != TRACE_VERSION:
            raise BadRequest(f"The trace has version {version}, and this program reads version {TRACE_VERSION}.")
        event: Event = _build(cls, record)
        to_json(event).encode()  # NaN, infinite numbers and lone surrogates get in through no escape sequence
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadRequest(f"This line of the trace is not an event of a run ({error}).") from None
    return event


def write(path: Path, events: Iterable[Event]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for event in events:
            file.write(to_json(event) + "\n")


def read(path: Path) -> Iterator[Event]:
    """The events of a recorded run. Raises BadRequest with the number of a line that is not one."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        yield from_json(line)
                    except BadRequest as error:
                        raise BadRequest(f"{path.name}, line {number}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"The trace {path} cannot be read: {error}.") from None


def parse(text: str, name: str = "The recording") -> list[Event]:
    """The events of JSON lines. Raises BadRequest with the number of a line that is not one."""
    events = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                events.append(from_json(line))
            except BadRequest as error:
                raise BadRequest(f"{name}, line {number}: {error}") from None
    return events


def with_metrics(events: Iterable[Event]) -> Iterator[Event]:
    """The events of any lanes, each `Finished` with the metrics of its own, as JSON gives them back."""
    folds: dict[str, Fold] = {}
    for event in events:
        folded = folds.setdefault(event.lane, Fold())
        folded.add(event)
        if isinstance(event, Finished):
            event = replace(event, metrics=_as_json(asdict(folded.metrics())))
        yield event


def check(events: Sequence[Event]) -> None:
    """Whether the events are whole runs, one a lane, that add up: nothing missing at the end or between, texts, ids,
    counts and metrics in agreement. Raises BadRequest, one sentence."""
    lanes: dict[str, list[Event]] = {}
    for event in settled(events):
        lanes.setdefault(event.lane, []).append(event)
    if not lanes:
        raise BadRequest("The recording holds no events: record a run first.")
    for lane, own in lanes.items():
        if fault := _fault(own):
            raise BadRequest(
                f"The recording of the lane {lane!r} does not add up, so it was cut off or changed: {fault}."
            )


def _fault(events: Sequence[Event]) -> str:
    """What is wrong with the events of one lane, as half a sentence; empty if nothing."""
    if not isinstance(events[0], Started):
        return "it does not begin with the start of a run"
    if not isinstance(events[-1], Finished | Failed):
        return "it ends before the run does"
    t, rounds, drafted = 0.0, 0, None
    ids: list[int] = []
    text = ""
    folded = Fold()
    for index, event in enumerate(events):
        if event.t < t:
            return "its clock runs backwards"
        t = event.t
        folded.add(event)
        if isinstance(event, Drafted) != (drafted is None) and isinstance(event, Drafted | Verified):
            return f"the draft or the verdict of round {event.round} is missing"
        match event:
            case Started() if index > 0:
                return "it begins twice"
            case Prefilled():
                if index != 1:
                    return "the prompt is read at the wrong time"
                ids, text = [event.token.id], event.token.text
                if bad := _bad_share(event.token.p, *_shares(event.token)) or _bad_seconds(
                    event.target_s, event.draft_s
                ):
                    return bad
            case Arrived():
                ids += event.tokens
                text += event.text
            case Counted():
                if not 0 <= event.accepted <= event.drafted:
                    return "more drafts were accepted than were made"
            case Drafted():
                rounds, drafted = rounds + 1, event
                if event.round != rounds or not ids:
                    return f"round {rounds} is missing"
                shares = [share for token in event.tokens for share in (token.q, *_shares(token))]
                if bad := _bad_share(*shares) or _bad_seconds(event.draft_s):
                    return bad
            case Verified():
                assert drafted is not None
                kept = [token for token in event.judged if token.fate == "accepted"]
                if event.round != rounds or [token.id for token in event.judged] != [t.id for t in drafted.tokens]:
                    return f"the verdict of round {rounds} is on another draft"
                if event.num_accepted != len(kept) or list(event.judged[: len(kept)]) != kept:
                    return f"the accepted tokens of round {rounds} are not those that were counted"
                ids += [token.id for token in kept]
                text += "".join(token.text for token in kept)
                if event.extra is not None:
                    ids.append(event.extra.id)
                    text += event.extra.text
                shares = [s for token in event.judged for s in (token.p, token.q, token.acceptance, token.uniform)]
                shares += [share for token in (*event.judged, event.extra) if token for share in _shares(token)]
                if bad := _bad_share(*shares) or _bad_seconds(event.verify_s, event.judge_s) or _bad_ahead(event):
                    return bad
                drafted = None
            case Finished():
                if index != len(events) - 1:
                    return "it goes on after its end"
                uncounted = not ids and set(event.token_ids) == {UNTOLD}  # a server told their number at the end
                if not uncounted and list(event.token_ids) != ids[: len(event.token_ids)]:
                    return "its tokens are not those of its rounds"
                if not (text.startswith(event.text) or event.text.startswith(text)):
                    return "its text is not that of its rounds"
                if event.metrics and not _agree(event.metrics, asdict(folded.metrics())):
                    return "its numbers are not those of its rounds"
            case Failed():
                if index != len(events) - 1:
                    return "it goes on after its end"
    return ""


def _shares(token: Committed | DraftedToken | JudgedToken) -> list[float]:
    """The probabilities that any token carries."""
    raw = token.raw_q if isinstance(token, DraftedToken) else token.raw_p
    top: tuple[Candidate, ...] = token.top
    return [candidate.prob for candidate in top] + ([] if raw is None else [raw])


def _bad_share(*shares: float | None) -> str:
    known = [share for share in shares if share is not None]
    return "" if all(-1e-6 <= share <= 1.0 + 1e-6 for share in known) else "a probability is not one"


def _bad_ahead(event: Verified) -> str:
    """What is wrong with the drafts that were made ahead, as half a sentence; empty if nothing."""
    ahead = event.speculation
    if ahead is None:
        return ""
    if event.extra is None or event.outcome != (event.num_accepted, event.extra.id):
        return f"round {event.round} came out otherwise than its drafts ahead were told"
    if len(ahead.fan_out) != len(event.judged) + 1:
        return f"the guesses of round {event.round} are on another draft"
    if ahead.guesses and event.hit != any((g.num_accepted, g.id) == event.outcome for g in ahead.guesses if g.taken):
        return f"the hit or miss of round {event.round} is not that of its guesses"
    if not ahead.guessed_s <= ahead.known_s:
        return f"a guess of round {event.round} came after its outcome"
    return _bad_seconds(ahead.guessed_s, ahead.built_s, ahead.build_s, ahead.hidden_s)


def _bad_seconds(*seconds: float) -> str:
    return "" if all(number >= 0.0 for number in seconds) else "a phase took less than no time"


def _agree(told: Mapping[str, Any], counted: Mapping[str, Any]) -> bool:
    """Whether the metrics that came with a run are its own; those that only one side knows are left aside."""
    both = [name for name in counted if name in told]
    return [_as_json(counted[name]) for name in both] == [_as_json(told[name]) for name in both]


def _as_json(value: Any) -> Any:
    """Tuples as lists, as they come back from a file."""
    return json.loads(json.dumps(value))


def _build(cls: type, record: Mapping[str, Any]) -> Any:
    hints = _hints(cls)
    if not isinstance(record, dict):
        raise TypeError(f"a record is needed, not {record!r}")
    if unknown := set(record) - set(hints):
        raise TypeError(f"unknown field {min(unknown)}")
    return cls(**{name: _value(hints[name], value) for name, value in record.items()})


@cache
def _hints(cls: type) -> dict[str, Any]:
    """The fields of a record and their types."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _value(hint: Any, value: Any) -> Any:
    """Lists back to tuples and records back to dataclasses, by the field's type; wrong types raise TypeError."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        options = [option for option in args if option is not type(None)]
        return None if value is None and len(options) < len(args) else _value(options[0], value)
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"a list is needed, not {value!r}")
        hints = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
        return tuple(_value(part, item) for part, item in zip(hints, value, strict=True))
    if origin is Literal:
        if value not in args:
            raise TypeError(f"{value!r} is none of {', '.join(map(str, args))}")
        return value
    if hasattr(hint, "__dataclass_fields__"):
        return _build(hint, value)
    if hint in (int, float, str):
        number = hint is float and isinstance(value, int)
        if isinstance(value, bool) or not (number or isinstance(value, hint)):
            raise TypeError(f"{value!r} is not of type {hint.__name__}")
        return float(value) if number else value
    wanted = bool if hint is bool else dict
    if not isinstance(value, wanted):
        raise TypeError(f"{value!r} is not of type {wanted.__name__}")
    return value
