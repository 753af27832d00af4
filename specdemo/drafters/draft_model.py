"""A smaller language model drafts: the classic drafter (Leviathan et al. 2023; Chen et al. 2023).

It keeps its own cache beside the target's. After a round it forgets what was refused; what was committed without it
(a recovered or bonus token, another drafter's tokens) it catches up on in its next forward.

With an adaptive draft length it stops where all it has drafted is too unlikely to stand, by its own account. That
account is the probability of its likeliest token, whichever was drawn: whether a token is proposed must not depend on
the token itself, or the output would no longer be distributed as the target's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.base import LanguageModel
from ..sampling import Purpose, draw, likeliest, penalise, round_salt, to_probs, uniform
from ..settings import Settings
from .base import Proposal, nothing_drafted

LEAST_CONFIDENCE = 0.4  # that all tokens drafted so far stand, for another one to be drafted


class DraftModel:
    """Drafts with `model` for `target`, in a cache of at most `capacity` positions. Greedy drafting reports a one-hot
    q, sampled drafting the distribution drawn from, after the target's own temperature, filters and penalties. Past
    the end of its own context it drafts nothing."""

    def __init__(self, model: LanguageModel, target: LanguageModel, settings: Settings, capacity: int) -> None:
        self.model = model
        self.cost_ratio = 0.1
        self._settings = settings
        self._target = target
        self._cache = model.open(min(capacity, model.context_length))
        self._proposals = 0

    def prefill(self, tokens: Sequence[int]) -> None:
        if len(tokens) < self.model.context_length:
            logits = self._cache.extend(self._tensor(tokens), keep=1)
            logits.to(self._target.device)  # if that is another card, it waits: the prompt's time is the lane's

    def propose(self, tokens: Sequence[int], draft_length: int) -> Proposal:
        draft_length = min(draft_length, self.model.context_length - len(tokens))
        if draft_length <= 0:
            return nothing_drafted(self._target.device)
        self._proposals += 1
        salt = round_salt(self._settings, self._proposals)
        sampled = not self._settings.greedy
        drafted: list[Tensor] = []  # each [1]
        probs: list[Tensor] = []  # each [V]
        rows: list[Tensor] = []  # each [1, columns]
        feed = self._tensor(tokens[self._cache.cached :])
        confidence = 1.0
        for i in range(draft_length):
            logits = self._cache.extend(feed, keep=1)
            rows.append(logits.clone())
            context = [*tokens, *map(int, drafted)] if self._settings.repetition_penalty != 1.0 else ()
            if sampled:
                q = self._distribution(self._over_target_ids(logits), context)[0]
                token = draw(q, uniform(self._settings.seed, len(tokens) + i, Purpose.DRAFT, salt))
                probs.append(q)
            else:
                token = self._likeliest(logits, context)
            drafted.append(token)
            feed = token
            if self._settings.adaptive:
                confidence *= float(logits.softmax(-1).amax())
                if confidence < LEAST_CONFIDENCE:
                    break
        device = self._target.device
        return Proposal(
            tokens=torch.cat(drafted).to(device),
            probs=torch.stack(probs).to(device) if sampled else None,
            origin="model",
            logits=torch.cat(rows),
            vocab_ids=self.model.vocab_ids,
            forwards=len(drafted),
        )

    def observe(self, tokens: Sequence[int]) -> None:
        self._cache.truncate(len(tokens) - 1)

    def close(self) -> None:
        self._cache.close()

    def _distribution(self, scores: Tensor, context: Sequence[int]) -> Tensor:
        """What is drawn from, [R, V], given the scores of R tokens that may follow `context`."""
        return to_probs(scores, self._settings, context)

    def _likeliest(self, logits: Tensor, context: Sequence[int]) -> Tensor:
        """The id [1] with the highest of the logits [1, columns]."""
        if self.model.vocab_ids is not None and self._settings.repetition_penalty == 1.0:
            best = likeliest(logits)  # among its own few ids, not the target's many
            return self.model.vocab_ids.index_select(0, best)
        return likeliest(penalise(self._over_target_ids(logits), self._settings, context))

    def _tensor(self, tokens: Sequence[int]) -> Tensor:
        """An id that the draft model does not have is fed as its last one: at worst the guess is bad."""
        known = self._target.vocab_size if self.model.vocab_ids is not None else self.model.vocab_size
        return torch.tensor(tokens, dtype=torch.long, device=self.model.device).clamp_(max=known - 1)

    def _over_target_ids(self, logits: Tensor) -> Tensor:
        """Logits [R, columns] as [R, the target's vocabulary]; what the draft model does not have is never drawn."""
        if self.model.vocab_ids is None and logits.shape[-1] == self._target.vocab_size:
            return logits
        scores = torch.full((len(logits), self._target.vocab_size), -torch.inf, device=logits.device)
        if self.model.vocab_ids is None:
            shared = min(logits.shape[-1], self._target.vocab_size)
            scores[:, :shared] = logits[:, :shared]
        else:
            scores[:, self.model.vocab_ids] = logits
        return scores
