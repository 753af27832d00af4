"""The contract of a drafter: propose tokens, then see what became of them.

A drafter serves one run. It reports the distribution it drew from, because the maths of `acceptance.judge` is exact
only for the true q: `probs` after the same temperature, filters and penalties as the target's, or None where nothing
was drawn (n-gram lookup, argmax), which means one-hot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Proposal:
    """K proposed tokens.

    tokens: int64 [K], on the drafter's device. probs: float32 [K, vocab] that the tokens were drawn from, or None
    for one-hot. logits: float32 [K, vocab], the model's own, for display; None where there is no model. origin: how
    the tokens were found ("model", "lookup", "none", ...). forwards: the drafter's model forwards for this proposal.
    """

    tokens: Tensor
    probs: Tensor | None
    logits: Tensor | None
    origin: str
    forwards: int = 0


class Drafter(Protocol):
    """Anything that proposes tokens. Created for one run, closed at its end."""

    def prefill(self, tokens: Sequence[int]) -> None:
        """See the prompt, before the first round. Its time counts to the time to first token."""

    def propose(self, tokens: Sequence[int], draft_length: int) -> Proposal:
        """Propose at most `draft_length` tokens to follow `tokens` (prompt and output so far)."""

    def observe(self, tokens: Sequence[int]) -> None:
        """The round is committed and `tokens` is the whole sequence now: roll back, index, learn."""

    def close(self) -> None:
        """Release caches; idempotent."""
