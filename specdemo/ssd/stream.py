"""A helper on a second CUDA stream: its work is queued before the verification's and runs beside it on the same card.

Nothing between the begin of the guesses and the end of their drafts waits for the host. Not yet verified on a card.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..events import Overlap
from ..models.base import LanguageModel
from ..settings import Settings
from .board import BEGUN, BUILT, GUESSED
from .helper import LocalHelper, Settled


class StreamHelper(LocalHelper):
    """A `LocalHelper` whose speculation runs on a stream of its own, timed by events on both streams."""

    overlap: Overlap = "stream"

    def __init__(
        self, model: LanguageModel, target: LanguageModel, settings: Settings, capacity: int, explain: bool
    ) -> None:
        super().__init__(model, target, settings, capacity, explain)
        self._stream = torch.cuda.Stream(model.device)
        names = ("ready", "guessed", "built", "verified")
        self._marks = {name: torch.cuda.Event(enable_timing=True) for name in names}

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

    def settle(self, num_accepted: int, extra: int) -> Settled:
        main = torch.cuda.current_stream(self._device)
        self._marks["verified"].record(main)
        main.wait_stream(self._stream)  # what comes next reads the drafts
        guessed, built, verified = (self._ready + self._seconds(name) for name in ("guessed", "built", "verified"))
        for index, seconds in ((BEGUN, self._ready), (GUESSED, guessed), (BUILT, built)):
            self.board.times[index] = seconds
        row, rank = self.board.find(num_accepted, extra)
        self._worker.learn(num_accepted, self._draft_length, rank, row is not None)
        return self._settled(row, rank, verified, max(guessed, verified))

    def _seconds(self, name: str) -> float:
        """From the moment when the draft was there, on the card."""
        self._marks[name].synchronize()
        return float(self._marks["ready"].elapsed_time(self._marks[name])) / 1000.0
