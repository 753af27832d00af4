"""A run as JSON lines: one event a line, so that it can be recorded, replayed, exported and read by anything."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from .errors import BadRequest
from .events import EVENT_TYPES, TRACE_VERSION, Event, Started


def to_json(event: Event) -> str:
    """One line without its end. Text is kept as it is, so a lone surrogate cannot get in."""
    return json.dumps({"type": event.type, **asdict(event)}, ensure_ascii=False, allow_nan=False)


def from_json(line: str) -> Event:
    """The event of one line. Raises BadRequest for anything that is not one."""
    try:
        record = json.loads(line)
        cls = EVENT_TYPES[record.pop("type")]
        event: Event = _build(cls, record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadRequest(f"This line of the trace is not an event of a run ({error}).") from None
    if isinstance(event, Started) and event.version != TRACE_VERSION:
        raise BadRequest(f"The trace has version {event.version}, and this program reads version {TRACE_VERSION}.")
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
    hints = get_type_hints(cls)
    names = {field.name for field in fields(cls)}
    if unknown := set(record) - names:
        raise TypeError(f"unknown field {min(unknown)}")
    return cls(**{name: _value(hints[name], value) for name, value in record.items()})


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
    if hasattr(hint, "__dataclass_fields__"):
        return _build(hint, value)
    if hint in (int, float, str, bool):
        number = hint is float and isinstance(value, int) and not isinstance(value, bool)
        if not number and not (isinstance(value, hint) and (hint is bool or not isinstance(value, bool))):
            raise TypeError(f"{value!r} is not of type {hint.__name__}")
        return float(value) if number else value
    return value
