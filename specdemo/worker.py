"""The one thread that works on the models, and what to do on the day that it does not come back.

The steps of a run are taken in it one by one, each when it is asked for, so that a run stands still while its consumer
is busy. A thread cannot be ended from outside: where a step takes too long, the run and the thread are given up, and
the next run gets another thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_END = object()


class Hung(Exception):
    """A step has not ended in time."""


class Worker:
    """`seconds`: how long one step may take."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._tasks: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]] | None] | None = None

    def steps(self, run: Generator[T, None, None]) -> Generator[T, None, None]:
        """The items of `run`, made in the worker's thread and the caller's context. Closing this closes `run`. Raises
        Hung; what `run` raises comes through."""
        context = copy_context()
        hung = False
        try:
            while (item := self._do(lambda: context.run(next, run, _END))) is not _END:
                yield item
        except Hung:
            hung = True
            raise
        finally:
            if not hung:  # what hangs still executes and cannot be closed
                self._do(lambda: context.run(run.close))

    def _do(self, task: Callable[[], Any]) -> Any:
        if self._tasks is None:
            self._tasks = SimpleQueue()
            threading.Thread(target=_work, args=(self._tasks,), name="models", daemon=True).start()
        answer: SimpleQueue[Any] = SimpleQueue()
        self._tasks.put((task, answer))
        try:
            result, error = answer.get(timeout=self._seconds)
        except Empty:
            self._tasks.put(None)
            self._tasks = None
            raise Hung from None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it refers to this frame, and so to itself
        return result


def _work(tasks: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]] | None]) -> None:
    while (order := tasks.get()) is not None:
        task, answer = order
        told: tuple[Any, BaseException | None]
        try:
            told = task(), None
        except BaseException as error:
            told = None, error
        answer.put(told)
        del order, task, answer, told  # nothing of a run outlives it here while the next one is waited for
