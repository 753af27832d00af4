"""Arenas over recorded servers, for tests of served lanes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.recorded_server import Fault, Recorded, read, running
from specdemo.events import Event
from specdemo.request import RaceRequest
from specdemo.served.address import Key, Server
from specdemo.served.arena import ServedArena
from specdemo.served.lane import Patience
from specdemo.settings import Settings

DATA = Path(__file__).parent / "data"
QUICK = Patience(connect_s=5.0, first_s=1.0, stall_s=1.0, again_s=0.01, longest_again_s=0.05)

GROUNDED = (
    "Repeat this text exactly, word for word: The old lighthouse keeper climbed the spiral stairs every evening at "
    "dusk to light the lamp. The lamp warned the ships, and the ships greeted the lamp with their horns."
)
CODE = "Write a Python class Point with x and y, and methods add and subtract."
EMOJI = "Write three emoji and a Chinese greeting: 你好 🙂"
RAW = "The quick brown fox jumps over the lazy dog. The quick brown fox"


@dataclass
class Served:
    """A running arena and the servers behind its lanes."""

    arena: ServedArena
    standard: Recorded
    speculative: Recorded

    def race(
        self, prompt: str = GROUNDED, raw: bool = False, visitor: str = "", **settings: Any
    ) -> dict[str, list[Event]]:
        """The events of each lane."""
        lanes: dict[str, list[Event]] = {"standard": [], "speculative": []}
        for event in self.arena.race(RaceRequest(prompt, Settings(**settings), raw=raw), visitor):
            lanes[event.lane].append(event)
        return lanes


def recording(kind: str, changed: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a server of a kind answered. `changed`: prompt -> lines in place of the recorded ones."""
    found = read(DATA / f"vllm-{kind}.json")
    for answer in found["answers"]:
        messages = answer["body"].get("messages")
        prompt = messages[-1]["content"] if messages else answer["body"].get("prompt")
        if "lines" in answer and prompt in (changed or {}):
            answer["lines"] = changed[prompt]  # type: ignore[index]
    return found


@contextmanager
def served(
    kind: str = "detailed",
    faults: Mapping[str, Fault] | None = None,
    speed: float = 0.0,
    key: str = "",
    needed: str = "",
    changed: Mapping[str, Any] | None = None,
    model: str | None = None,
    seats: int = 8,
    patience: Patience = QUICK,
) -> Iterator[Served]:
    """Both lanes on servers of their own; the faults are the speculative one's. key: the arena's; needed: the
    speculative server's."""
    with ExitStack() as stack:
        standard = Recorded(recording("standard"), speed)
        speculative = Recorded(recording(kind, changed) | {"key": needed}, speed, faults)
        urls = [stack.enter_context(running(app)) for app in (standard, speculative)]
        servers = [
            Server(lane, url, model, Key(key)) for lane, url in zip(("standard", "speculative"), urls, strict=True)
        ]
        arena = ServedArena(servers, seats=seats, patience=patience)
        stack.callback(arena.close)
        yield Served(arena, standard, speculative)


def lines_of(kind: str, prompt: str) -> Sequence[Any]:
    """The recorded lines of an answer."""
    for answer in recording(kind)["answers"]:
        messages = answer["body"].get("messages")
        if "lines" in answer and (messages[-1]["content"] if messages else answer["body"]["prompt"]) == prompt:
            lines: Sequence[Any] = answer["lines"]
            return lines
    raise KeyError(prompt)
