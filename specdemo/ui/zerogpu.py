"""A Space on ZeroGPU: the page's process has no card, and every run borrows one in a process that is forked for it.

The package `spaces` does that. Before anything knows CUDA it puts an emulation in CUDA's place, under which the models
are loaded in the main thread; a function that it decorates runs in the forked process, with the weights on a real card,
and what it yields comes back pickled. So a run's clock ticks there, its timestamps are taken there, and here stands
only the queue. A run asks for as many seconds as its request can need: they are taken from the visitor's quota.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import gradio as gr

from ..arena import Arena, Load, ShouldStop
from ..errors import ModelUnavailable, SpecdemoError
from ..limits import Limits
from ..models.loading import Pair
from ..request import RaceRequest

START_S = 15.0
"""For moving the weights to the card and running everything once."""

TOKEN_S = 0.05
"""For one token of one lane: more than reading the weights of 30 billion parameters takes the cards that are lent."""

LANES = {"race": 3, "comparison": 6}
"""At most so many lanes run."""

MARGIN_S = 1.0
"""A run ends itself this long before the card is taken away."""

Kind = Literal["race", "comparison"]
Borrowed = Callable[[Kind, RaceRequest], Generator[Any, None, None]]
Gpu = Callable[..., Callable[[Borrowed], Borrowed]]


@dataclass(frozen=True)
class _Refused:
    """The sentence of an error, which would not come through as what it is."""

    message: str


def seconds_for(kind: Kind, request: RaceRequest, most: float) -> float:
    """How long a run may take, all its lanes together; `most` is the arena's limit."""
    return min(most, START_S + LANES[kind] * request.settings.max_new_tokens * TOKEN_S)


class ZeroGpuArena(Arena):
    """An arena whose runs borrow a card. It is loaded in the main thread, before the page is launched. gpu:
    `spaces.GPU`."""

    def __init__(self, load: Load, limits: Limits, gpu: Gpu) -> None:
        super().__init__(load, limits)
        self._stop_there = multiprocessing.get_context("fork").Event()  # seen by the forked process, too
        self._warm = False
        self._there = gpu(duration=self._duration)(self._in_the_fork)

    def warm_up(self, pair: Pair) -> None:
        """Nothing runs here: the forked process does it."""

    def lanes(self, request: RaceRequest, pair: Pair, should_stop: ShouldStop) -> Generator[Any, None, None]:
        return self._borrow("race", request, should_stop)

    def rows(self, request: RaceRequest, pair: Pair, should_stop: ShouldStop) -> Generator[Any, None, None]:
        return self._borrow("comparison", request, should_stop)

    def _duration(self, kind: Kind, request: RaceRequest) -> int:
        return round(seconds_for(kind, request, self.limits.seconds))

    def _borrow(self, kind: Kind, request: RaceRequest, should_stop: ShouldStop) -> Generator[Any, None, None]:
        self._stop_there.clear()
        try:
            with closing(self._there(kind, request)) as items:
                for item in items:
                    if isinstance(item, _Refused):
                        raise SpecdemoError(item.message)
                    yield item
                    if should_stop():
                        self._stop_there.set()
        except gr.Error as error:  # no card, no quota, a fault over there: `spaces` says it for the visitor
            raise ModelUnavailable(f"{error.title}: {error.message}") from None

    def _in_the_fork(self, kind: Kind, request: RaceRequest) -> Generator[Any, None, None]:
        until = time.monotonic() + self._duration(kind, request) - MARGIN_S
        pair = self.pair
        try:
            if pair is None:
                raise ModelUnavailable(self.status.message)
            if not self._warm:
                super().warm_up(pair)
                self._warm = True
            run = super().lanes if kind == "race" else super().rows
            yield from run(request, pair, lambda: self._stop_there.is_set() or time.monotonic() > until)
        except SpecdemoError as error:
            yield _Refused(str(error))
