"""Lookup where the context matches, else the draft model: a copy is free, a model is always there."""

from __future__ import annotations

from collections.abc import Sequence

from ..models.base import LanguageModel
from ..settings import Settings
from .base import Proposal, nothing_drafted
from .draft_model import DraftModel
from .prompt_lookup import PromptLookup

SHORTEST_MATCH = 3  # a shorter match is a worse guess than the draft model's


class Hybrid:
    """Prompt lookup with the draft model behind it. Both see every committed token."""

    def __init__(self, model: LanguageModel, target: LanguageModel, settings: Settings, capacity: int) -> None:
        self._lookup = PromptLookup(target.device, shortest=SHORTEST_MATCH)
        self._draft_model = DraftModel(model, target, settings, capacity)
        self._device = target.device
        self.model = model
        self.cost_ratio = self._draft_model.cost_ratio

    def prefill(self, tokens: Sequence[int]) -> None:
        self._lookup.prefill(tokens)
        self._draft_model.prefill(tokens)

    def propose(self, tokens: Sequence[int], draft_length: int) -> Proposal:
        if draft_length == 0:
            return nothing_drafted(self._device)
        proposal = self._lookup.propose(tokens, draft_length)
        return proposal if len(proposal.tokens) else self._draft_model.propose(tokens, draft_length)

    def observe(self, tokens: Sequence[int]) -> None:
        self._lookup.observe(tokens)
        self._draft_model.observe(tokens)

    def close(self) -> None:
        self._lookup.close()
        self._draft_model.close()
