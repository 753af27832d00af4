"""Which outcomes of a verification are worth a draft: B guesses, spread over the positions at which it can end.

An outcome is (k, t*): k drafted tokens accepted, then the extra token t*. At each position the guesses are the draft
model's own likeliest tokens, the drafted one left out, since the verification does not end there with it. So a rule
decides only how many each position gets. It gives every candidate a weight, and the B heaviest are guessed:

- `uniform`: the same number for every position;
- `geometric`: F_k = F_0 a^(k/(1+r)) for k < K and F_K = F_0 a^(K/(1+r)) (1-a)^(-1/(1+r)) (arXiv 2603.03251), where a is
  the acceptance rate of the run so far and r the exponent with which a guess's chance falls with its rank;
- `likeliest`: the outcomes that are likeliest by the draft model's own probabilities of this very round.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..settings import Settings
from .queued import queued

PRIOR_ROUNDS = 8.0  # verdicts that the belief before the first one is worth
PRIOR_ACCEPTANCE, PRIOR_EXPONENT = 0.5, 0.8


class Experience:
    """What the run so far tells about verdicts. It depends on tokens alone, so equal runs guess alike."""

    def __init__(self) -> None:
        self._accepted, self._judged = PRIOR_ROUNDS * PRIOR_ACCEPTANCE, PRIOR_ROUNDS
        self._ranks, self._logarithms = PRIOR_ROUNDS, PRIOR_ROUNDS / PRIOR_EXPONENT

    @property
    def acceptance(self) -> float:
        return self._accepted / self._judged

    @property
    def exponent(self) -> float:
        """r: the chance that the extra token's rank is n or more falls like n^-r (maximum likelihood)."""
        return self._ranks / self._logarithms

    def learn(self, num_accepted: int, draft_length: int, rank: int) -> None:
        """A verdict: of `draft_length` tokens `num_accepted` stayed, and the extra token had `rank`, from 0."""
        self._accepted += num_accepted
        self._judged += min(num_accepted + 1, draft_length)
        self._ranks += 1
        self._logarithms += math.log(rank + 1)


def weights(settings: Settings, candidates: Tensor, drafted: Tensor, experience: Experience) -> Tensor:
    """The weight of every candidate, [K + 1, R] like `candidates`, larger for those to be guessed first.

    candidates: the draft model's probabilities of its R likeliest tokens after each of 0 .. K drafted ones, descending,
    the drafted token left out. drafted [K]: its probabilities of the drafted tokens.
    """
    k, ranks = len(drafted), torch.arange(candidates.shape[1], device=candidates.device)
    if settings.fan_out == "likeliest":
        return candidates * _reached(settings, drafted, experience)[:, None]
    if settings.fan_out == "geometric":
        share = geometric(experience.acceptance, experience.exponent, k)
    else:
        share = [1.0] * (k + 1)
    counts = queued(split(settings.fan_out_budget, share), torch.int64, candidates.device)
    return (ranks < counts[:, None]).float()


def _reached(settings: Settings, drafted: Tensor, experience: Experience) -> Tensor:
    """[K + 1]: the chance that the verification ends at each position, over the probability that is left there for
    other tokens than the drafted one. A greedy draft's token stays as often as the draft model expects of it; one that
    was drawn stays as often as drawn ones did so far."""
    one = torch.ones(1, device=drafted.device)
    if settings.greedy:
        return torch.cat([one, drafted.cumprod(0)])
    a = experience.acceptance
    stays = torch.full_like(drafted, a)
    left = (1.0 - drafted).clamp(min=1e-3)
    return torch.cat([one, stays.cumprod(0)]) * torch.cat([(1.0 - a) / left, one])


def geometric(acceptance: float, exponent: float, draft_length: int) -> list[float]:
    """Shares of the budget by position, 0 .. K."""
    power = 1.0 / (1.0 + exponent)
    shares = [float(acceptance ** (k * power)) for k in range(draft_length + 1)]
    shares[-1] *= (1.0 - min(acceptance, 0.999)) ** -power
    return shares


def split(budget: int, shares: list[float]) -> list[int]:
    """`budget` guesses in proportion to `shares`, whole numbers by largest remainder, earlier positions first."""
    wanted = [budget * share / sum(shares) for share in shares]
    counts = [int(number) for number in wanted]
    order = sorted(range(len(shares)), key=lambda k: (counts[k] - wanted[k], k))
    for k in order[: budget - sum(counts)]:
        counts[k] += 1
    return counts
