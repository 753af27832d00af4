"""SSD: the next draft is made while this one is verified (Kumar, Dao, May 2026, arXiv 2603.03251).

A drafter around a drafter. With every proposal it sends a helper off to draft for the outcomes of its verification that
are held likely. Where the outcome is one of them, the next proposal is there at once; else the fallback drafts it just
in time. Whatever is proposed comes with the q it was drawn from, so the output is distributed as the target's own; and
with the draft model as fallback the proposals are those of plain speculative decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..models.base import LanguageModel
from ..settings import Settings
from ..ssd.helper import Helper
from .base import Ahead, Proposal, nothing_drafted
from .prompt_lookup import PromptLookup

SHORTEST_MATCH = 3  # as in `hybrid`


class SSD:
    """Drafts through `helper`, which it closes, with `model` for `target`."""

    def __init__(self, helper: Helper, model: LanguageModel, target: LanguageModel, settings: Settings) -> None:
        self.model = model
        self.cost_ratio = 0.1
        self._helper = helper
        self._target = target
        self._lookup = PromptLookup(target.device, SHORTEST_MATCH) if settings.fallback == "prompt-lookup" else None
        self._longest = settings.draft_length
        self._room = self._longest * (settings.fan_out_budget + 2)  # positions that branches may need
        self._verifying: int | None = None  # tokens before the draft that is being verified
        self._ready: int | None = None  # row of the draft that was made for what has happened

    def prefill(self, tokens: Sequence[int]) -> None:
        self._helper.prefill(tokens)
        if self._lookup:
            self._lookup.prefill(tokens)

    def propose(self, tokens: Sequence[int], draft_length: int) -> Proposal:
        left = self.model.context_length - len(tokens)
        proposal = self._next(tokens, min(draft_length, left, self._longest))
        if len(proposal.tokens) and self._room <= left:
            self._helper.speculate(tokens, proposal.tokens.tolist())
            self._verifying = len(tokens)
        return proposal

    def observe(self, tokens: Sequence[int]) -> Ahead | None:
        if self._lookup:
            self._lookup.observe(tokens)
        before, self._verifying = self._verifying, None
        if before is None:
            return None
        settled = self._helper.settle(max(0, len(tokens) - before - 1), tokens[-1])
        self._ready = settled.row
        return Ahead(settled.row is not None, settled.speculation)

    def close(self) -> None:
        self._helper.close()

    def _next(self, tokens: Sequence[int], draft_length: int) -> Proposal:
        ready, self._ready = self._ready, None
        if draft_length <= 0:
            return nothing_drafted(self._target.device)
        if ready is not None:
            return self._helper.take(ready, draft_length)
        if self._lookup and len((copied := self._lookup.propose(tokens, draft_length)).tokens):
            return copied
        return self._helper.draft(tokens, draft_length)
