"""Prompt lookup: the text so far drafts (Saxena 2023, "Prompt Lookup Decoding").

Where the last few tokens have occurred before, what followed them then is proposed now. It costs no forward and wins
where the answer repeats the prompt or itself. The longer the match, the further it is trusted: a single token that
has been seen before is weak evidence, and a refused draft is not quite free. The index grows by the tokens of each
round and is never rebuilt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .base import Proposal, nothing_drafted

LONGEST, SHORTEST = 8, 1  # tokens of a match
TRUST = 2  # tokens drafted per token matched


class PromptLookup:
    """Proposes what followed the latest earlier occurrence of the longest matching n-gram, n from `longest` down to
    `shortest`: at most TRUST x n tokens. Where the copy reaches the end of the text it goes on with its own tokens, so
    a loop is continued."""

    def __init__(self, device: torch.device, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        self.model = None
        self.cost_ratio = 0.0
        self._device = device
        self._sizes = range(longest, shortest - 1, -1)
        self._follows: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its latest occurrence
        self._indexed = 0  # n-grams that end before this index are in

    def prefill(self, tokens: Sequence[int]) -> None:
        self._index(tokens)

    def propose(self, tokens: Sequence[int], draft_length: int) -> Proposal:
        match = self._find(tokens)
        if draft_length == 0 or match is None:
            return nothing_drafted(self._device)
        start, size = match
        period = len(tokens) - start
        drafted = [tokens[start + i % period] for i in range(min(draft_length, TRUST * size))]
        return Proposal(torch.tensor(drafted, device=self._device), None, origin="lookup")

    def _find(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Index of the token that followed the end of `tokens` last time, and the tokens that match before it."""
        self._index(tokens)
        for size in self._sizes:
            start = self._follows.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if start is not None:
                return start, size
        return None

    def observe(self, tokens: Sequence[int]) -> None:
        self._index(tokens)

    def close(self) -> None:
        self._follows.clear()

    def _index(self, tokens: Sequence[int]) -> None:
        """Index the n-grams that a token follows: all but those at the very end."""
        for end in range(max(self._indexed, 1), len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._follows[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, len(tokens))
