"""The draft model, which can also draft for what it does not know yet.

`guess` reads the draft that is being verified in one forward and chooses the outcomes worth a draft; `branch` makes
all these drafts together then, a token of each per forward. Nothing here waits for a result on the device, so that on
a card all of it can be queued beside the target's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..drafters.draft_model import LEAST_CONFIDENCE, DraftModel
from ..models.base import Branches, BranchingLM, LanguageModel
from ..sampling import Purpose, draw, likeliest, penalise, round_salt, uniform
from ..settings import Settings
from .fan_out import Experience, weights
from .queued import queued
from .saguaro import saguaro

RANKED = 32
"""How far down the draft model's choices an extra token is looked for, at least."""


class Guesses(NamedTuple):
    """`num_accepted`, `rank` and `id` int64 [B]: the outcomes to draft for, ordered by position and rank. ranked: int64
    [K + 1, R], the draft model's choices at each position, the likeliest first, the drafted token left out."""

    num_accepted: Tensor
    rank: Tensor
    id: Tensor
    ranked: Tensor


class Step(NamedTuple):
    """The next token of every draft: ids int64 [B]; the distributions they were drawn from [B, V], None where nothing
    was drawn; the model's logits [B, columns]; whether a draft of adaptive length goes on to this token, bool [B]."""

    ids: Tensor
    probs: Tensor | None
    logits: Tensor
    goes_on: Tensor


def ranks(model: LanguageModel, target: LanguageModel, settings: Settings) -> int:
    """How many of the draft model's choices at each position are looked at."""
    return max(1, min(max(RANKED, settings.fan_out_budget), _columns(model, target) - 1))


def _columns(model: LanguageModel, target: LanguageModel) -> int:
    """The first columns of the draft model's logits, those that are ids of the target."""
    return min(model.vocab_size, target.vocab_size) if model.vocab_ids is None else len(model.vocab_ids)


class Speculator(DraftModel):
    """A `DraftModel` whose q is Saguaro's, with room for the branches of one round."""

    def __init__(self, model: LanguageModel, target: LanguageModel, settings: Settings, capacity: int) -> None:
        room = settings.draft_length * (settings.fan_out_budget + 1)
        super().__init__(model, target, settings, capacity + room)
        self.experience = Experience()
        self.adaptive = settings.adaptive
        self._columns = _columns(model, target)
        self._ranks = ranks(model, target, settings)

    def guess(self, tokens: Sequence[int], draft: Sequence[int]) -> Guesses:
        """Read `draft` after `tokens`, and choose the outcomes of its verification to draft for."""
        return self.choose_guesses(*self.read(tokens, draft), self._settings)

    def read(self, tokens: Sequence[int], draft: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """What may follow `tokens` and 0 .. K tokens of `draft` in place of its next one: ids by falling probability,
        int64 [K + 1, R], and their probabilities, [K + 1, R]; then the probabilities of the draft's own tokens, [K]."""
        self.observe(tokens)
        fed = self._tensor([*tokens[self._cache.cached :], *draft])
        logits = self._cache.extend(fed, keep=len(draft) + 1)[:, : self._columns]  # [K + 1, columns]
        if not self._settings.greedy:
            logits = logits / self._settings.temperature
        probs = logits.softmax(-1)
        ids = queued(draft, torch.int64, probs.device)
        is_drafted = self._ids(torch.arange(self._columns, device=probs.device))[None, :] == ids[:, None]
        drafted = (probs[:-1] * is_drafted).sum(-1)
        probs[:-1].masked_fill_(is_drafted, -1.0)
        top = probs.topk(self._ranks, dim=-1)
        return self._ids(top.indices), top.values, drafted

    def choose_guesses(self, ranked: Tensor, candidates: Tensor, drafted: Tensor, settings: Settings) -> Guesses:
        """The outcomes to draft for, by the rule and budget of `settings`, of what `read` has found."""
        weight = weights(settings, candidates, drafted, self.experience)
        chosen = weight.flatten().topk(min(settings.fan_out_budget, weight.numel())).indices.sort().values
        num_accepted, rank = chosen // self._ranks, chosen % self._ranks
        return Guesses(num_accepted, rank, ranked[num_accepted, rank], ranked)

    def branch(self, tokens: Sequence[int], draft: Sequence[int], guesses: Guesses) -> Branching:
        """Begin the drafts for `guesses`, which `guess` has chosen for `draft` after `tokens`."""
        contexts: list[list[int]] = []
        if self._settings.repetition_penalty != 1.0:
            outcomes = zip(guesses.num_accepted.tolist(), guesses.id.tolist(), strict=True)
            contexts = [[*tokens, *draft[:num_accepted], id] for num_accepted, id in outcomes]
        salt = round_salt(self._settings, self._proposals + 1)
        ahead = range(len(tokens) + 1, len(tokens) + 1 + len(draft) + self._settings.draft_length)
        uniforms = [uniform(self._settings.seed, position, Purpose.DRAFT, salt) for position in ahead]
        branches = cast(BranchingLM, self._cache).branches(guesses.num_accepted + len(tokens))
        draws = queued(uniforms, torch.float64, self.model.device)
        return Branching(self, branches, guesses, draws, contexts)

    def choose(self, logits: Tensor, draws: Tensor, contexts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """The next token of every row of `logits` [B, columns], int64 [B], as `propose` chooses one: the likeliest, or
        drawn with the uniforms `draws` float64 [B] from the distributions that come second, [B, V]. `contexts`: the
        tokens before each, for the repetition penalty; empty where it is off."""
        settings = self._settings
        if settings.greedy and not contexts:
            return self._ids(likeliest(logits[:, : self._columns])), None
        rows = self._over_target_ids(logits)
        if settings.greedy:
            pairs = zip(rows, contexts, strict=True)
            return torch.cat([penalise(row[None], settings, context).argmax(-1) for row, context in pairs]), None
        if contexts:
            pairs = zip(rows, contexts, strict=True)
            probs = torch.cat([self._distribution(row[None], context) for row, context in pairs])
        else:
            probs = self._distribution(rows, ())
        return draw(probs, draws[:, None])[:, 0], probs

    def count_proposal(self) -> None:
        """A draft that `branch` made is the round's, in place of one by `propose`."""
        self._proposals += 1

    def _distribution(self, scores: Tensor, context: Sequence[int]) -> Tensor:
        return saguaro(super()._distribution(scores, context), self._settings)

    def _ids(self, columns: Tensor) -> Tensor:
        """The target's ids of columns of the logits."""
        return columns if self.model.vocab_ids is None else self.model.vocab_ids[columns]


class Branching:
    """Drafts in the making, one for each guess. See `Speculator.branch`."""

    def __init__(
        self,
        speculator: Speculator,
        branches: Branches,
        guesses: Guesses,
        draws: Tensor,
        contexts: list[list[int]],
    ) -> None:
        self._speculator = speculator
        self._branches = branches
        self._fed = guesses.id
        self._draw_at = guesses.num_accepted  # of each draft's next token, in `draws`
        self._draws = draws
        self._contexts = contexts
        self._confidence = torch.ones(len(guesses.id), device=guesses.id.device)  # that all of a draft stands

    def step(self) -> Step:
        """One more token for every draft."""
        logits = self._branches.extend(self._fed)
        ids, probs = self._speculator.choose(logits, self._draws[self._draw_at], self._contexts)
        step = Step(ids, probs, logits, self._confidence >= LEAST_CONFIDENCE)
        if self._speculator.adaptive:
            self._confidence = self._confidence * (logits.amax(-1) - logits.logsumexp(-1)).exp()
        if self._contexts:
            for context, id in zip(self._contexts, ids.tolist(), strict=True):
                context.append(id)
        self._fed, self._draw_at = ids, self._draw_at + 1
        return step

    def only(self, index: int) -> None:
        """Go on with one guess alone."""
        self._branches.only(index)
        one = slice(index, index + 1)
        self._fed, self._draw_at = self._fed[one], self._draw_at[one]
        self._contexts, self._confidence = self._contexts[one], self._confidence[one]
