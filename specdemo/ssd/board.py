"""What a helper writes down for the drafter: guesses and the drafts for them. In memory that two processes share, no
token and no probability is ever copied through a pipe.

The shared memory is anonymous: it has no name that could be left behind, and goes with the last process that has it.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from ..drafters.base import Proposal
from ..events import Guess
from ..models.base import LanguageModel
from ..settings import Settings
from .speculator import Guesses, Step, ranks

BEGUN, GUESSED, BUILT = 0, 1, 2
"""Whose times are kept, by `time.perf_counter`: when the helper began with a round, when it had chosen its guesses and
when it had made their drafts."""


class Board:
    """Room for the guesses of one round, a draft for each of them and one more, the fallback's, in row `fallback`."""

    def __init__(self, settings: Settings, draft: LanguageModel, target: LanguageModel, shared: bool) -> None:
        budget, k = settings.fan_out_budget, settings.draft_length
        self.fallback = budget
        self.ranks = ranks(draft, target, settings)
        self._vocab_ids = draft.vocab_ids
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((1,), torch.uint8),
            ((3,), torch.float64),
            ((2,), torch.int64),
            ((3, budget), torch.int64),
            ((k + 1, self.ranks), torch.int64),
            ((budget + 1,), torch.int64),
            ((budget + 1, k), torch.int64),
            ((budget + 1, k, draft.vocab_size), torch.float32),
            ((0 if settings.greedy else budget + 1, k, target.vocab_size), torch.float32),
        ]
        device = torch.device("cpu") if shared else draft.device
        tensors = (
            _share(shapes) if shared else [torch.zeros(shape, dtype=kind, device=device) for shape, kind in shapes]
        )
        self.busy, self.times, self._sizes, self._guesses, self._ranked = tensors[:5]
        self._lengths, self._ids, self._logits, self._probs = tensors[5:]

    def write_guesses(self, guesses: Guesses) -> None:
        count, positions = len(guesses.id), len(guesses.ranked)
        self._sizes[0], self._sizes[1] = count, positions
        self._guesses[:, :count] = torch.stack([guesses.num_accepted, guesses.rank, guesses.id])
        self._ranked[:positions] = guesses.ranked
        self._lengths[:count] = 0

    def write_step(self, rows: slice, index: int, step: Step) -> None:
        """The token with number `index` of the drafts in `rows`."""
        self._ids[rows, index] = step.ids
        self._logits[rows, index] = step.logits
        if step.probs is not None:
            self._probs[rows, index] = step.probs
        self._lengths[rows] += step.goes_on & (self._lengths[rows] == index)

    def write_proposal(self, proposal: Proposal) -> None:
        """A draft of the fallback."""
        count = len(proposal.tokens)
        self._lengths[self.fallback] = count
        if count and proposal.logits is not None:
            self._ids[self.fallback, :count] = proposal.tokens
            self._logits[self.fallback, :count] = proposal.logits
            if proposal.probs is not None:
                self._probs[self.fallback, :count] = proposal.probs

    def proposal(self, row: int, draft_length: int, device: torch.device) -> Proposal:
        """The draft in `row`, at most `draft_length` tokens of it, on the target's `device`. Copied: the next round's
        are written while this one is judged."""
        count = min(int(self._lengths[row]), draft_length)
        model = row == self.fallback
        return Proposal(
            tokens=self._ids[row, :count].to(device, copy=True),
            probs=self._probs[row, :count].to(device, copy=True) if len(self._probs) else None,
            origin="none" if count == 0 else "model" if model else "cache",
            logits=self._logits[row, :count].clone(),
            vocab_ids=self._vocab_ids,
            forwards=count if model else 0,
        )

    def find(self, num_accepted: int, extra: int) -> tuple[int | None, int]:
        """The row of the draft for an outcome, None if it was not guessed; and the rank of its extra token among the
        draft model's choices, their number where it is none of them."""
        rows = zip(*self._columns(), strict=True)
        row = next((i for i, (k, _, id) in enumerate(rows) if (k, id) == (num_accepted, extra)), None)
        ranked = self._ranked[num_accepted].tolist()
        return row, ranked.index(extra) if extra in ranked else len(ranked)

    def fan_out(self) -> tuple[int, ...]:
        """Guesses by position."""
        positions = self._columns()[0]
        return tuple(positions.count(k) for k in range(int(self._sizes[1])))

    def as_guesses(self, taken: int | None) -> tuple[Guess, ...]:
        """The guesses and their drafts as events tell them, without texts; `taken`: the row that came true."""
        drafts = zip(*self._columns(), self._ids.tolist(), self._lengths.tolist(), strict=False)
        return tuple(
            Guess(k, id, rank, draft=tuple(ids[:length]), taken=row == taken)
            for row, (k, rank, id, ids, length) in enumerate(drafts)
        )

    def _columns(self) -> list[list[int]]:
        columns: list[list[int]] = self._guesses[:, : int(self._sizes[0])].tolist()
        return columns


def _share(shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Tensors of zeros in memory that processes forked from here on have in common."""
    sizes = [-(-math.prod(shape) * kind.itemsize // 64) * 64 for shape, kind in shapes]
    memory = mmap.mmap(-1, sum(sizes))
    tensors, offset = [], 0
    for (shape, kind), size in zip(shapes, sizes, strict=True):
        count = math.prod(shape)
        flat = torch.frombuffer(memory, dtype=kind, count=count, offset=offset) if count else torch.empty(0, dtype=kind)
        tensors.append(flat.view(shape))
        offset += size
    return tensors
