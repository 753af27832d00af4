"""The contract of a drafter: propose tokens, then see what became of them.

A drafter serves one run. It reports the distribution it drew from, because the maths of `acceptance.judge` is exact
only for the true q: `probs` after the same temperature, filters and penalties as the target's, or None where nothing
was drawn (n-gram lookup, argmax), which means one-hot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..events import Speculation
from ..models.base import LanguageModel


@dataclass(frozen=True, slots=True)
class Proposal:
    """K proposed tokens.

    tokens: int64 [K] of the target's ids, on the target's device. probs: float [K, V] over the target's vocabulary
    that the tokens were drawn from, or None for one-hot. logits: float32 [K, columns], the draft model's own, for
    display, whose columns are the ids `vocab_ids` (None: their index); None where there is no model. origin: how the
    tokens were found ("model", "lookup", "none", or "cache": made ahead of time). forwards: the draft model's forwards
    for this proposal.
    """

    tokens: Tensor
    probs: Tensor | None
    origin: str
    logits: Tensor | None = None
    vocab_ids: Tensor | None = None
    forwards: int = 0


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a drafter did for the next round while this one was verified; `hit`: that is the next proposal."""

    hit: bool
    speculation: Speculation


def nothing_drafted(device: torch.device) -> Proposal:
    """A proposal of no tokens: the round then is one plain step of the target."""
    return Proposal(torch.empty(0, dtype=torch.long, device=device), None, origin="none")


class Drafter(Protocol):
    """Anything that proposes tokens. Created for one run, closed at its end.

    `model` is the draft model, if there is one; `cost_ratio` a rough guess of one drafted token's cost over one target
    forward, from which an adaptive draft length starts.
    """

    @property
    def model(self) -> LanguageModel | None: ...

    @property
    def cost_ratio(self) -> float: ...

    def prefill(self, tokens: Sequence[int]) -> None:
        """See the prompt, before the first round. Its time counts to the time to first token."""

    def propose(self, tokens: Sequence[int], draft_length: int) -> Proposal:
        """Propose at most `draft_length` tokens to follow `tokens` (prompt and output so far)."""

    def observe(self, tokens: Sequence[int]) -> Ahead | None:
        """The round is committed and `tokens` is the whole sequence now: roll back, index, learn. A drafter that works
        ahead says how that went."""

    def close(self) -> None:
        """Release caches; idempotent."""
