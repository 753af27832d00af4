"""Prompt lookup: the text so far drafts (Saxena 2023, "Prompt Lookup Decoding").

Where the last few tokens have occurred before, what followed them then is proposed now. It costs no forward and wins
where the answer repeats the prompt or itself. How far a copy can be trusted is learned from the text: at every token
that is committed, the copy that would have been proposed either is that token or is not, whether it was proposed or
not. A token is drafted while the chance that the whole draft so far is right exceeds what one more position costs.

Index and counts grow by the tokens of each round and are never rebuilt; both depend on the text alone, not on earlier
drafts or a clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .base import Proposal, nothing_drafted

LONGEST = 8  # tokens of a match
PRIOR = (0.21, 0.53, 0.66, 0.75, 0.78, 0.83, 0.86, 0.92)
"""Share of copied tokens that are right, by the tokens that match before them (the last: 8 or more). Counted on
answers of the embedded target to questions of its own."""
PRIOR_WEIGHT = 8.0  # tokens that the prior is worth
POSITION_COST = 0.07
"""What one more position adds to a target forward, as part of one, with something to spare: the least chance of being
right that is worth a drafted token."""


class PromptLookup:
    """Proposes what followed the latest earlier occurrence of the longest matching n-gram, n from 8 down to `shortest`.
    Where the copy reaches the end of the text it goes on with its own tokens, so a loop is continued."""

    def __init__(self, device: torch.device, shortest: int = 1) -> None:
        self.model = None
        self.cost_ratio = 0.0
        self._device = device
        self._sizes = range(LONGEST, shortest - 1, -1)
        self._follows: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its latest occurrence
        self._indexed = 1  # tokens before this index are in
        self._right = [PRIOR_WEIGHT * share for share in PRIOR]  # copied tokens by the tokens that match, less one
        self._copied = [PRIOR_WEIGHT] * LONGEST

    def prefill(self, tokens: Sequence[int]) -> None:
        self._learn(tokens)

    def propose(self, tokens: Sequence[int], draft_length: int) -> Proposal:
        self._learn(tokens)
        start, size = self._match(_ends(tokens, len(tokens), self._sizes))
        count = self._trusted(size, draft_length) if size else 0
        if count == 0:
            return nothing_drafted(self._device)
        period = len(tokens) - start
        drafted = [tokens[start + i % period] for i in range(count)]
        return Proposal(torch.tensor(drafted, device=self._device), None, origin="lookup")

    def observe(self, tokens: Sequence[int]) -> None:
        self._learn(tokens)

    def close(self) -> None:
        self._follows.clear()

    def _match(self, ends: Sequence[tuple[int, ...]]) -> tuple[int, int]:
        """Index of the token that followed the longest of the n-grams last time, and its tokens; 0 where none did."""
        for end in ends:
            if (start := self._follows.get(end)) is not None:
                return start, len(end)
        return 0, 0

    def _trusted(self, size: int, draft_length: int) -> int:
        """Tokens worth drafting behind a match of `size` tokens, which each copied token makes longer by one."""
        chance = 1.0
        for count in range(draft_length):
            matched = min(size + count, LONGEST) - 1
            chance *= self._right[matched] / self._copied[matched]
            if chance < POSITION_COST:
                return count
        return draft_length

    def _learn(self, tokens: Sequence[int]) -> None:
        """For each new token: would the copy have been right? Then it is indexed as what follows the tokens before."""
        for index in range(self._indexed, len(tokens)):
            ends = _ends(tokens, index, self._sizes)
            start, size = self._match(ends)
            if size:
                self._right[size - 1] += tokens[start] == tokens[index]
                self._copied[size - 1] += 1
            self._follows.update(dict.fromkeys(ends, index))
        self._indexed = max(self._indexed, len(tokens))


def _ends(tokens: Sequence[int], stop: int, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """The n-grams that end before index `stop`, the longest first."""
    return [tuple(tokens[stop - size : stop]) for size in sizes if size <= stop]
