"""The helper's side of SSD: drafts for outcomes, and just in time where none of them was right, onto a board."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from .board import BEGUN, BUILT, GUESSED, Board
from .speculator import Branching, Speculator


class Worker:
    """Works with `speculator` and writes to `board`."""

    def __init__(self, speculator: Speculator, board: Board, draft_length: int) -> None:
        self._speculator = speculator
        self._board = board
        self._draft_length = draft_length
        self._branching: Branching | None = None
        self._rows = slice(0, 0)

    def prefill(self, tokens: Sequence[int]) -> None:
        self._speculator.prefill(tokens)

    def draft(self, tokens: Sequence[int], draft_length: int) -> None:
        """Draft what follows `tokens`, into the board's last row."""
        self._speculator.observe(tokens)
        self._board.write_proposal(self._speculator.propose(tokens, draft_length))

    def speculate(self, tokens: Sequence[int], draft: Sequence[int]) -> Iterator[None]:
        """Draft for what the verification of `draft` after `tokens` may come to. Stops for a moment when the guesses
        have been chosen and after each further token; `only` may be called then, or the rest be given up. The board
        says when all is done."""
        board = self._board
        board.times[BEGUN] = time.perf_counter()
        guesses = self._speculator.guess(tokens, draft)
        board.write_guesses(guesses)
        board.times[GUESSED] = board.times[BUILT] = time.perf_counter()
        self._rows = slice(0, len(guesses.id))
        self._branching = self._speculator.branch(tokens, draft, guesses)
        yield
        for index in range(self._draft_length):
            board.write_step(self._rows, index, self._branching.step())
            board.times[BUILT] = time.perf_counter()
            yield
        board.busy.fill_(0)

    def only(self, row: int) -> None:
        """Of the drafts in the making only this one is needed."""
        if self._branching is not None:
            self._branching.only(row)
            self._rows = slice(row, row + 1)

    def learn(self, num_accepted: int, draft_length: int, rank: int, hit: bool) -> None:
        """The outcome of a verification, for the guesses to come."""
        self._speculator.experience.learn(num_accepted, draft_length, rank)
        if hit:
            self._speculator.count_proposal()

    def close(self) -> None:
        self._speculator.close()
