"""The verdict on a draft: which tokens stay, and the one token that follows. The heart of losslessness.

Token-wise verification is Algorithm 1 of Leviathan, Kalman, Matias 2023 ("Fast Inference from Transformers via
Speculative Decoding"): token i stays with probability min(1, p_i / q_i), the first refusal is replaced by a draw from
norm(max(0, p - q)), and a fully accepted draft earns a bonus token from p. Block verification is Algorithm 2 of
Sun et al. 2024 ("Block Verification Accelerates Speculative Decoding"): the draft is judged as a whole and keeps its
longest accepted beginning. Both leave the target's distribution exactly as it was; neither knows a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ModelUnavailable
from .events import ExtraKind
from .sampling import draw, likeliest
from .settings import Verification

_NAN = "The model's output is not a number (NaN): run it in float32, or in bfloat16."


@dataclass(frozen=True, slots=True)
class Verdict:
    """`num_accepted` tokens stay, `extra` follows. Per drafted token [K]: its id, p, q, the probability of being
    accepted (token-wise min(1, p/q), block h_i) and the uniform that was compared with it."""

    num_accepted: int
    extra: int
    extra_kind: ExtraKind
    extra_p: float
    tokens: tuple[int, ...]
    p: tuple[float, ...]
    q: tuple[float, ...]
    acceptance: tuple[float, ...]
    tests: tuple[float, ...]


def judge(
    draft: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    tests: Sequence[float],
    draws: Sequence[float],
    verification: Verification = "token",
) -> Verdict:
    """Judge K drafted tokens against the target.

    draft: int64 [K]. draft_probs: float [K, V], q that each token was drawn from, or None when nothing was drawn
    (q is one-hot at the token). target_probs: float [K + 1, V], p at each drafted position and after the last.
    tests: K uniforms in [0, 1), one for each drafted token: accepted when below its threshold, never at it. draws:
    K + 1 uniforms, of which the one at the first position not accepted draws the extra token. Pure; one read from the
    device. Raises ModelUnavailable where a probability is NaN.
    """
    k = draft.shape[0]
    if target_probs.shape[0] != k + 1 or len(tests) != k or len(draws) != k + 1:
        raise ValueError(f"{k} drafted tokens need {k} tests, and {k + 1} target rows and draws")
    if target_probs.device.type == "mps":  # no float64 there
        draft_probs = None if draft_probs is None else draft_probs.cpu()
        draft, target_probs = draft.cpu(), target_probs.cpu()
    device = target_probs.device
    uniforms = torch.tensor([*tests, *draws], dtype=torch.float64, device=device)
    test, draw_at = uniforms[:k], uniforms[k:]

    p = target_probs[:k].gather(1, draft[:, None]).squeeze(1).double()  # [K]
    q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(1, draft[:, None]).squeeze(1).double()
    if verification == "token":
        acceptance = (p / q).clamp(max=1.0)
        num_accepted = (test < acceptance).long().cumprod(0).sum().view(1)
        mass = torch.ones_like(draw_at)
    else:
        mass = _block_mass(p, q)
        acceptance = _block_acceptance(mass, draft, draft_probs, target_probs)
        ranks = torch.arange(1, k + 1, device=device)
        passed = torch.cat([torch.zeros(1, dtype=torch.long, device=device), (test < acceptance) * ranks])
        num_accepted = passed.amax(0, keepdim=True)

    p_row = target_probs.index_select(0, num_accepted)[0]
    weights = p_row.double() * mass[num_accepted]
    if k > 0:
        weights = _minus_q(weights, num_accepted, draft, draft_probs).clamp_(min=0.0)
        # p equal to q leaves nothing: then p itself is the limit of the rule
        weights = torch.where(weights.sum() > 0, weights, p_row.double())
    extra = draw(weights, draw_at[num_accepted])

    read = torch.cat([num_accepted.double(), extra.double(), p_row[extra].double(), draft.double(), p, q, acceptance])
    numbers = read.tolist()
    if any(map(math.isnan, numbers)):
        raise ModelUnavailable(_NAN)
    n = int(numbers[0])
    per_token = [tuple(numbers[3 + k * i : 3 + k * (i + 1)]) for i in range(4)]
    return Verdict(
        num_accepted=n,
        extra=int(numbers[1]),
        extra_kind="bonus" if n == k else "recovered",
        extra_p=numbers[2],
        tokens=tuple(int(id) for id in per_token[0]),
        p=per_token[1],
        q=per_token[2],
        acceptance=per_token[3],
        tests=tuple(tests),
    )


def judge_likeliest(
    draft: Tensor, scores: Tensor, tests: Sequence[float], verification: Verification = "token"
) -> Verdict:
    """`judge` at temperature 0, where nothing is drawn: the draft [K] stays as far as it is what the target says, the
    greatest of each row of its `scores` [K + 1, V]. The same verdict without arithmetic on rows that are all zeros
    but for a 1. One read from the device. Raises ModelUnavailable where a greatest score is no finite number."""
    k = draft.shape[0]
    best = likeliest(scores)
    greatest = scores.gather(1, best[:, None]).squeeze(1).float()
    numbers = torch.cat([greatest, best.float(), draft.float()]).tolist()  # ids are whole below 2**24
    if not all(map(math.isfinite, numbers)):
        raise ModelUnavailable(_NAN)
    says, tokens = list(map(int, numbers[k + 1 : 2 * k + 2])), tuple(map(int, numbers[2 * k + 2 :]))
    p = tuple(float(id == said) for id, said in zip(tokens, says[:k], strict=True))
    n = next((i for i, stays in enumerate(p) if not stays), k)
    return Verdict(
        num_accepted=n,
        extra=says[n],
        extra_kind="bonus" if n == k else "recovered",
        extra_p=1.0,
        tokens=tokens,
        p=p,
        q=(1.0,) * k,
        # a block claims all its mass where the target first says something else, and nothing before or behind
        acceptance=p if verification == "token" else tuple(float(i + 1 == n) for i in range(k)),
        tests=tuple(tests),
    )


def _minus_q(weights: Tensor, row: Tensor, draft: Tensor, draft_probs: Tensor | None) -> Tensor:
    """Subtract the drafter's distribution of `row` from `weights`; nothing where row = K, past the draft."""
    k = draft.shape[0]
    inside = (row < k).double()
    row = row.clamp(max=k - 1)
    if draft_probs is None:
        return weights.index_add(0, draft[row], -inside)
    return weights - draft_probs.index_select(0, row)[0] * inside


def _block_mass(p: Tensor, q: Tensor) -> Tensor:
    """p_i of Algorithm 2, i = 0..K: the part of the target's probability that the block so far can still claim."""
    mass = [torch.ones(1, dtype=torch.float64, device=p.device)]
    for ratio in (p / q)[:, None]:
        mass.append((mass[-1] * ratio).clamp(max=1.0))
    return torch.cat(mass)


def _block_acceptance(mass: Tensor, draft: Tensor, draft_probs: Tensor | None, target_probs: Tensor) -> Tensor:
    """h_i of Algorithm 2, i = 1..K: h_K = p_K; before it, residual mass over residual mass plus 1 - p_i."""
    k = draft.shape[0]
    if k < 2:
        return mass[1:]
    scaled = target_probs[1:k].double() * mass[1:k, None]  # [K - 1, V]
    if draft_probs is None:
        scaled = scaled.scatter_add(1, draft[1:, None], -torch.ones(k - 1, 1, dtype=scaled.dtype, device=scaled.device))
    else:
        scaled = scaled - draft_probs[1:].double()
    residual = scaled.clamp_(min=0.0).sum(1)
    # 0 / 0 is p = q with nothing lost so far: the next position then claims the block for certain
    inner = residual / (residual + (1.0 - mass[1:k])).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.cat([inner, mass[k:]])
