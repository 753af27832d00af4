"""A run as JSON lines: one event a line, so that it can be recorded, replayed, exported and read by anything."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .errors import BadRequest
from .events import EVENT_TYPES, TRACE_VERSION, Event, Started


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
