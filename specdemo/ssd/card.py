"""A helper on a card of its own: the draft model's card makes the drafts while the target's verifies.

A thread tells the draft model's card what to do, since telling it everything can take as long as doing it, and the
target's would have to wait for that. Nothing between the begin of the guesses and the end of their drafts waits for a
result. From `speculate` to `settle` the thread has the draft model, before and after that the lane's own.

Events of two cards have no common clock. So the tree is timed by events of its own card alone, counted from a mark that
is set when both cards are idle, as they are once the draft has been read; and it is placed at the host's time of that
moment. When the verification has ended is the host's time too, since it reads the verdict. Not yet verified on two
cards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..events import Overlap
from ..models.base import LanguageModel
from ..settings import Settings
from .board import BEGUN, BUILT, GUESSED
from .helper import LocalHelper, Settled


class CardHelper(LocalHelper):
    """A `LocalHelper` whose speculation runs in a thread, on the draft model's card, which is not the target's."""

    overlap: Overlap = "card"
    _tree: Future[None]  # of the round that is being verified

    def __init__(
        self, model: LanguageModel, target: LanguageModel, settings: Settings, capacity: int, explain: bool
    ) -> None:
        super().__init__(model, target, settings, capacity, explain)
        self._stream = torch.cuda.current_stream(model.device)
        names = ("ready", "begun", "guessed", "built")
        self._marks = {name: torch.cuda.Event(enable_timing=True) for name in names}
        self._thread = ThreadPoolExecutor(1, "specdemo ssd card")

    def speculate(self, tokens: Sequence[int], draft: Sequence[int]) -> None:
        self._marks["ready"].record(self._stream)
        self._begin(draft)
        self._tree = self._thread.submit(self._grow, tuple(tokens), draft)  # the lane's own list goes on

    def settle(self, num_accepted: int, extra: int) -> Settled:
        verified = time.perf_counter()
        self._tree.result()  # raises what the thread has run into
        begun, guessed, built = map(self._moment, ("begun", "guessed", "built"))
        for index, moment in ((BEGUN, begun), (GUESSED, guessed), (BUILT, built)):
            self.board.times[index] = moment
        row, rank = self.board.find(num_accepted, extra)
        self._worker.learn(num_accepted, self._draft_length, rank, row is not None)
        return self._settled(row, rank, verified, max(guessed, verified))

    def close(self) -> None:
        self._thread.shutdown()
        super().close()

    def _grow(self, tokens: Sequence[int], draft: Sequence[int]) -> None:
        """Guess and draft, in the thread."""
        with torch.cuda.stream(self._stream):
            self._marks["begun"].record(self._stream)
            steps = self._worker.speculate(tokens, draft)
            next(steps)
            self._marks["guessed"].record(self._stream)
            for _step in steps:
                pass
            self._marks["built"].record(self._stream)

    def _moment(self, name: str) -> float:
        """The host's time of a mark, once the card is there."""
        self._marks[name].synchronize()
        return self._ready + float(self._marks["ready"].elapsed_time(self._marks[name])) / 1000.0
