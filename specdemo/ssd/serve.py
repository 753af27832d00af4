"""The helper's process: words in through a pipe, drafts out onto the board.

It takes one word at a time and answers when it is idle again, except that `speculate` first answers that the guesses
have been chosen, and then works on until it has all drafts or hears how the verification went.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from ..models.base import LanguageModel
from ..settings import Settings
from .board import Board
from .speculator import Speculator
from .worker import Worker

GUESSES, IDLE, FAILED = "guesses", "idle", "failed"
"""What is answered: the guesses are chosen; the work is done; it could not be done, and why."""

_ORPHAN_CHECK_S = 0.5


def serve(
    pipe: Connection,
    others_end: Connection,
    board: Board,
    drafting: tuple[LanguageModel, LanguageModel, Settings, int],
    core: int,
    parent: int,
) -> None:
    """Serve until the pipe or the process `parent` ends. `drafting`: what a `Speculator` is made of."""
    others_end.close()
    _close_what_was_inherited(pipe)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the parent ends this process
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    gc.freeze()  # what was inherited is not garbage, and walking it would copy it
    try:
        worker = Worker(Speculator(*drafting), board, drafting[2].draft_length)
        while (words := _next(pipe, parent)) is not None:
            _obey(words, worker, pipe)
    except (EOFError, BrokenPipeError):
        pass
    except Exception as error:
        pipe.send((FAILED, f"{type(error).__name__}: {error}"))


def _close_what_was_inherited(pipe: Connection) -> None:
    """A visitor's connection that the parent closes would stay open as long as this process had it too."""
    os.closerange(3, pipe.fileno())
    os.closerange(pipe.fileno() + 1, os.sysconf("SC_OPEN_MAX"))


def _next(pipe: Connection, parent: int) -> Sequence[object] | None:
    """The next word with what belongs to it; None where nobody is left to say one."""
    while not pipe.poll(_ORPHAN_CHECK_S):
        if os.getppid() != parent:
            return None
    words: Sequence[object] = pipe.recv()
    return words


def _obey(words: Sequence[object], worker: Worker, pipe: Connection) -> None:
    match words:
        case ("prefill", list(tokens)):
            worker.prefill(tokens)
        case ("draft", list(tokens), int(draft_length)):
            worker.draft(tokens, draft_length)
        case ("speculate", list(tokens), list(draft)):
            steps = worker.speculate(tokens, draft)
            next(steps)
            pipe.send((GUESSES,))
            while not pipe.poll(0.0) and next(steps, "end") != "end":
                pass
            _, row, num_accepted, draft_length, rank = pipe.recv()
            if row is not None:
                worker.only(row)
                for _step in steps:
                    pass
            worker.learn(num_accepted, draft_length, rank, row is not None)
        case _:
            raise ValueError(f"no such word: {words[0]}")
    pipe.send((IDLE,))
