"""Where the next draft is made while the target verifies: in a process on a processor of its own, or right here.

Both speak the same words. `speculate` begins a round's speculation cache, `settle` tells the outcome of the
verification and whether the cache has it, `draft` makes a draft just in time. After `settle` the helper is idle until
the next word, so nothing of it runs while its lane's clock stands still.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..drafters.base import Proposal
from ..errors import HelperLost
from ..events import Overlap, Speculation
from ..models.base import LanguageModel, call_between_layers
from ..settings import Settings
from .board import Board
from .cores import Cores
from .serve import FAILED, GUESSES, IDLE, serve
from .speculator import Speculator
from .worker import Worker

PATIENCE_S = 60.0
"""How long a living helper may be silent. Its longest work is to read a prompt."""
_CHECK_S = 0.25


@dataclass(frozen=True, slots=True)
class Settled:
    """What a verification found in the cache: the row of the draft for its outcome, None on a miss."""

    row: int | None
    speculation: Speculation


class Helper(Protocol):
    """See the module; the drafter closes it."""

    def prefill(self, tokens: Sequence[int]) -> None:
        """Read the prompt."""

    def speculate(self, tokens: Sequence[int], draft: Sequence[int]) -> None:
        """Begin to draft for what the verification of `draft` after `tokens` may come to."""

    def settle(self, num_accepted: int, extra: int) -> Settled:
        """The outcome of the verification. Finishes the draft for it, or gives up all of them."""

    def take(self, row: int, draft_length: int) -> Proposal:
        """A draft of the cache."""

    def draft(self, tokens: Sequence[int], draft_length: int) -> Proposal:
        """A draft made now."""

    def close(self) -> None:
        """Stop and release; idempotent."""


def drafts_beside(target: LanguageModel, draft: LanguageModel) -> bool:
    """Whether a `ProcessHelper` can draft for these models: they compute on the CPU, this system can fork, and this
    process may (one that is itself a daemon may not)."""
    on_cpu = target.device.type == draft.device.type == "cpu"
    return on_cpu and sys.platform == "linux" and not multiprocessing.current_process().daemon


class _Round:
    """What is common to helpers: a board, and the account of the round that is being verified."""

    overlap: Overlap

    def __init__(self, board: Board, target: LanguageModel, explain: bool) -> None:
        self.board = board
        self._device = target.device
        self._explain = explain
        self._ready = 0.0
        self._draft_length = 0

    def take(self, row: int, draft_length: int) -> Proposal:
        return self.board.proposal(row, draft_length, self._device)

    def _begin(self, draft: Sequence[int]) -> None:
        self._draft_length = len(draft)
        self._ready = time.perf_counter()

    def _settled(self, row: int | None, rank: int, verified: float, known: float) -> Settled:
        """`verified`: when the verification had ended, `known`: when the helper was told."""
        begun, guessed, built = self.board.times.tolist()
        speculation = Speculation(
            fan_out=self.board.fan_out(),
            rank=rank if rank < self.board.ranks else None,
            guessed_s=guessed - self._ready,
            built_s=built - self._ready,
            known_s=known - self._ready,
            build_s=built - begun,
            hidden_s=0.0 if self.overlap == "none" else max(0.0, min(built, verified) - begun),
            overlap=self.overlap,
            guesses=self.board.as_guesses(row) if self._explain else (),
        )
        return Settled(row, speculation)


class LocalHelper(_Round):
    """A helper in this thread: the cache is complete before the verification begins, and nothing overlaps."""

    overlap: Overlap = "none"

    def __init__(
        self, model: LanguageModel, target: LanguageModel, settings: Settings, capacity: int, explain: bool
    ) -> None:
        super().__init__(Board(settings, model, target, shared=False), target, explain)
        speculator = Speculator(model, target, settings, capacity)
        self._worker = Worker(speculator, self.board, settings.draft_length)

    def prefill(self, tokens: Sequence[int]) -> None:
        self._worker.prefill(tokens)

    def speculate(self, tokens: Sequence[int], draft: Sequence[int]) -> None:
        self._begin(draft)
        for _pause in self._worker.speculate(tokens, draft):
            pass

    def settle(self, num_accepted: int, extra: int) -> Settled:
        known = time.perf_counter()
        row, rank = self.board.find(num_accepted, extra)
        self._worker.learn(num_accepted, self._draft_length, rank, row is not None)
        return self._settled(row, rank, known, known)

    def draft(self, tokens: Sequence[int], draft_length: int) -> Proposal:
        self._worker.draft(tokens, draft_length)
        return self.take(self.board.fallback, draft_length)

    def close(self) -> None:
        self._worker.close()


class ProcessHelper(_Round):
    """A helper in a process forked from this one, so that it has the models without loading them. Linux.

    It is told in words through a pipe and answers onto the board. It ends with `close`, with this process, or when it
    is lost, which raises HelperLost at the next word. While it makes drafts the target keeps off its processor.
    """

    overlap: Overlap = "process"

    def __init__(
        self, model: LanguageModel, target: LanguageModel, settings: Settings, capacity: int, explain: bool
    ) -> None:
        super().__init__(Board(settings, model, target, shared=True), target, explain)
        self._target = target
        self._cores = Cores()
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process: Any = context.Process(
            target=serve,
            args=(theirs, self._pipe, self.board, (model, target, settings, capacity), self._cores.helper, os.getpid()),
            name="specdemo ssd helper",
            daemon=True,
        )
        with warnings.catch_warnings():  # of forking beside other threads: the child runs nothing of theirs
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    def prefill(self, tokens: Sequence[int]) -> None:
        self._say("prefill", list(tokens))
        self._hear(IDLE)

    def speculate(self, tokens: Sequence[int], draft: Sequence[int]) -> None:
        self._begin(draft)
        self.board.busy.fill_(1)
        self._say("speculate", list(tokens), list(draft))
        self._cores.share()
        call_between_layers(self._target, self._join_in_when_idle)

    def settle(self, num_accepted: int, extra: int) -> Settled:
        verified = time.perf_counter()
        self._take_back()
        self._hear(GUESSES)  # the helper is told nothing before it has chosen
        row, rank = self.board.find(num_accepted, extra)
        known = time.perf_counter()
        self._say("settle", row, num_accepted, self._draft_length, rank)
        self._hear(IDLE)
        return self._settled(row, rank, verified, known)

    def draft(self, tokens: Sequence[int], draft_length: int) -> Proposal:
        self._say("draft", list(tokens), draft_length)
        self._hear(IDLE)
        return self.take(self.board.fallback, draft_length)

    def close(self) -> None:
        self._take_back()
        if self._process is not None:
            self._process.kill()  # it holds nothing that would have to be put in order
            self._process.join()
            self._process.close()
            self._process = None
            self._pipe.close()

    def _join_in_when_idle(self) -> None:
        if not self.board.busy:
            call_between_layers(self._target, None)
            self._cores.join_in()

    def _take_back(self) -> None:
        call_between_layers(self._target, None)
        self._cores.take_back()

    def _say(self, *words: object) -> None:
        try:
            self._pipe.send(words)
        except OSError as error:
            raise self._lost() from error

    def _hear(self, expected: str) -> None:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not self._pipe.poll(_CHECK_S):
                if not self._process.is_alive():
                    raise self._lost()
                if time.monotonic() > deadline:
                    raise HelperLost(f"The drafting process has been silent for {PATIENCE_S:.0f} seconds: try again.")
            answer, *told = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._lost() from error
        if answer == FAILED:
            raise HelperLost(f"The drafting process failed ({told[0]}): try again, report it if it stays.")
        assert answer == expected, f"the helper answers {answer}, not {expected}"

    def _lost(self) -> HelperLost:
        self._process.join(1.0)
        return HelperLost(
            f"The drafting process has ended (exit code {self._process.exitcode}): try again, or choose the method "
            "speculative, which needs none."
        )
