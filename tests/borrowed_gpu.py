"""A stand-in for `spaces.GPU`: the documented ways of ZeroGPU, without a card.

A decorated generator runs in a process that is forked at the first call and idles until the next one. Arguments and
items are pickled; the process runs ahead of its consumer; closing the generator stops it at its next item; a process
that was killed is an error for the visitor, and the next call forks another. Errors arrive as `gr.Error`.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Generator
from typing import Any

import gradio as gr

_FORK = multiprocessing.get_context("fork")
_END = b"end"


class BorrowedGpu:
    """`gpu(duration=...)(task)`, as `spaces.GPU`. durations: what was asked for; quota: seconds that are left."""

    def __init__(self, quota: float = 10_000) -> None:
        self.durations: list[float] = []
        self.quota = quota
        self.process: Any = None

    def __call__(self, duration: Callable[..., float]) -> Callable[[Any], Any]:
        return lambda task: lambda *arguments: self._run(task, duration, arguments)

    def _run(self, task: Any, duration: Callable[..., float], arguments: tuple[Any, ...]) -> Generator[Any, None, None]:
        asked = duration(*arguments)
        self.durations.append(asked)
        if asked > self.quota:
            raise gr.Error(
                f"You have exceeded your free ZeroGPU quota ({asked}s requested vs. {self.quota}s left). "
                "Try again in 0:20:00.",
                title="ZeroGPU quota exceeded",
                print_exception=False,
            )
        if self.process is None or not self.process.is_alive():
            self._here, there = _FORK.Pipe()
            self._stop = _FORK.Event()
            self.process = _FORK.Process(target=_serve, args=(task, there, self._stop), daemon=True)
            self.process.start()
            there.close()
        self._here.send_bytes(pickle.dumps(arguments))
        ended = False
        try:
            while (piece := self._receive()) != _END:
                item = pickle.loads(piece)
                if isinstance(item, Exception):
                    ended = self._receive() == _END
                    raise gr.Error(type(item).__name__, title="ZeroGPU worker error", print_exception=False)
                yield item
            ended = True
        finally:
            if not ended and self.process.is_alive():
                self._stop.set()
                while self._receive() != _END:
                    pass

    def _receive(self) -> bytes:
        try:
            return self._here.recv_bytes()
        except EOFError:
            self.process.join()
            raise gr.Error("GPU task aborted", title="ZeroGPU worker error", print_exception=False) from None

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self._here.close()


def _serve(task: Any, pipe: Any, stop: Any) -> None:
    while True:
        try:
            arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        stop.clear()
        thread = threading.Thread(target=_work, args=(task, arguments, pipe, stop))  # a thread that OpenMP has not met
        thread.start()
        thread.join()
        pipe.send_bytes(_END)


def _work(task: Any, arguments: tuple[Any, ...], pipe: Any, stop: Any) -> None:
    items = task(*arguments)
    try:
        for item in items:
            if stop.is_set():
                break
            pipe.send_bytes(pickle.dumps(item))
    except Exception as error:
        pipe.send_bytes(pickle.dumps(error))
    finally:
        items.close()
