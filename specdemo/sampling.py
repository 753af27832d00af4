"""From logits to the distribution that is sampled, and from a distribution to one token.

Target and draft model go through the same `to_probs`, because rejection sampling is exact only for the q that was
really drawn from. Randomness comes from a counter instead of a stream: the uniform for (seed, position, purpose) is
the same however the run got there, so that equal runs repeat and methods that draft alike emit alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from .settings import Settings


class Purpose(IntEnum):
    """What a uniform is for. One position may need one of each."""

    TARGET = 1  # a token drawn from the target or from the residual
    DRAFT = 2  # a token drawn by a drafter
    ACCEPT = 3  # the test of a drafted token


_MASK = 2**64 - 1
_BLOCK, _FEW = 128, 2**15


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int, purpose: Purpose, salt: int = 0) -> float:
    """A uniform in [0, 1), a multiple of 2**-52, fixed by its arguments.

    `salt` separates draws that a method makes at the same place for different rounds (see `round_salt`).
    """
    return (_mix(_mix(_mix(_mix(seed) ^ position) ^ purpose) ^ salt) >> 12) * 2.0**-52


def round_salt(settings: Settings, round_index: int) -> int:
    """The salt of a round's draft and test uniforms, so that none is used again after something depended on it.

    Token-wise verification never looks past the first rejection, so a discarded position's uniforms are still
    unseen and may serve the next round; that is what makes methods repeatable token by token. Block verification
    decides on the whole block: what it discarded has been looked at, so every round needs uniforms of its own.
    """
    return round_index + 1 if settings.verification == "block" else 0


def to_probs(logits: Tensor, settings: Settings, context: Sequence[int], draft: Sequence[int] = ()) -> Tensor:
    """The distributions that are sampled.

    logits: float32 [R, V]. Row r is the position after `context` + draft[:r], which is what its repetition penalty
    sees. Returns float32 [R, V], rows summing to 1; one-hot at temperature 0. Order of the filters and handling of
    ties are those of transformers' `generate`, the yardstick for exactness.
    """
    scores = penalise(logits, settings, context, draft)
    if settings.greedy:
        best = likeliest(scores)[:, None]
        greatest = scores.gather(-1, best)
        zero = greatest - greatest  # NaN where the model is broken, so that it is noticed here too
        return zero.expand_as(scores).scatter(-1, best, zero + 1.0)
    scores = scores / settings.temperature
    if 0 < settings.top_k < scores.shape[-1]:
        kth = scores.topk(settings.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if settings.top_p < 1.0:
        ordered, order = scores.sort(dim=-1)
        outside = ordered.softmax(-1).cumsum(-1) <= 1.0 - settings.top_p
        outside[..., -1] = False
        scores = scores.masked_fill(torch.zeros_like(outside).scatter_(-1, order, outside), -torch.inf)
    if settings.min_p > 0.0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < settings.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return scores.softmax(-1)


def likeliest(scores: Tensor) -> Tensor:
    """The index of each row's greatest value, the first of several: scores [R, V] -> int64 [R]. A NaN counts as one.

    On a CPU torch looks for a value many at a time, for an index one by one: first comes the block, then what is in it.
    """
    if scores.is_cuda or scores.shape[-1] % _BLOCK or scores.numel() < _FEW:
        return scores.argmax(-1)
    blocks = scores.unflatten(-1, (-1, _BLOCK))
    block = blocks.amax(-1).argmax(-1, keepdim=True)
    within: Tensor = blocks.take_along_dim(block[..., None], -2).squeeze(-2).argmax(-1)
    return within.add_(block.squeeze(-1), alpha=_BLOCK)


def penalise(logits: Tensor, settings: Settings, context: Sequence[int], draft: Sequence[int] = ()) -> Tensor:
    """Repetition penalty (Keskar et al. 2019, section 4.1): a seen token's positive logit is divided by the penalty,
    a negative one multiplied. Row r sees `context` + draft[:r]. Returns `logits` itself when the penalty is off."""
    if settings.repetition_penalty == 1.0:
        return logits
    scores = logits.clone()
    seen = set(context)
    for row in range(scores.shape[0]):
        if 0 < row <= len(draft):
            seen.add(draft[row - 1])
        ids = torch.tensor([id for id in seen if id < scores.shape[-1]], dtype=torch.long, device=scores.device)
        values = scores[row, ids]
        penalty = settings.repetition_penalty
        scores[row, ids] = torch.where(values < 0, values * penalty, values / penalty)
    return scores


def draw(weights: Tensor, u: float | Tensor) -> Tensor:
    """One index of `weights` (float [V], not all zero) by inversion of its cumulative sum at `u` in [0, 1). Of several
    rows [R, V], each at its own u [R, 1], one index each, [R, 1].

    Never returns an index of weight zero: the first whose cumulative sum exceeds u * total adds to the sum, and
    u <= 1 - 2**-52 keeps u * total below the total. Returns int64 [1] on the weights' device, without a host sync
    (weights on MPS, which has no float64, are drawn from on the CPU). NaN gives any index: see `judge`.
    """
    cumulative = (weights.cpu() if weights.device.type == "mps" else weights).double().cumsum(-1)
    return torch.searchsorted(cumulative, (cumulative[..., -1:] * u), right=True).clamp_(max=weights.shape[-1] - 1)
