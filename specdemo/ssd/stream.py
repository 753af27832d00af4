"""A helper on a second CUDA stream: its work is queued before the verification's and runs beside it on the same card.

Nothing between the begin of the guesses and the end of their drafts waits for the host.

Two streams share one card, so each may take longer beside the other, and work that ran at the same time need not have
been free. What was hidden is therefore what both took less than one after the other, T_verify + T_tree - T_both. The
first rounds of a run tell the first two: in them the verification waits for the drafts. Not yet verified on a card.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..events import Overlap
from ..models.base import LanguageModel
from ..settings import Settings
from .board import BEGUN, BUILT, GUESSED
from .helper import LocalHelper, Settled

ALONE_ROUNDS = 3
"""Rounds in which verification and tree have the card to themselves. The least counts: what happens once does not."""


class StreamHelper(LocalHelper):
    """A `LocalHelper` whose speculation runs on a stream of its own, timed by events on both streams."""

    overlap: Overlap = "stream"

    def __init__(
        self, model: LanguageModel, target: LanguageModel, settings: Settings, capacity: int, explain: bool
    ) -> None:
        super().__init__(model, target, settings, capacity, explain)
        self._stream = torch.cuda.Stream(model.device)
        names = ("ready", "guessed", "built", "begun", "verified")
        self._marks = {name: torch.cuda.Event(enable_timing=True) for name in names}
        self._alone: list[tuple[float, float]] = []  # seconds of a verification and of a tree

    def speculate(self, tokens: Sequence[int], draft: Sequence[int]) -> None:
        self._begin(draft)
        main = torch.cuda.current_stream(self._device)
        self._marks["ready"].record(main)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            steps = self._worker.speculate(tokens, draft)
            next(steps)
            self._marks["guessed"].record(self._stream)
            for _step in steps:
                pass
            self._marks["built"].record(self._stream)
        if len(self._alone) < ALONE_ROUNDS:
            main.wait_stream(self._stream)
        self._marks["begun"].record(main)

    def settle(self, num_accepted: int, extra: int) -> Settled:
        main = torch.cuda.current_stream(self._device)
        self._marks["verified"].record(main)
        main.wait_stream(self._stream)  # what comes next reads the drafts
        guessed, built, begun, verified = map(self._seconds, ("guessed", "built", "begun", "verified"))
        for index, seconds in ((BEGUN, 0.0), (GUESSED, guessed), (BUILT, built)):
            self.board.times[index] = self._ready + seconds
        row, rank = self.board.find(num_accepted, extra)
        self._worker.learn(num_accepted, self._draft_length, rank, row is not None)
        settled = self._settled(row, rank, self._ready + verified, self._ready + max(guessed, verified))
        if len(self._alone) < ALONE_ROUNDS:
            self._alone.append((verified - begun, built))
            account = replace(settled.speculation, hidden_s=0.0, overlap="none")
        else:
            verify_s, tree_s = map(min, zip(*self._alone, strict=True))
            hidden_s = hidden(verify_s, tree_s, max(built, verified))
            account = replace(settled.speculation, build_s=tree_s, hidden_s=hidden_s)
        return replace(settled, speculation=account)

    def _seconds(self, name: str) -> float:
        """From the moment when the draft was there, on the card."""
        self._marks[name].synchronize()
        return float(self._marks["ready"].elapsed_time(self._marks[name])) / 1000.0


def hidden(verify_s: float, tree_s: float, both_s: float) -> float:
    """Seconds that a verification and a tree took less beside each other than alone, 0 to the shorter of them."""
    return min(max(0.0, verify_s + tree_s - both_s), verify_s, tree_s)
